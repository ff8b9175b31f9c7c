"""Redis in trouble, for real: frozen, killed, restarted, full, read-only, flushed, lying. Each costs a miss at most."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cache.stores.base import StoreError
from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.redis import RedisStore
from tests.cache.stores.fake_redis import OK, Command, HangUp, fake_redis
from tests.services import RedisServer, free_port, redis_server

KEY, OTHER = b"k" * 16, b"o" * 16
COOLDOWN = 0.3
Bump = tuple[str, int]


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that a test may harm."""
    with redis_server() as server:
        yield server


@asynccontextmanager
async def guarded(url: str, deadline: float = 0.05) -> AsyncIterator[GuardedStore]:
    guard = GuardedStore(RedisStore(url, timeout=deadline), Breaker(deadline=deadline, cooldown=COOLDOWN))
    await guard.open()
    yield guard
    await guard.close()


@asynccontextmanager
async def watched(store: RedisStore | GuardedStore) -> AsyncIterator[list[Bump]]:
    heard: list[Bump] = []
    task = asyncio.create_task(store.watch(lambda scope, generation: heard.append((scope, generation))))
    yield heard
    assert not task.done(), "a watcher outlives any failure"
    task.cancel()
    await asyncio.wait([task])


async def until(condition: Callable[[], object], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def hit_again(guard: GuardedStore, value: bytes, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while await guard.get(KEY) != value:
            await asyncio.sleep(0.02)


async def test_o42_a_frozen_redis_delays_the_first_few_and_nobody_after(own_redis: RedisServer) -> None:
    async with guarded(own_redis.url) as guard:
        assert await guard.set(KEY, b"v", 60)
        own_redis.pause()
        delays = []
        for _ in range(50):
            started = time.perf_counter()
            assert await guard.get(KEY) is None
            delays.append(time.perf_counter() - started)
        assert max(delays) < 0.15
        assert sum(delay > 0.01 for delay in delays) <= 7, "five failures, and perhaps a probe or two"
        assert sorted(delays)[25] < 0.001
        assert guard.breaker.state != "closed"
        own_redis.resume()
        await hit_again(guard, b"v", seconds=COOLDOWN + 0.5)
        assert guard.breaker.state == "closed"


async def test_o42_a_redis_frozen_for_long_is_found_again(own_redis: RedisServer) -> None:
    async with guarded(own_redis.url) as guard:
        await guard.set(KEY, b"v", 60)
        own_redis.pause()
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            assert await guard.get(KEY) is None
            await asyncio.sleep(0.01)
        own_redis.resume()
        await hit_again(guard, b"v", seconds=4)


async def test_a_killed_redis_is_a_miss_and_comes_back_by_itself(own_redis: RedisServer) -> None:
    async with guarded(own_redis.url) as guard:
        await guard.set(KEY, b"v", 60)
        own_redis.kill()
        started = time.perf_counter()
        for _ in range(200):
            assert await guard.get(KEY) is None
            assert await guard.set(KEY, b"v", 60) is False
        assert time.perf_counter() - started < 0.5
        assert guard.breaker.state != "closed"
        own_redis.restart()
        async with asyncio.timeout(4):
            while not await guard.set(KEY, b"new", 60):
                await asyncio.sleep(0.02)
        assert await guard.get(KEY) == b"new"


async def test_a_redis_that_is_not_there_at_start_is_used_when_it_comes(own_redis: RedisServer) -> None:
    own_redis.kill()
    async with guarded(own_redis.url) as guard:
        assert await guard.get(KEY) is None
        own_redis.restart()
        async with asyncio.timeout(4):
            while not await guard.set(KEY, b"v", 60):
                await asyncio.sleep(0.02)


async def test_o43_a_full_redis_refuses_writes_and_serves_hits() -> None:
    with redis_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        async with guarded(server.url, deadline=2) as guard:
            assert await guard.set(KEY, b"v", 60)
            stored = [await guard.set(b"%016d" % i, bytes(100_000), 60) for i in range(40)]
            assert stored[0] and not stored[-1]
            assert guard.counters["set"]["error:full"] == stored.count(False)
            assert await guard.get(KEY) == b"v"
            assert guard.breaker.state == "closed"


async def test_o43_a_read_only_replica_serves_hits(own_redis: RedisServer) -> None:
    async with guarded(own_redis.url) as guard:
        await guard.set(KEY, b"v", 60)
        own_redis.client().replicaof("127.0.0.1", str(free_port()))
        assert [await guard.set(KEY, b"w", 60) for _ in range(10)] == [False] * 10
        assert await guard.bump("all") is None
        assert await guard.get(KEY) == b"v"
        assert guard.counters["set"]["error:readonly"] == 10


async def test_a_flushed_redis_is_a_miss(own_redis: RedisServer) -> None:
    async with guarded(own_redis.url) as guard:
        await guard.set(KEY, b"v", 60)
        own_redis.client().flushall()
        assert await guard.get(KEY) is None
        assert guard.counters["get"] == {"miss": 1}


async def test_o45_a_list_under_our_key_is_a_miss_and_is_overwritten(redis: RedisServer) -> None:
    async with guarded(redis.url) as guard:
        redis.client().rpush(f"wg:r:{KEY.hex()}", "not", "ours")
        for _ in range(20):
            assert await guard.get(KEY) is None
        assert guard.counters["get"] == {"error:data": 20}
        assert guard.breaker.state == "closed", "one odd key says nothing about the rest"
        assert await guard.set(KEY, b"v", 60)
        assert await guard.get(KEY) == b"v"


async def test_generations_of_another_type_are_an_error_not_an_empty_answer(redis: RedisServer) -> None:
    async with guarded(redis.url) as guard:
        redis.client().set("wg:gen", "not ours")
        assert await guard.generations() is None
        assert await guard.bump("all") is None
        redis.client().delete("wg:gen")
        redis.client().hset("wg:gen", "all", "not a number")
        assert await guard.generations() is None


async def test_o44_every_key_expires(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, timeout=5)
    await store.open()
    async with watched(store) as heard:
        await store.set(KEY, b"v", 2)
        await store.set(KEY, b"w", 100)
        await store.set(OTHER, b"v", 1e-9)
        await store.bump("all")
        await until(lambda: heard, 1)
        own_redis.client().flushall()
        await store.set(KEY, b"v", 2)
        await until(lambda: own_redis.client().exists("wg:gen"), 3)
    lifetimes = {key: own_redis.client().pttl(key) for key in own_redis.client().scan_iter()}
    assert lifetimes.keys() == {b"wg:gen", f"wg:r:{KEY.hex()}".encode()}
    assert min(lifetimes.values()) > 0
    await store.close()


async def test_prefixes_are_kept_apart(redis: RedisServer) -> None:
    one, two = RedisStore(redis.url, "one", timeout=5), RedisStore(redis.url, "two", timeout=5)
    await one.set(KEY, b"v", 60)
    await one.bump("all")
    assert await two.get(KEY) is None
    assert await two.generations() == {}
    await asyncio.gather(one.close(), two.close())


@pytest.mark.parametrize(
    ("reply", "counted"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "error:full"),
        (b"-READONLY You can't write against a read only replica.\r\n", "error:readonly"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "error:busy"),
        (b"-NOAUTH Authentication required.\r\n", "error:denied"),
        (b"-MOVED 866 127.0.0.1:7001\r\n", "error:moved"),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", "error:data"),
        (b"*1\r\n$1\r\nv\r\n", "error:data"),
        (b":1\r\n", "error:data"),
        (None, "timeout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_o43_whatever_redis_answers_is_a_counted_miss(
    reply: bytes | None, counted: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        fake_redis(lambda command: OK if command[0] == b"PING" else reply) as fake,
        guarded(fake.url, deadline=0.02 if reply is None else 2) as guard,
    ):
        for _ in range(30):
            assert await guard.get(KEY) is None
        assert guard.counters["get"][counted] + guard.counters["get"]["skipped"] == 30
        assert len(caplog.records) == 1


@pytest.mark.parametrize("op", [b"GET", b"SET"])
async def test_o43_half_a_reply_and_a_hang_up(op: bytes) -> None:
    def script(command: Command) -> bytes:
        if command[0] == op:
            raise HangUp(b"$1000\r\nhalf")
        return OK

    async with fake_redis(script) as fake, guarded(fake.url) as guard:
        for _ in range(10):
            if op == b"GET":
                assert await guard.get(KEY) is None
            else:
                assert await guard.set(KEY, b"v", 60) is False
        counter = guard.counters[op.decode().lower()]
        assert counter["error:unavailable"] >= 5
        assert counter["error:unavailable"] + counter["skipped"] == 10


async def test_another_process_hears_a_bump_well_within_a_second(redis: RedisServer) -> None:
    one, two = RedisStore(redis.url, timeout=5), RedisStore(redis.unix_url, timeout=5)
    async with watched(one) as heard:
        await two.bump("tag:first")
        await until(lambda: heard, 1)
        started = time.perf_counter()
        generation = await two.bump("tag:a")
        await until(lambda: ("tag:a", generation) in heard, 0.3)
        assert time.perf_counter() - started < 0.3
    await asyncio.gather(one.close(), two.close())


async def test_a_watcher_whose_connection_is_cut_hears_what_it_missed(redis: RedisServer) -> None:
    store = RedisStore(redis.url, timeout=5)
    async with watched(store) as heard:
        await store.bump("tag:a")
        await until(lambda: heard, 1)
        for i in range(3):
            redis.client().execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            missed = await store.bump(f"tag:{i}")
            await until(lambda missed=missed, i=i: (f"tag:{i}", missed) in heard, 1)
    await store.close()


async def test_a_bump_whose_message_is_lost_is_heard_all_the_same(redis: RedisServer) -> None:
    store = RedisStore(redis.url, timeout=5)
    async with watched(store) as heard:
        await store.bump("tag:a")
        await until(lambda: heard, 1)
        redis.client().hset("wg:gen", mapping={"": "9000000000000", "tag:b": "9000000000000"})
        await until(lambda: ("tag:b", 9000000000000) in heard, 1.5)
    await store.close()


@pytest.mark.parametrize("accident", ["flushed", "restarted"])
async def test_purges_that_redis_forgot_are_put_back_by_those_who_heard_them(
    own_redis: RedisServer, accident: str
) -> None:
    store = RedisStore(own_redis.url, timeout=5)
    async with watched(store) as heard:
        for i in range(2_500):
            await store.bump(f"tag:{i}")
        await until(lambda: len(heard) == 2_500, 2)
        if accident == "flushed":
            own_redis.client().flushall()
        else:
            own_redis.restart()
        await until(lambda: own_redis.client().hlen("wg:gen") == 2_501, 6)
        assert await store.generations() == dict(heard)
        newest = max(generation for _, generation in heard)
        assert await store.bump("tag:new") > newest
    await store.close()


async def test_a_purge_made_while_redis_is_away_is_made_up_for(own_redis: RedisServer) -> None:
    async with guarded(own_redis.url) as guard, watched(guard) as heard:
        own_redis.kill()
        assert await guard.bump("model:m1") is None
        assert await guard.bump("") is None, "an impossible scope is not tried again"
        own_redis.restart()
        await until(lambda: [scope for scope, _ in heard] == ["model:m1"], 8)
        assert own_redis.client().hkeys("wg:gen") == [b"", b"model:m1"]
        made = heard[0][1]
        await asyncio.sleep(0.6)
        assert await guard.generations() == {"model:m1": made}, "and only once"


async def test_while_purges_cannot_be_heard_what_redis_holds_is_not_believed() -> None:
    deaf = True

    def script(command: Command) -> bytes | None:
        if command[0] == b"SUBSCRIBE":
            return None if deaf else b"*3\r\n$9\r\nsubscribe\r\n$6\r\nwg:gen\r\n:1\r\n"
        return {b"GET": b"$1\r\nv\r\n", b"HGET": b":0\r\n", b"HGETALL": b"*0\r\n"}.get(command[0], OK)

    async with fake_redis(script) as fake:
        store = RedisStore(fake.url, timeout=5)
        store.client.connect_timeout = 0.3
        assert await store.get(KEY) == b"v"
        async with watched(store), asyncio.timeout(10):
            while await store.get(KEY) is not None:
                await asyncio.sleep(0.01)
            for _ in range(50):
                assert await store.get(KEY) is None
                await asyncio.sleep(0.01)
            deaf = False
            while await store.get(KEY) != b"v":
                await asyncio.sleep(0.01)
        await store.close()


async def test_unless_the_purges_could_be_read_what_redis_holds_is_not_believed(redis: RedisServer) -> None:
    store = RedisStore(redis.url, timeout=5)
    await store.set(KEY, b"v", 60)
    redis.client().set("wg:gen", "not ours")
    with pytest.raises(StoreError):
        await store.generations()
    assert await store.get(KEY) is None
    redis.client().delete("wg:gen")
    await store.generations()
    assert await store.get(KEY) == b"v"
    await store.close()


async def test_strange_messages_on_the_channel_are_ignored(redis: RedisServer) -> None:
    store = RedisStore(redis.url, timeout=5)
    async with watched(store) as heard:
        await store.bump("tag:a")
        await until(lambda: heard, 1)
        for message in (b"", b"x", b"1", b"-1 all", b"1.5 all", b"\xff\xfe all", b"99999999999999 "):
            redis.client().publish("wg:gen", message)
        await store.bump("tag:b")
        await until(lambda: len(heard) == 2, 1)
        assert [scope for scope, _ in heard] == ["tag:a", "tag:b"]
    await store.close()


async def test_broken_connections_leave_nothing_behind(redis: RedisServer) -> None:
    store = RedisStore(redis.url, timeout=5)
    await store.set(KEY, b"v", 60)
    before = open_files(), len(asyncio.all_tasks())
    for _ in range(100):
        redis.client().execute_command("CLIENT", "KILL", "TYPE", "normal")
        try:
            assert await store.get(KEY) == b"v"
        except StoreError as error:
            assert error.kind == "unavailable"
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while await asyncio.gather(store.get(KEY), return_exceptions=True) != [b"v"]:
            await asyncio.sleep(0.01)
    after = open_files(), len(asyncio.all_tasks())
    assert after[0] <= before[0] + 1
    assert after[1] == before[1]
    await store.close()


FORK = """
import asyncio, os, sys
from cache.stores.redis import RedisStore

store = RedisStore(sys.argv[1], timeout=5)
loop = asyncio.new_event_loop()

async def check(value):
    for _ in range(300):
        await store.set(value * 16, value, 60)
        assert await store.get(value * 16) == value

loop.run_until_complete(check(b"before"))
child = os.fork()
if child == 0:
    asyncio.new_event_loop().run_until_complete(check(b"child"))
    os._exit(0)
loop.run_until_complete(check(b"parent"))
assert os.waitpid(child, 0)[1] == 0
loop.run_until_complete(store.close())
"""


def test_a_forked_child_gets_a_connection_of_its_own(redis: RedisServer) -> None:
    command = [sys.executable, "-c", FORK, redis.url]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 0, done.stderr
