"""What all tests share: the event loop of those that are coroutines, and how they hold an upstream up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.steady import SteadyLoop

LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    return {"steady": SteadyLoop}


@pytest.fixture
def gate() -> asyncio.Event:
    """Whatever an upstream holds back until it is set (`Reply.held`)."""
    return asyncio.Event()
