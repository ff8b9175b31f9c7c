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

from cache.stores.leases import Leases, Told
from cache.stores.redis import RedisStore
from gateway.reading import Head
from gateway.sharing import _packed
from loadtest.stub_upstream import Reply, answer
from tests.field.conftest import B, Bench
from tests.field.reading import text_of, text_of_stream
from tests.gateway.conftest import Start

STREAMED = B | {"stream": True}
LEASE = 0.6

Gateway = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def gateway(start: Start, redis_cache: dict[str, Any]) -> Gateway:
    """Starts a gateway over the shared Redis; its leases are short."""

    @contextlib.asynccontextmanager
    async def begin(**redis: Any) -> AsyncIterator[Bench]:
        async with start(cache={"redis": redis_cache | redis}) as bench:
            shared = bench.gateway.app.runtime.shared_flights
            assert shared is not None
            shared.lease, shared.renew = LEASE, 0.1
            yield bench

    return begin


def slow(seconds: float = 0.5) -> Reply:
    return answer().delayed(seconds)


def paced(count: int = 10, seconds: float = 0.08) -> Reply:
    return answer(deltas=[f"w{n} " for n in range(count)]).paced(seconds)


WORDS = "".join(f"w{n} " for n in range(10))


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
        await self._leases.tell(self._name, self._token, Told(self._told, kind, data), 10)

    async def head(self, *, stream: bool) -> None:
        await self.tell(b"h", _packed(Head(200, [], "elsewhere", stream, not stream), time.time()))

    async def end(self, *, stored: float = 0) -> None:
        await self._leases.end(self._name, self._token, anyway=True, stored=stored)

    async def keep(self) -> None:
        while True:
            await self._leases.renew(self._name, self._token, LEASE, 10)
            await asyncio.sleep(LEASE / 4)


@contextlib.asynccontextmanager
async def leader_elsewhere(bench: Bench, redis_cache: dict[str, Any]) -> AsyncIterator[Leader]:
    """Leads the flight for `B`, for as long as its lease lasts."""
    explained = (await bench.gateway.client.post("/admin/explain", json=B)).json()
    store = RedisStore(redis_cache["url"], redis_cache["prefix"], timeout=1)
    await store.open()
    name, token = explained["fingerprint"].encode(), b"elsewhere"
    assert await store.leases.board(name, token, LEASE) == token
    yield Leader(store.leases, name, token)
    await store.close()


def chunk(word: str) -> bytes:
    return (
        b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word.encode()
    )
