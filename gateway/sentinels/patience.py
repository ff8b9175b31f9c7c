"""Waiting for something that must come soon, or has failed to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PAUSE = 0.01
"""Seconds between two looks."""


async def comes_true(look: Callable[[], Awaitable[bool]], within: float) -> bool:
    """Whether ``look`` says so within so many seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within
    while not await look():
        if loop.time() >= until:
            return False
        await asyncio.sleep(PAUSE)
    return True
