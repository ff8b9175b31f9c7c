"""What a random sample tells of the whole: means and shares with their 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, sqrt

FEWEST = 5
"""Values below which a mean says nothing yet."""
_Z = 1.959964  # of the normal distribution, two-sided 95 %


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds within which the truth lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def less(self, known: float) -> Interval:
        """The same, less a number that is known."""
        return Interval(self.value - known, self.low - known, self.high - known)

    def times(self, factor: float) -> Interval:
        """The same, ``factor`` (not negative) times."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def mean(values: Sequence[float]) -> Interval | None:
    """The mean of the whole (Student's t); None for fewer than `FEWEST` values."""
    n = len(values)
    if n < FEWEST:
        return None
    middle = sum(values) / n
    spread = sqrt(sum((value - middle) ** 2 for value in values) / (n - 1) / n)
    return Interval(middle, middle - _t(n - 1) * spread, middle + _t(n - 1) * spread)


def share(yes: int, n: int) -> Interval | None:
    """The share of the whole (Wilson's interval, which holds near 0 and 1); None without values."""
    if n == 0:
        return None
    p, z2 = yes / n, _Z**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Interval(p, min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half)))


def surely_below(yes: int, n: int, bound: float, doubt: float) -> bool:
    """Whether the share of the whole is below ``bound``: the upper end of its exact confidence interval (Clopper and
    Pearson, 1934) is. ``doubt``: how often a share that lies on the bound would be taken for one below it.
    """
    if yes >= n or bound <= 0:
        return False
    if bound >= 1:
        return True
    at_most = (
        exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(bound) + (n - k) * log(1 - bound))
        for k in range(yes + 1)
    )
    return sum(at_most) < doubt


def _t(freedom: int) -> float:
    """The two-sided 95 % point of Student's t (Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5)."""
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
