"""What the gateway's tests share: a real Redis, and gateways with their upstream."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from loadtest.stub_upstream import StubUpstream
from tests.field.conftest import Bench
from tests.gateway.nodes import SETTINGS, Two, node
from tests.harness import FakeClock, running_gateway, upstream
from tests.services import RedisServer, redis_server

Start = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
async def u() -> AsyncIterator[StubUpstream]:
    async with StubUpstream(models=("m1", "m2")) as made:
        yield made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def start(u: StubUpstream, clock: FakeClock) -> Start:
    """Starts a gateway in front of ``u``: ``start(cache={…}, tenants=[…], …)``."""

    @contextlib.asynccontextmanager
    async def begin(**config: Any) -> AsyncIterator[Bench]:
        whole = {"upstreams": [upstream(u.url)], **config}
        async with running_gateway(whole, clock) as gateway:
            yield Bench(gateway, u, clock, whole)

    return begin


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    """One for all tests that do it no harm."""
    with redis_server() as server:
        yield server


@pytest.fixture
def redis_cache(redis_process: RedisServer) -> dict[str, Any]:
    """``cache.redis`` in a corner of its own."""
    return {"url": redis_process.url, "prefix": uuid.uuid4().hex, "timeout": "1s"}


async def refreshed(bench: Bench, calls: int) -> None:
    """Waits until a refresh behind the callers has come and gone."""
    await bench.u.wait_calls(calls)
    await bench.at_rest()


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    """In the end, the engines that live must hold nothing."""
    async with contextlib.AsyncExitStack() as stack:
        prefill, decode, alone = [
            await stack.enter_async_context(node(name)) for name in ("prefill", "decode", "alone")
        ]
        config = {"upstreams": [prefill.upstream(), decode.upstream()], **SETTINGS}
        gateway = await stack.enter_async_context(running_gateway(config))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=alone.url, trust_env=False, timeout=30))
        yield Two(gateway, prefill, decode, client)
        for each in (prefill, decode):
            if not each.gone:
                await each.at_rest()
