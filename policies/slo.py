"""Service levels: whether a request reached its user in time. What did is goodput (the DistServe paper's word, Zhong et
al., OSDI 2024).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds, None where there is none: to the first token, per output token after it, to the end."""

    ttft: float | None = None
    tpot: float | None = None
    total: float | None = None

    def met(self, *, latency: float, ttft: float | None, output: int | None) -> bool | None:
        """Whether an answer that took ``latency`` seconds met all bounds; None where that cannot be known.

        ``ttft`` is None for an answer that came in one piece: its user saw nothing until the end, so it must have come
        by the time a stream within these bounds would have ended.
        """
        if self.total is not None and latency > self.total:
            return False
        if self.tpot is not None and output is None:
            return False if _over(ttft, self.ttft) else None
        after_first = max(0, (output or 1) - 1)
        if ttft is not None:
            if _over(ttft, self.ttft):
                return False
            return self.tpot is None or latency - ttft <= self.tpot * after_first
        if self.tpot is None:
            return not _over(latency, self.ttft)
        return latency <= self.ttft + self.tpot * after_first if self.ttft is not None else None


def _over(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value > bound
