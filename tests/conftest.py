"""What all tests share: the event loop of those that are coroutines, how they hold an upstream up, and that no random
example fails for the time it took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from hypothesis import HealthCheck, settings

from tests.steady import SteadyLoop

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    return {"steady": SteadyLoop}


@pytest.fixture
def gate() -> asyncio.Event:
    """Whatever an upstream holds back until it is set (`Reply.held`)."""
    return asyncio.Event()
