"""How likely something is to be used again, by its age, and what keeping it is therefore worth; learned online."""

from __future__ import annotations


def _starts() -> list[int]:
    starts = [0]
    while starts[-1] < 1000:
        starts.append(starts[-1] + max(1, starts[-1] // 3))
    return starts


AGE_STARTS = _starts()
"""Ages, in epochs, at which a bucket of ages begins: 0, 1, 2, 3, 4, 5, 6, 8, 10, 13, … Beyond the last: never again."""

BUCKETS = len(AGE_STARTS) - 1


class ReuseCurve:
    """The chance of reuse by age for one class of things, and `worth`: what a place is worth by the age of its holder.

    The chances are estimated as by Kaplan and Meier: those used again while in a bucket of ages, over all that entered
    it. So neither what is too young to tell, nor what was dropped from view, biases the picture.
    The worth is the Gittins index: the most uses per epoch of keeping that one can expect, over all horizons to which
    one could plan to keep it. To keep what has the highest index is the best use of a fixed space.
    """

    FIRST_GUESS = 0.3
    """The chance of reuse in a bucket before anything is known. The same in all: it falls as one over age."""

    GUESS_WEIGHT = 100.0
    """How many must have been seen in a bucket to outweigh the guess, which is the chance in the bucket before."""

    def __init__(self) -> None:
        self._entered = [0.0] * BUCKETS
        self._reused = [0.0] * BUCKETS
        self.worth: list[float] = []
        self.learn()

    def observe(self, bucket: int, entered: float, reused: float) -> None:
        """Of `entered` things that came into the bucket of ages, `reused` were used before they left it."""
        self._entered[bucket] += entered
        self._reused[bucket] += reused

    def learn(self, memory: float = 1.0) -> None:
        """Derive `worth` from what was seen; what was seen counts `memory` times as much (0 … 1) from now on."""
        survive: list[float] = []
        held: list[float] = []  # epochs that one which enters the bucket is expected to spend there
        chance = self.FIRST_GUESS
        for bucket in range(BUCKETS):
            seen = self._entered[bucket] + self.GUESS_WEIGHT
            chance = (self._reused[bucket] + self.GUESS_WEIGHT * chance) / seen
            survive.append(1 - chance)
            held.append((AGE_STARTS[bucket + 1] - AGE_STARTS[bucket]) * (1 - chance / 2))
        self.worth = [_best_rate(survive[bucket:], held[bucket:]) for bucket in range(BUCKETS)]
        self._entered = [count * memory for count in self._entered]
        self._reused = [count * memory for count in self._reused]


def _best_rate(survive: list[float], held: list[float]) -> float:
    """The largest expected uses per epoch kept, over all horizons that end with one of the buckets."""
    best, kept, alive = 0.0, 0.0, 1.0
    for stays, spent in zip(survive, held, strict=True):
        kept += alive * spent
        alive *= stays
        best = max(best, (1 - alive) / kept)
    return best
