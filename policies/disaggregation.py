"""Whether a prompt is computed on another engine than its answer: where that delays everybody together less.

A long prompt computed among running answers holds every one of them up; computed on an engine of its own it does not,
but its keys and values must be moved (Splitwise: Patel et al., ISCA 2024; DistServe: Zhong et al., OSDI 2024). Only
tokens that nobody holds count: a long prompt whose beginning is held is a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["split", "one token", "short", "warm", "prefill busy", "transfer slow"]

COMING = 1
"""Requests that will come while a prompt is computed, beside those that run: they are held up by it as well."""


@dataclass(frozen=True, slots=True)
class Side:
    """An engine on which the prompt could be computed.

    Attributes:
        uncached: prompt tokens that it would have to compute.
        pending: prompt tokens that it has to compute before.
        running: requests that decode there meanwhile.
        rate: prompt tokens per second.
    """

    uncached: int
    pending: float = 0.0
    running: int = 0
    rate: float = 5000.0

    @property
    def seconds(self) -> float:
        """Until it would have computed the prompt."""
        return (self.pending + self.uncached) / self.rate


@dataclass(frozen=True, slots=True)
class Decision:
    """``prefill``: the position of the engine that computes the prompt; None: it is not split, for this ``reason``.

    ``whole`` and ``split``: the seconds that either way is expected to cost the request and those it holds up.
    """

    prefill: int | None
    reason: Reason
    whole: float = 0.0
    split: float = 0.0


def decide(
    prompt: int,
    output: int | None,
    prefills: Sequence[Side],
    decode: Side,
    *,
    least: int,
    latency: float = 0.0,
    per_token: float = 0.0,
) -> Decision:
    """Where a prompt of so many tokens is computed, if its answer is decoded at ``decode``.

    Args:
        output: the most tokens that the answer may have; None: unknown.
        prefills: those that could compute it instead, at least one.
        least: uncached tokens below which nothing is split.
        latency, per_token: seconds that moving a prompt takes, as measured; what ``decode`` holds is not moved.
    """
    if output is not None and output <= 1:
        return Decision(None, "one token")
    if decode.uncached < least:
        return Decision(None, "short" if prompt < least else "warm")
    best = min(range(len(prefills)), key=lambda i: prefills[i].seconds)
    moving = latency + per_token * decode.uncached
    whole = decode.seconds + (decode.running + COMING) * decode.uncached / decode.rate
    split = prefills[best].seconds + moving
    if split <= whole:
        return Decision(best, "split", whole, split)
    return Decision(None, "prefill busy" if split - moving > whole else "transfer slow", whole, split)
