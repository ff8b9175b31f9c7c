"""Purges through a real Redis: heard by every process within a second, made up for when missed, never lost."""

from __future__ import annotations

import asyncio

import pytest

from cache.stores.base import StoreError
from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.redis import RedisStore
from tests.cache.stores.fake_redis import OK, Command, fake_redis
from tests.cache.stores.redis_tools import KEY, guarded, until, watched
from tests.services import RedisServer


async def test_another_process_hears_a_bump_well_within_a_second(redis: RedisServer) -> None:
    one, two = RedisStore(redis.url, timeout=5), RedisStore(redis.unix_url, timeout=5)
    async with watched(one) as heard:
        await two.bump("tag:first")
        await until(lambda: heard, 1)
        async with asyncio.timeout(0.3):
            generation = await two.bump("tag:a")
            await until(lambda: ("tag:a", generation) in heard, 0.3)
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
        guard = GuardedStore(store, Breaker(deadline=5))
        assert await guard.ask(KEY) == (b"v", True)
        async with watched(store), asyncio.timeout(10):
            while await guard.get(KEY) is not None:
                await asyncio.sleep(0.01)
            for _ in range(50):
                assert await guard.ask(KEY) == (None, False)
                await asyncio.sleep(0.01)
            deaf = False
            while await guard.get(KEY) != b"v":
                await asyncio.sleep(0.01)
        await store.close()


async def test_unless_the_purges_could_be_read_what_redis_holds_is_not_believed(redis: RedisServer) -> None:
    store = RedisStore(redis.url, timeout=5)
    await store.set(KEY, b"v", 60)
    redis.client().set("wg:gen", "not ours")
    with pytest.raises(StoreError):
        await store.generations()
    with pytest.raises(StoreError, match="purges may have been missed"):
        await store.get(KEY)
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
