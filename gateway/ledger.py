"""The ledger: what happened to every request, counted exactly, each under one outcome; the newest rows are kept for a
look.

Tokens are told apart: ``upstream`` were processed by an upstream for this request, ``served`` were given to the
caller, ``saved`` were served without an upstream. A hit costs nothing upstream and its tokens are never counted there
again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Outcome = Literal["exact", "semantic", "faq", "stale", "coalesced", "miss", "bypass", "error"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "semantic", "faq", "stale", "coalesced", "miss", "bypass", "error")
SAVED = frozenset(("exact", "semantic", "faq", "stale", "coalesced"))

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the latency histogram's buckets, seconds; one more holds the rest."""


class Group(NamedTuple):
    """What counters are kept apart by."""

    tenant: str
    model: str
    endpoint: str
    outcome: Outcome
    upstream: str


@dataclass(slots=True)
class Row:
    """One request. Times in seconds: ``at`` since 1970, ``latency`` and ``ttft`` from arrival. Token counts None where
    unknown.
    """

    at: float
    tenant: str = ""
    model: str = ""
    endpoint: str = ""
    outcome: Outcome = "error"
    upstream: str = ""
    status: int = 0
    stream: bool = False
    latency: float = 0.0
    ttft: float | None = None
    usage: dict[str, int] | None = None
    reason: str = ""
    request_id: str = ""


@dataclass(slots=True)
class Totals:
    """Sums over one group."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    provider_cached_tokens: int = 0
    unknown_usage: int = 0
    latency_sum: float = 0.0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))


class Ledger:
    """Counts rows. ``recent`` holds the newest, without prompts."""

    def __init__(self, keep_rows: int = 1000) -> None:
        self.totals: dict[Group, Totals] = {}
        self.recent: deque[Row] = deque(maxlen=keep_rows)

    def record(self, row: Row) -> None:
        """Adds a finished request."""
        group = Group(row.tenant, row.model, row.endpoint, row.outcome, row.upstream)
        totals = self.totals.get(group)
        if totals is None:
            totals = self.totals[group] = Totals()
        totals.requests += 1
        totals.latency_sum += row.latency
        totals.latency_counts[bisect_left(BOUNDS, row.latency)] += 1
        usage = row.usage
        if usage:
            totals.prompt_tokens += usage.get("prompt", 0)
            totals.output_tokens += usage.get("output", 0)
            totals.provider_cached_tokens += usage.get("cached", 0)
        else:
            totals.unknown_usage += 1
        self.recent.append(row)

    def summary(self, by: tuple[str, ...] = ("outcome",)) -> list[dict[str, str | int]]:
        """Sums by the named parts of `Group`, with upstream, served and saved tokens."""
        sums: dict[tuple[str, ...], dict[str, int]] = {}
        for group, totals in self.totals.items():
            key = tuple(str(getattr(group, name)) for name in by)
            line = sums.setdefault(key, dict.fromkeys(_COUNTED, 0))
            tokens = totals.prompt_tokens + totals.output_tokens
            line["requests"] += totals.requests
            line["served_tokens"] += tokens
            line["saved_tokens" if group.outcome in SAVED else "upstream_tokens"] += tokens
            line["provider_cached_tokens"] += 0 if group.outcome in SAVED else totals.provider_cached_tokens
            line["unknown_usage"] += totals.unknown_usage
        return [dict(zip(by, key, strict=True)) | line for key, line in sorted(sums.items())]


_COUNTED = ("requests", "served_tokens", "upstream_tokens", "saved_tokens", "provider_cached_tokens", "unknown_usage")
