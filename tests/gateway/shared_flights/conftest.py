"""Two gateways over one Redis, and a leader elsewhere that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from cache.response.shared_flights import SharedFlights
from cache.stores.leases import Leases, Told
from cache.stores.redis import RedisStore
from gateway.reading import Head
from gateway.sharing import _packed
from loadtest.stub_upstream import Reply, answer
from tests.field.conftest import B, Bench
from tests.field.reading import text_of, text_of_stream
from tests.gateway.conftest import Start
from tests.waiting import until

STREAMED = B | {"stream": True}
LEASE = 60.0
"""Seconds; longer than any test, so that only the tests that are about it see one run out."""

Gateway = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def gateway(start: Start, redis_cache: dict[str, Any]) -> Gateway:
    """Starts a gateway over the shared Redis: ``gateway(lease=…, cache={…}, timeout=…)``, the rest for `cache.redis`;
    ``lease`` is also its patience with a Redis that is gone.
    """

    @contextlib.asynccontextmanager
    async def begin(*, lease: float = LEASE, cache: dict[str, Any] | None = None, **redis: Any) -> AsyncIterator[Bench]:
        async with start(cache={"redis": redis_cache | redis, **(cache or {})}) as bench:
            shared = shared_flights(bench)
            shared.lease, shared.renew = lease, 0.1
            yield bench

    return begin


def shared_flights(bench: Bench) -> SharedFlights:
    shared = bench.gateway.app.runtime.shared_flights
    assert shared is not None
    return shared


async def following(*benches: Bench) -> None:
    """Waits until each of these gateways follows a leader elsewhere."""
    for bench in benches:
        heard = shared_flights(bench).store.counters["hear"]
        await until(lambda heard=heard: heard["ok"], "a gateway follows another")


async def left(bench: Bench) -> None:
    """Waits until this gateway follows no more."""
    counted = shared_flights(bench).store.counters["leave"]
    await until(lambda: counted["ok"], "a gateway has left the flight of another")


async def opened(bench: Bench) -> None:
    """Waits until the first of an answer has come through to the callers here."""
    flights = bench.gateway.app.runtime.flights
    await until(lambda: any(flight.opened for flight in flights.values()), "an answer has begun")


def words(count: int) -> str:
    return "".join(f"w{n} " for n in range(count))


def spoken(gate: asyncio.Event, said: int, count: int = 10) -> Reply:
    """Of so many words, all but the first few are held until the gate is set."""
    return answer(deltas=[f"w{n} " for n in range(count)]).held(gate, before=1 + said)


WORDS = words(10)


def collapsed(response: httpx.Response) -> bool:
    return "collapsed" in response.headers["cache-status"]


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    streamed = response.headers["content-type"].startswith("text/event-stream")
    return text_of_stream(response.content) if streamed else text_of(response.json())


async def at_rest(*benches: Bench) -> None:
    for bench in benches:
        await bench.at_rest()


class Leader:
    """A gateway elsewhere that does just what the test says."""

    def __init__(self, leases: Leases, name: bytes, token: bytes) -> None:
        self._leases = leases
        self._name = name
        self._token = token
        self._told = 0

    async def tell(self, kind: bytes, data: bytes) -> None:
        self._told += 1
        await self._leases.tell(self._name, self._token, Told(self._told, kind, data), LEASE)

    async def head(self, *, stream: bool) -> None:
        await self.tell(b"h", _packed(Head(200, [], "elsewhere", stream, not stream), time.time()))

    async def end(self, *, stored: float = 0) -> None:
        await self._leases.end(self._name, self._token, anyway=True, stored=stored)

    async def die(self) -> None:
        """Its lease runs out at once."""
        await self._leases.renew(self._name, self._token, 0.01, LEASE)


@contextlib.asynccontextmanager
async def leader_elsewhere(bench: Bench, redis_cache: dict[str, Any]) -> AsyncIterator[Leader]:
    """Leads the flight for `B` until it is told to end or to die."""
    explained = (await bench.gateway.client.post("/admin/explain", json=B)).json()
    store = RedisStore(redis_cache["url"], redis_cache["prefix"], timeout=5)
    await store.open()
    name, token = explained["fingerprint"].encode(), b"elsewhere"
    assert await store.leases.board(name, token, LEASE) == token
    yield Leader(store.leases, name, token)
    await store.close()


def chunk(word: str) -> bytes:
    return (
        b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word.encode()
    )
