"""Waiting for what must come about: for the condition itself, with a bound that only a fault can reach, and not for a
time in which it has always come about so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

PATIENCE = 20.0
"""Seconds for what must come about; only a fault takes so long."""

SOON = 3.0
"""A second for what must reach another process, and two in which the machine is busy with something else."""


async def until(true: Callable[[], object], what: str = "it came about") -> None:
    """Waits until ``true()`` is; fails the test, saying ``what`` did not come about, if that takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not _came_about(true, what, deadline):
        await asyncio.sleep(0.005)


def wait_until(true: Callable[[], object], what: str = "it came about", patience: float = PATIENCE) -> None:
    """The same where there is no event loop, or it runs in another thread; `patience` in seconds."""
    deadline = time.monotonic() + patience
    while not _came_about(true, what, deadline):
        time.sleep(0.002)


def _came_about(true: Callable[[], object], what: str, deadline: float) -> bool:
    late = time.monotonic() > deadline
    if true():
        return True
    if late:
        pytest.fail(f"waited in vain until {what}")
    return False
