"""Waiting for something that must come soon, or has failed to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PAUSE = 0.01
"""Seconds between two looks."""
_STILL = 0.2
"""Seconds between two looks that count at most: if it took longer, it was this machine that stood still."""


async def comes_true(look: Callable[[], Awaitable[bool]], within: float) -> bool:
    """Whether ``look`` says so within so many seconds in which this process could look."""
    loop = asyncio.get_running_loop()
    waited, last = 0.0, loop.time()
    while not await look():
        if waited >= within:
            return False
        await asyncio.sleep(PAUSE)
        now = loop.time()
        waited, last = waited + min(now - last, _STILL), now
    return True
