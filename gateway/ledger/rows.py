"""What the ledger is told: a `Row` for every request that ended, a `Call` for every upstream call that ended.

They are kept apart because they are not one to one: a hit calls nobody, a refresh answers nobody, and of callers who
share one call only the call itself costs anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.telemetry.trace import Trace

Outcome = Literal["exact", "semantic", "faq", "stale", "coalesced", "miss", "bypass", "error"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "semantic", "faq", "stale", "coalesced", "miss", "bypass", "error")
SAVED = frozenset(("exact", "semantic", "faq", "stale", "coalesced"))
"""Outcomes whose answer no upstream had to compute for this request."""


@dataclass(slots=True)
class Row:
    """One request. Times in seconds: ``at`` since 1970, ``latency`` and ``ttft`` from arrival by a monotonic clock.

    ``usage`` is what the caller was told (keys ``prompt``, ``output``, ``cached``, ``cache_write``); None where it is
    unknown. ``held_out``: it would have been a hit, and whether the answers agree (`gateway.holdout`). ``cost``: what
    the answer cost or would have cost, pico-dollars, as the ledger finds; None where unknown. ``trace``: where it
    stands in its caller's trace, if traces are exported.
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
    prompt: str = ""
    held_out: str = ""
    cost: int | None = None
    trace: Trace | None = None


@dataclass(slots=True)
class Call:
    """One upstream call, counted under the ``outcome`` of the request that caused it: a refresh under ``stale``.

    ``at``: unix seconds when it ended. ``usage`` None: it may have computed and cost something, and nobody knows what.
    """

    at: float
    tenant: str
    model: str
    endpoint: str
    upstream: str
    outcome: Outcome
    stream: bool
    usage: dict[str, int] | None
