"""Fetch a KV block from a lower tier, or compute it again? Whichever is expected to be quicker, from what was measured.

A prefix is loaded from its first block on, so the only choice is where to stop: after the last block of some tier that
is worth its price, everything behind it is recomputed. A tier that lost is measured again from time to time by a small
fetch (a probe), or it would never be found to have recovered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class _Average:
    """An exponentially weighted mean. The longer ago the last sample, the less it counts against a new one."""

    def __init__(self, weight: float, half_life: float) -> None:
        self._weight = weight
        self._half_life = half_life
        self.value: float | None = None
        self.at: float | None = None

    def add(self, sample: float, now: float) -> None:
        if self.value is None or self.at is None:
            self.value = sample
        else:
            keep = (1 - self._weight) * 0.5 ** (max(0.0, now - self.at) / self._half_life)
            self.value += (1 - keep) * (sample - self.value)
        self.at = now


class Cost:
    """Learns seconds = latency + per_unit x size, the recent past counting more.

    For a tier `size` is in bytes, so `1 / per_unit` is its bandwidth, and the latency is that of its lookups; for
    prefill `size` is in tokens, so `1 / per_unit` is the prefill rate, and there is no latency.

    Args:
        weight: what a sample weighs against all before it, if these are fresh.
        half_life: seconds in which the weight of all before halves: after a pause a sample nearly replaces them.
    """

    def __init__(self, weight: float = 0.3, half_life: float = 10.0) -> None:
        self._latency = _Average(weight, half_life)
        self._per_unit = _Average(weight, half_life)

    def observe(self, size: float, seconds: float, now: float) -> None:
        """Record that `size` (> 0) units took `seconds`, latency included. Anything else is no measurement: ignored."""
        if size > 0 and seconds >= 0:
            self._per_unit.add(max(0.0, seconds - self.latency) / size, now)

    def observe_latency(self, seconds: float, now: float) -> None:
        """Record that an operation without payload took `seconds`."""
        if seconds >= 0:
            self._latency.add(seconds, now)

    @property
    def latency(self) -> float:
        """Seconds before the first unit arrives; 0 if never measured."""
        return self._latency.value or 0.0

    @property
    def per_unit(self) -> float | None:
        """Seconds a unit takes; None if never measured."""
        return self._per_unit.value

    @property
    def observed_at(self) -> float | None:
        """Time of the last `observe`, on the caller's clock; None before the first."""
        return self._per_unit.at

    def estimate(self, size: float) -> float | None:
        """Expected seconds for `size` units; None if never measured."""
        return None if self.per_unit is None else self.latency + self.per_unit * size


@dataclass(frozen=True)
class Decision:
    """How many leading blocks to fetch, tier by tier, and why.

    Attributes:
        fetch: (tier, blocks) in the order of the prefix, without zeros.
        fetch_seconds: expected for `fetch`; None if a tier in it was never measured.
        recompute_seconds: expected for computing the blocks of `fetch` instead, the time after which waiting for them
            no longer pays; None if prefill was never measured.
        refused: (tier, blocks) that are held but will be recomputed.
        reason: `faster`, `slower`, `unmeasured` (no rates yet: try), `probe` (a small fetch, to measure a tier that had
            lost), or `none` (nothing held that fills a step).
    """

    fetch: tuple[tuple[str, int], ...]
    fetch_seconds: float | None
    recompute_seconds: float | None
    refused: tuple[tuple[str, int], ...]
    reason: str

    @property
    def blocks(self) -> int:
        """Leading blocks to fetch, over all tiers."""
        return sum(count for _, count in self.fetch)


def decide(
    held: Sequence[tuple[str, int]],
    *,
    block_bytes: int,
    block_tokens: int,
    costs: Mapping[str, Cost],
    prefill: Cost,
    now: float,
    start: int = 0,
    step: int = 1,
    margin: float = 1.0,
    probe_after: float = 30.0,
) -> Decision:
    """Where to stop fetching and start computing.

    Args:
        held: (tier, blocks) that follow one another from the first block wanted, as `[("host", 12), ("redis", 4)]`.
        block_bytes, block_tokens: size of one block.
        costs: per tier, seconds by bytes loaded.
        prefill: seconds by tokens computed.
        now: on the clock of the observations.
        start: index in the prompt of the first block wanted (the blocks before it are on the device).
        step: fetching must end at a multiple of it in the prompt: a prefill chunk in blocks, so that a hit and a cold
            run share their chunk boundaries.
        margin: a fetch must be expected to take less than recomputing divided by this.
        probe_after: seconds after which a tier that keeps losing is measured again with one step of blocks.
    """

    def whole(end: int) -> int:
        return max(0, (start + end) // step * step - start)

    total = whole(sum(count for _, count in held))
    if not total:
        return _decision(held, 0, None, None, "none")
    if prefill.per_unit is None:
        return _decision(held, total, _seconds(held, total, block_bytes, costs), None, "unmeasured")

    per_block = prefill.per_unit * block_tokens
    best, best_gain, end = 0, 0.0, 0
    for _, count in held:
        end += count
        cut = whole(end)
        seconds = _seconds(held, cut, block_bytes, costs) or 0.0  # unmeasured: hope for the best, and know afterwards
        gain = cut * per_block - seconds * margin
        if gain > best_gain:
            best, best_gain = cut, gain
    reason = "faster" if best else "slower"
    measured_at = costs[_tier_at(held, best)].observed_at
    if best < total and measured_at is not None and now - measured_at >= probe_after:
        best, reason = whole(best + step), "probe"
    seconds = _seconds(held, best, block_bytes, costs)
    return _decision(held, best, seconds, best * per_block, "unmeasured" if seconds is None else reason)


def _tier_at(held: Sequence[tuple[str, int]], index: int) -> str:
    """The tier that holds block `index`, or the last one."""
    for tier, count in held:
        if index < count:
            return tier
        index -= count
    return held[-1][0]


def _portions(held: Sequence[tuple[str, int]], cut: int) -> tuple[tuple[str, int], ...]:
    """The first `cut` blocks of `held`, tier by tier."""
    portions = []
    for tier, count in held:
        if cut <= 0:
            break
        portions.append((tier, min(count, cut)))
        cut -= count
    return tuple((tier, count) for tier, count in portions if count)


def _seconds(held: Sequence[tuple[str, int]], cut: int, block_bytes: int, costs: Mapping[str, Cost]) -> float | None:
    """Expected seconds to fetch the first `cut` blocks; None if a tier among them was never measured."""
    estimates = [costs[tier].estimate(count * block_bytes) for tier, count in _portions(held, cut)]
    known = [seconds for seconds in estimates if seconds is not None]
    return sum(known) if len(known) == len(estimates) else None


def _decision(
    held: Sequence[tuple[str, int]], cut: int, seconds: float | None, recompute: float | None, reason: str
) -> Decision:
    fetched = _portions(held, cut)
    taken = dict(fetched)
    refused = tuple((tier, count - taken.get(tier, 0)) for tier, count in held if count > taken.get(tier, 0))
    return Decision(fetched, seconds, recompute, refused, reason)
