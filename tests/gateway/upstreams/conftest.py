"""Every test here runs on asyncio's own event loop and on uvloop: their transports differ at the edges."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from gateway.upstreams.client import UpstreamClient
from tests.steady import SteadyLoop

LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    return {"asyncio": SteadyLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient()
    yield client
    await client.close()
