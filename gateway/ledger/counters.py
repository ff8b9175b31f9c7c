"""The counters of one group: a flat list of whole numbers, the same in memory and as columns of the database.

Whole numbers add up exactly in any order: tokens, microseconds, pico-dollars.
"""

from __future__ import annotations

from collections.abc import Sequence

BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""Upper bounds (seconds, inclusive) of the buckets of both histograms; one more holds the rest."""
BUCKETS = len(BOUNDS) + 1

COUNTED = (
    "requests",
    "served_prompt_tokens",  # as callers were told
    "served_output_tokens",
    "unknown_served",  # answered well, but without a usage report
    "saved_pico",  # what saved answers would have cost
    "unknown_saved",  # saved answers of which nobody knows what they would have cost
    "calls",
    "cached_tokens",  # prompt tokens the provider had in its own cache
    "computed_tokens",  # prompt tokens it had not
    "unsplit_tokens",  # prompt tokens of which it did not say
    "cache_write_tokens",  # of the computed ones: those it put into its cache
    "output_tokens",
    "unknown_usage",  # calls without a usage report
    "cost_pico",
    "unknown_cost",  # calls of which nobody knows what they cost
    "slo_judged",
    "slo_met",
    "slo_met_tokens",
    "held_out",  # hits that were sent upstream all the same
    "held_out_judged",  # of them, those whose answer can be compared
    "held_out_agreed",
    "latency_us",
    "ttft_us",
)
LATENCY = tuple(f"latency_{index}" for index in range(BUCKETS))
TTFT = tuple(f"ttft_{index}" for index in range(BUCKETS))
COLUMNS = (*COUNTED, *LATENCY, *TTFT)

(
    REQUESTS,
    SERVED_PROMPT,
    SERVED_OUTPUT,
    UNKNOWN_SERVED,
    SAVED_PICO,
    UNKNOWN_SAVED,
    CALLS,
    CACHED,
    COMPUTED,
    UNSPLIT,
    CACHE_WRITE,
    OUTPUT,
    UNKNOWN_USAGE,
    COST_PICO,
    UNKNOWN_COST,
    SLO_JUDGED,
    SLO_MET,
    SLO_MET_TOKENS,
    HELD_OUT,
    HELD_OUT_JUDGED,
    HELD_OUT_AGREED,
    LATENCY_US,
    TTFT_US,
) = range(len(COUNTED))
FIRST_LATENCY = len(COUNTED)
FIRST_TTFT = FIRST_LATENCY + BUCKETS

Counters = list[int]


def counters() -> Counters:
    """All at zero."""
    return [0] * len(COLUMNS)


def add(into: Counters, more: Sequence[int]) -> None:
    """Adds ``more`` in place."""
    for index, value in enumerate(more):
        if value:
            into[index] += value


def quantile(share: float, counts: Sequence[int]) -> float | None:
    """The ``share`` quantile in seconds of a histogram over `BOUNDS`, interpolated within its bucket; None when empty.

    What lies beyond the last bound is given as that bound.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank, below, low = share * total, 0, 0.0
    for bound, count in zip(BOUNDS, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * max(0.0, rank - below) / count
        below += count
        low = bound
    return BOUNDS[-1]
