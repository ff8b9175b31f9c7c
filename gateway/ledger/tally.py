"""Exact hits of one kept answer, counted where they happen at next to no cost, and added to their group later."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from gateway.ledger import counters as c
from gateway.ledger.rows import Row
from policies.pricing import Tokens
from policies.slo import Slo


@dataclass(slots=True, eq=False)
class Tally:
    """``row`` holds what its hits have in common. Of the hits since the last `add_to`: how many, their latency in
    microseconds, and its histogram.
    """

    row: Row
    tokens: Tokens | None
    slo: Slo | None
    hits: int = 0
    micros: int = 0
    judged: int = 0
    met: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * c.BUCKETS)

    def hit(self, latency: float) -> None:
        """Counts one, ``latency`` in seconds; its first byte is its last."""
        self.hits += 1
        self.micros += int(latency * 1e6 + 0.5)
        self.buckets[bisect_left(c.BOUNDS, latency)] += 1
        if self.slo is not None:
            output = self.tokens.output if self.tokens is not None else None
            met = self.slo.met(latency=latency, ttft=latency if self.row.stream else None, output=output)
            self.judged += met is not None
            self.met += met is True

    def add_to(self, count: c.Counters) -> None:
        """Moves what was counted into its group's counters."""
        hits = self.hits
        count[c.REQUESTS] += hits
        count[c.LATENCY_US] += self.micros
        count[c.TTFT_US] += self.micros
        for index, number in enumerate(self.buckets):
            if number:
                count[c.FIRST_LATENCY + index] += number
                count[c.FIRST_TTFT + index] += number
        if self.tokens is None:
            count[c.UNKNOWN_SERVED] += hits
        else:
            count[c.SERVED_PROMPT] += hits * self.tokens.prompt
            count[c.SERVED_OUTPUT] += hits * self.tokens.output
            count[c.SLO_MET_TOKENS] += self.met * self.tokens.output
        if self.row.cost is None:
            count[c.UNKNOWN_SAVED] += hits
        else:
            count[c.SAVED_PICO] += hits * self.row.cost
        count[c.SLO_JUDGED] += self.judged
        count[c.SLO_MET] += self.met
        self.hits = self.micros = self.judged = self.met = 0
        self.buckets = [0] * c.BUCKETS
