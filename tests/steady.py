"""An event loop whose clock stands still while its process does.

On a machine that stops for a second at any moment, timers are due before the bytes are read that came in time, and a
test of what comes first is decided by chance. Here the clock counts what this thread has computed and how long the loop
has waited, each wait no longer than it was meant to be; so what a test's own coroutines do to each other comes in the
order in which they would do it on a machine of their own.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from typing import Any


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self._waited = time.monotonic() - time.thread_time()

    def now(self) -> float:
        return self._waited + time.thread_time()

    def select(self, timeout: float | None = None) -> list[Any]:
        began, computed = time.monotonic(), time.thread_time()
        found = super().select(timeout)
        took = time.monotonic() - began - (time.thread_time() - computed)
        self._waited += min(took, math.inf if timeout is None else max(timeout, 0.0))
        return found


class SteadyLoop(asyncio.SelectorEventLoop):
    """Its time begins with `time.monotonic()` and falls behind it."""

    def __init__(self) -> None:
        self._steady = _Selector()
        super().__init__(self._steady)

    def time(self) -> float:
        return self._steady.now()
