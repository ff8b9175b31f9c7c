"""Waiting for what must come about, on a machine that may stand still for seconds at any moment.

A test that waits for a time says nothing on such a machine; one that waits for a condition does. Where the time itself
is what a test is about, only the time counts in which this process was running.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

PATIENCE = 20.0
"""Seconds for what must come about; only a fault takes so long."""
TICK, GAP = 0.005, 0.02
"""Seconds between two looks at the clock, and how many of those since the last look count at most."""


async def until(true: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Waits until ``true()`` is; fails the test, saying ``what`` did not come about, if that takes too long."""
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {patience:g} s in vain until {what}")
        await asyncio.sleep(TICK)


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """The block takes so long at most, not counting the time in which this process stood still. Raises TimeoutError."""
    async with asyncio.timeout(None) as limit:

        async def count() -> None:
            ran, last = 0.0, time.monotonic()
            while ran < seconds:
                await asyncio.sleep(TICK)
                now = time.monotonic()
                ran, last = ran + min(now - last, GAP), now
            limit.reschedule(asyncio.get_running_loop().time())

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()
