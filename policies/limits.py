"""Token buckets: how many requests or tokens a tenant may spend, by a clock that the caller brings."""

from __future__ import annotations

import math


class Bucket:
    """``rate`` units per minute flow in, at most one minute's worth is held; it starts full. ``now``: seconds that
    never go back.
    """

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate / 60
        self._capacity = rate
        self._level = rate
        self._at = now

    def at_rate(self, rate: float, now: float) -> None:
        """Goes on at another rate, with what it holds as far as that still fits."""
        self._refill(now)
        self._rate, self._capacity = rate / 60, rate
        self._level = min(self._level, rate)

    def take(self, amount: float, now: float) -> float:
        """Takes ``amount`` and returns 0, or takes nothing and returns the seconds until it could."""
        self._refill(now)
        if self._level >= amount:
            self._level -= amount
            return 0.0
        return (amount - self._level) / self._rate if self._rate > 0 else math.inf

    def spend(self, amount: float, now: float) -> None:
        """Takes ``amount`` after the fact; the level may fall below zero, and later callers wait for it."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
