"""Redis in trouble, for real: frozen, killed, restarted, full, read-only, flushed, lying. Each costs a miss at most."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache.stores.base import StoreError
from cache.stores.breaker import GuardedStore
from cache.stores.redis import RedisStore
from tests.cache.stores.fake_redis import OK, Command, HangUp, fake_redis
from tests.cache.stores.redis_tools import COOLDOWN, KEY, OTHER, guarded, until, watched
from tests.services import RedisServer, free_port, redis_server


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
        clock, delays = asyncio.get_running_loop().time, []
        for _ in range(50):
            started = clock()
            assert await guard.get(KEY) is None
            delays.append(clock() - started)
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
        clock = asyncio.get_running_loop().time
        started = clock()
        for _ in range(200):
            assert await guard.get(KEY) is None
            assert await guard.set(KEY, b"v", 60) is False
        assert clock() - started < 0.5
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
