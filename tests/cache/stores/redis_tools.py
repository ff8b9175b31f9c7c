"""What the tests of the Redis store have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.redis import RedisStore

KEY, OTHER = b"k" * 16, b"o" * 16
COOLDOWN = 0.3
Bump = tuple[str, int]


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
