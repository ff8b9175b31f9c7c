"""An event loop on simulated time: where nothing is left to do, the clock jumps to the next timer. No sockets, no
waiting, and the same schedule every time.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jump(selectors.SelectSelector):
    """Waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """``time`` begins at 0 and moves only by jumps; as a gateway's clock it tells unix seconds as well."""

    EPOCH = 1_800_000_000.0

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class SimulatedClock:
    """The loop's time, for those who take a clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.monotonic = loop.time

    def time(self) -> float:
        return SimulatedLoop.EPOCH + self.monotonic()
