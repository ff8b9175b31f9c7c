"""The gateway's one source of time, so that tests can hold the hands."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """``time``: unix seconds, may jump; ``monotonic``: seconds that never go back."""

    def time(self) -> float: ...
    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self.time = time.time
        self.monotonic = time.monotonic
