"""Field cases, section F: a shared store in any trouble costs a miss, and nothing is kept for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.response.entry import Entry, decode, encode
from loadtest.stub_upstream import StubUpstream
from tests.cache.stores.fake_redis import NIL, OK, Command, FakeRedis, HangUp, fake_redis
from tests.field.conftest import CHAT, B, Bench, World, tools
from tests.field.gateway_process import gateway_process
from tests.field.reading import ASKS
from tests.harness import upstream
from tests.services import RedisServer, redis_server
from tests.waiting import SOON

STREAMED = B | {"stream": True}
EMBED: dict[str, Any] = {"model": "m1", "input": "a"}
EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    *ASKS.values(),
    *((path, {**ask, "stream": True, "seed": 1}) for path, ask in ASKS.values()),
    ("/v1/embeddings", EMBED),
    ("/v1/embeddings", EMBED | {"input": ["b", "c"]}),
    ("/v1/messages/count_tokens", {"model": "m1", "messages": [{"role": "user", "content": "x"}]}),
]


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that a test may harm."""
    with redis_server() as server:
        yield server


def over(url: str, folder: Path, *, memory: bool = False, short_path: bool = True) -> World:
    """A world over this Redis."""
    cache: dict[str, Any] = {"redis": {"url": url, "timeout": "50ms"}}
    return World("redis", short_path, cache if memory else {**cache, "memory": "off"}, folder)


def past_cooldown(bench: Bench) -> None:
    """Lets the breaker believe that its cooldown is over."""
    breaker = shared(bench).breaker
    breaker.clock = lambda now=breaker.clock: now() + 10


def shared(bench: Bench) -> Any:
    return bench.gateway.app.runtime.shared


async def took(bench: Bench, ask: dict[str, Any]) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    response = await bench.gateway.client.post(CHAT, json=ask)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"].startswith("ans-")
    return clock() - began


@pytest.mark.parametrize("memory", [False, True], ids=["redis only", "memory above"])
@pytest.mark.parametrize("short_path", [True, False], ids=["wire", "full"])
async def test_o42_a_frozen_redis_delays_the_first_few_only(
    own_redis: RedisServer, tmp_path: Path, memory: bool, short_path: bool
) -> None:
    async with over(own_redis.url, tmp_path, memory=memory, short_path=short_path).bench() as bench:
        for seed in range(5):
            await bench.miss(B | {"seed": seed})
        own_redis.pause()
        try:
            times = [await took(bench, B | {"seed": seed % 10}) for seed in range(50)]
        finally:
            own_redis.resume()
        assert max(times) < 0.5, "no request waits for a store that does not answer"
        assert sorted(times)[25] < 0.05
        assert sum(time > 0.04 for time in times) <= 15, "once the circuit is open nobody waits at all"
        assert shared(bench).breaker.state == "open"
        ready = (await bench.gateway.client.get("/readyz")).json()
        assert ready == {"status": "ready", "stores": {"redis": "open"}}
        metrics = (await bench.gateway.client.get("/metrics")).text
        assert next(line for line in metrics.splitlines() if "store_circuit{" in line).endswith(" 2.0")
        past_cooldown(bench)
        async with asyncio.timeout(5):
            while not (await bench.send(B | {"seed": 0})).is_hit:
                await asyncio.sleep(0.05)
        await bench.hit(B | {"seed": 1})
        if not memory:
            assert shared(bench).breaker.state == "closed"


async def test_o42_a_purge_that_others_may_not_hear_of_says_so(own_redis: RedisServer, tmp_path: Path) -> None:
    async with over(own_redis.url, tmp_path, memory=True).bench() as bench:
        await bench.miss(B)
        own_redis.pause()
        try:
            purged = await bench.gateway.client.post("/admin/purge", json={"model": "m1"})
        finally:
            own_redis.resume()
        assert purged.json()["everywhere"] is False
        await bench.miss(B)


async def test_o43_a_redis_that_dies_and_comes_back_empty_costs_misses(own_redis: RedisServer, tmp_path: Path) -> None:
    async with over(own_redis.url, tmp_path).bench() as bench:
        await bench.miss(B)
        await bench.hit(B)
        own_redis.kill()
        for _ in range(8):
            assert (await bench.miss(B)).status == 200
        own_redis.restart()
        await asyncio.sleep(2.1)  # the client's longest back-off
        past_cooldown(bench)
        await bench.send(B)
        await bench.hit(B)


async def test_o43_a_redis_that_was_never_there_costs_nothing_but_its_hits(tmp_path: Path) -> None:
    async with over("redis://127.0.0.1:1/0", tmp_path).bench() as bench:
        for _ in range(3):
            assert (await bench.miss(B)).status == 200
    async with over("redis://127.0.0.1:1/0", tmp_path, memory=True).bench() as bench:
        await bench.miss(B)
        await bench.hit(B)


TROUBLE = {
    "full": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "readonly": b"-READONLY You can't write against a read only replica.\r\n",
    "busy": b"-LOADING Redis is loading the dataset in memory\r\n",
    "denied": b"-NOAUTH Authentication required.\r\n",
    "moved": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "data": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "protocol": b"!nonsense\r\n",
    "unavailable": b"",  # half a reply, then the end
}


@contextlib.asynccontextmanager
async def troubled(bad: bytes, *ops: bytes) -> AsyncIterator[FakeRedis]:
    """A Redis that forgets everything, and answers these commands badly."""

    def script(command: Command) -> bytes | None:
        if command[0] in ops:
            if not bad:
                raise HangUp(b"$400\r\nWGE\x01")
            return bad
        if command[0] == b"SUBSCRIBE":
            return b">3\r\n$9\r\nsubscribe\r\n$%d\r\n%s\r\n:1\r\n" % (len(command[1]), command[1])
        return {b"GET": NIL, b"HGET": NIL, b"HGETALL": b"%0\r\n", b"PING": b"+PONG\r\n"}.get(command[0], OK)

    async with fake_redis(script) as fake:
        yield fake


@pytest.mark.parametrize("ops", [(b"GET",), (b"SET",), (b"GET", b"SET")], ids=["GET", "SET", "both"])
@pytest.mark.parametrize("kind", TROUBLE)
async def test_o43_no_answer_of_redis_harms_a_request(
    tmp_path: Path, kind: str, ops: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with troubled(TROUBLE[kind], *ops) as fake, over(fake.url, tmp_path).bench() as bench:
        for seed in range(30):
            ask = (STREAMED if seed % 2 else B) | {"seed": seed // 3}
            reply = await bench.send(ask)
            assert (reply.status, reply.rose) == (200, 1)
            assert reply.text == f"ans-{seed + 1}"
        for op in ops:
            counted = shared(bench).counters[op.decode().lower()]
            assert counted.keys() & {f"error:{kind}", "error:unavailable"}, counted
        told = [record for record in caplog.records if record.levelno >= logging.INFO and "edis" in record.getMessage()]
        assert len(told) <= 8, [record.getMessage() for record in told]


async def test_o43_hits_go_on_where_only_writes_fail(own_redis: RedisServer, tmp_path: Path) -> None:
    async with over(own_redis.url, tmp_path).bench() as bench:
        await bench.miss(B)
        with own_redis.client() as client:
            client.config_set("maxmemory", "1")
            for seed in range(10):
                await bench.miss(B | {"seed": seed})
                await bench.hit(B)
            assert shared(bench).counters["set"]["error:full"] == 10
            assert shared(bench).breaker.state == "closed"


async def test_o44_everything_expires(world: World) -> None:
    settings = {"ttl": "2s", "keep_stale": 0}
    async with world.bench(cache=settings) as bench:
        for path, ask in EVERYTHING:
            await bench.miss(ask, path)
            await bench.hit(ask, path)
        await bench.gateway.client.post("/admin/purge", json={"tag": "x"})
        if world.store == "memory":
            bench.clock.advance(2.5)
        else:
            await asyncio.sleep(2.1)
        for path, ask in EVERYTHING:
            await bench.miss(ask, path)


async def test_o44_no_key_in_redis_is_without_a_ttl(own_redis: RedisServer, tmp_path: Path) -> None:
    async with over(own_redis.url, tmp_path).bench(
        cache={"stale_while_revalidate": "1m", "ttl": "1h", "keep_stale": 0}
    ) as bench:
        for path, ask in EVERYTHING:
            await bench.miss(ask, path)
        await bench.miss(B | {"seed": 77}, x_warmgate_ttl="100", x_warmgate_tags="a,b", x_warmgate_namespace="n")
        for order in ({"tag": "a"}, {"model": "m1", "soft": True}, {"before": bench.clock.time() - 1}, {"all": True}):
            assert (await bench.gateway.client.post("/admin/purge", json=order)).json()["everywhere"]
        with own_redis.client() as client:
            lives = {name: client.pttl(name) for name in client.scan_iter()}
    assert len(lives) > len(EVERYTHING)
    assert min(lives.values()) > 0
    assert max(life for name, life in lives.items() if b":r:" in name) <= 3_660_000


async def test_o44_with_redis_down_the_memory_tier_expires_as_well(tmp_path: Path) -> None:
    world = over("redis://127.0.0.1:1/0", tmp_path, memory=True)
    async with world.bench(cache={"ttl": "2s"}) as bench:
        for path, ask in EVERYTHING:
            await bench.miss(ask, path)
            await bench.hit(ask, path)
        bench.clock.advance(2.5)
        for path, ask in EVERYTHING:
            await bench.miss(ask, path)


async def test_o44_a_lower_tier_never_lengthens_a_life(own_redis: RedisServer, tmp_path: Path) -> None:
    """Derived: what a second gateway reads from Redis lives on only as long as it would have there."""
    world = over(own_redis.url, tmp_path, memory=True)
    async with StubUpstream() as u, world.bench(u) as one, world.bench(u, one.clock) as other:
        await one.miss(B, x_warmgate_ttl="100")
        one.clock.advance(99)
        hit = await other.hit(B)
        assert "ttl=1;" in hit.cache_status
        assert hit.response.headers["age"] == "99"
        one.clock.advance(1)
        await other.miss(B)


def of_another_version(raw: bytes, version: int) -> bytes:
    return raw[:3] + bytes([version]) + raw[4:]


def spoilt(raw: bytes, other: bytes) -> dict[str, bytes]:
    """Values that may lie under a key but are no entry for its request."""
    return {
        "format v-1": of_another_version(raw, 0),
        "format v+1": of_another_version(raw, 2),
        "empty": b"",
        "half JSON": b'{"choices": [{"mess',
        "valid JSON of another request": b'{"choices":[{"index":0,"message":{"content":"ans-foreign"}}]}',
        "an entry of another request": other,
        "cut short": raw[: len(raw) // 2],
        "one byte short": raw[:-1],
        "one byte more": raw + b"x",
        "head only": raw[:20],
        "flipped in the message": raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:],
        "flipped in the fingerprint": raw[:25] + bytes([raw[25] ^ 128]) + raw[26:],
        "twice": raw * 2,
        "text": b"hello",
    }


@pytest.mark.parametrize("world", ["disk-wire", "disk-full", "redis-wire", "redis-full"], indirect=True)
async def test_o45_whatever_lies_under_the_key_is_a_miss_and_overwritten(bench: Bench) -> None:
    store = shared(bench).store
    foreign = B | {"messages": [{"role": "user", "content": "something else"}]}
    await bench.miss(B)
    await bench.miss(foreign)
    key = await bench.key_of(B)
    raw, other = await store.get(key), await store.get(await bench.key_of(foreign))
    assert raw is not None and other is not None
    for name, value in spoilt(raw, other).items():
        await store.set(key, value, 60)
        before = bench.gateway.app.runtime.recall.bad_entries.total()
        reply = await bench.miss(STREAMED if "flipped" in name else B)
        assert (reply.status, reply.text) == (200, f"ans-{bench.u.n}"), name
        assert bench.gateway.app.runtime.recall.bad_entries.total() > before, name
        assert (await bench.hit(B)).text == reply.text, name


@pytest.mark.parametrize("world", ["redis-wire", "redis-full"], indirect=True)
async def test_o45_a_value_of_another_type_is_a_miss_and_overwritten(
    bench: Bench, world: World, redis_process: RedisServer
) -> None:
    name = f"{world.cache['redis']['prefix']}:r:{(await bench.key_of(B)).hex()}"
    with redis_process.client() as client:
        for fill in (client.rpush, client.sadd, client.pfadd):
            client.delete(name)
            fill(name, "x")
            reply = await bench.miss(B)
            assert (reply.status, reply.text) == (200, f"ans-{bench.u.n}")
            assert (await bench.hit(B)).text == reply.text
        client.delete(name)
        client.hset(name, "a", "b")
        await bench.miss(B)
        await bench.hit(B)


@pytest.mark.parametrize("world", ["redis-wire", "disk-wire"], indirect=True)
async def test_o45_an_entry_whose_answer_cannot_be_rendered_is_a_miss(bench: Bench) -> None:
    """Derived: right version, checksum and fingerprint, but an answer in a form that this version does not know."""
    store = shared(bench).store
    await bench.miss(B)
    key = await bench.key_of(B)
    raw = await store.get(key)
    assert raw is not None
    fingerprint = raw[20:52]
    entry: Entry = decode(raw, fingerprint)
    for message in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"choices":1}',
        b'{"choices":[{"message":null}]}',
        b'{"no":"choices"}',
    ):
        for ask in (B, STREAMED):
            await store.set(key, encode(replace(entry, message=message)), 60)
            reply = await bench.send(ask)
            assert (reply.status, reply.rose, reply.text) == (200, 1, f"ans-{bench.u.n}"), message


@pytest.mark.parametrize("short_path", [True, False], ids=["wire", "full"])
@pytest.mark.parametrize("memory", [False, True], ids=["redis only", "memory above"])
async def test_two_gateways_on_one_redis_share_answers_and_purges(
    own_redis: RedisServer, tmp_path: Path, memory: bool, short_path: bool
) -> None:
    world = over(own_redis.url, tmp_path, memory=memory, short_path=short_path)
    async with StubUpstream() as u, world.bench(u) as one, world.bench(u) as other:
        for path, ask in EVERYTHING:
            missed = await one.miss(ask, path)
            hit = await other.hit(ask, path)
            if path != "/v1/embeddings" and "count" not in path:
                assert hit.text == missed.text
        await other.miss(B | {"seed": 8})
        await one.hit(B | {"seed": 8})
        await one.hit(B)
        assert (await other.gateway.client.post("/admin/purge", json={"model": "m1"})).json()["everywhere"]
        async with asyncio.timeout(SOON):
            while (await one.send(B)).rose == 0:
                await asyncio.sleep(0.02)
        await other.hit(B)


async def test_o07_three_processes_with_other_hash_seeds_share_one_entry(own_redis: RedisServer) -> None:
    nested = tools("a", "b", "c", "d", "e", anyOf=[{"x": {"y": [1, {"z": None}]}}, {"k": {"b": 1, "a": 2}}])
    ask = B | {"tools": nested}
    async with StubUpstream() as u, contextlib.AsyncExitStack() as stack:
        config = {
            "upstreams": [upstream(u.url)],
            "cache": {"memory": "off", "redis": {"url": own_redis.url, "timeout": "1s"}},
        }
        starting = [gateway_process(config, PYTHONHASHSEED=seed) for seed in ("0", "1", "4711")]
        clients = await asyncio.gather(*map(stack.enter_async_context, starting))
        shuffled = orjson.dumps({name: ask[name] for name in reversed(list(ask))})
        texts = []
        for number in range(50):
            body = shuffled if number % 2 else orjson.dumps(ask)
            response = await clients[number % 3].post(CHAT, content=body)
            texts.append(response.json()["choices"][0]["message"]["content"])
            if number == 0:
                async with asyncio.timeout(2):
                    while not _entries(own_redis):
                        await asyncio.sleep(0.01)
        assert set(texts) == {"ans-1"}
        assert u.n == 1
        assert len(_entries(own_redis)) == 1


def _entries(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        return [name for name in client.scan_iter() if b":r:" in name]
