"""Stores under test with the time in the test's hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cache.stores.base import SharedStore
from cache.stores.disk import DiskStore
from cache.stores.redis import RedisStore
from tests.services import RedisServer, redis_server

NOW = 1_800_000_000.0


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """A Redis that is empty and must be left running; tests that harm it start their own."""
    shared_redis.client().flushall()
    return shared_redis


@dataclass
class Bench:
    """A shared store and its time."""

    store: SharedStore
    advance: Callable[[float], None]
    clock: FakeClock


@pytest.fixture(params=["disk", "redis", "redis-unix"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Bench]:
    """The stores that must all keep the same contract."""
    if request.param == "disk":
        store, advance = DiskStore(tmp_path, 16 << 20, clock), clock.advance
    else:
        server: RedisServer = request.getfixturevalue("redis")
        url = server.url if request.param == "redis" else server.unix_url
        store, advance = RedisStore(url, timeout=5.0, clock=clock), lambda seconds: _age(server, clock, seconds)
    await store.open()
    yield Bench(store, advance, clock)
    await store.close()


def _age(server: RedisServer, clock: FakeClock, seconds: float) -> None:
    """What Redis would hold after `seconds`: it keeps its own time, so the keys are made older instead."""
    clock.advance(seconds)
    client = server.client()
    for key in client.scan_iter():
        left = client.pttl(key)
        assert left != -1, f"{key} has no expiry"
        client.pexpire(key, left - int(seconds * 1000))


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that a test may harm."""
    with redis_server() as server:
        yield server
