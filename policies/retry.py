"""When to try an upstream again: after a random pause that grows with each round, and never sooner than it asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retries:
    """``rounds``: how often all upstreams of a model are tried once more. ``base``: seconds, the longest pause before
    the first; doubled for each further one. ``longest``: seconds that a caller is kept waiting for a round, at most.
    """

    rounds: int
    base: float
    longest: float

    def pause(self, done: int, asked: float | None, draw: float) -> float | None:
        """Seconds until the next round after ``done`` of them; None: there is none. ``asked``: seconds that the
        upstream wants to be left alone (``retry-after``). ``draw``: random, from 0 to 1: callers who failed together
        shall not come back together ("full jitter": M. Brooker, Exponential Backoff And Jitter, AWS 2015).
        """
        if done >= self.rounds or (asked is not None and asked > self.longest):
            return None
        return (asked or 0.0) + draw * min(self.longest, self.base * 2.0**done)
