"""Samples of wall and processor time, and how they are printed."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field


@dataclass
class Samples:
    """Wall and processor seconds of one case."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)


def say(text: str) -> None:
    """Progress; the figures themselves go to stdout."""
    print(text, file=sys.stderr, flush=True)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def rates(seconds: list[float], count: int = 1) -> str:
    """Median and range of how many a second, from seconds for `count`."""
    return spread([count / value for value in seconds])
