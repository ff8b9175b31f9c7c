"""How long a draft is worth verifying: as long as a guessed token is likelier to be right than its row costs.

Decoding reads all weights for one token per sequence; verifying a guess of the next tokens beside it costs a row each.
What a row costs is measured; how often guesses are right is learned, by how long the match was they were found after
(Leviathan et al., arXiv:2211.17192; lookup in the prompt and by suffixes: Saxena 2023, arXiv:2411.04975).
"""

from __future__ import annotations

LEAST_GAIN = 1.25
"""What a guess must promise against its price: estimates err."""

_KINDS = 7
_START = 0.5
_WEIGHT = 3.0  # what is known before the first guess counts like so many guesses
_FADE = 0.95
_FORGET = 0.98


def _kind(match: int) -> int:
    return min(match.bit_length(), _KINDS - 1)


class Chances:
    """How often a guessed token was right, by the length of the match before it; the recent past counts more.

    `prior` is what to believe while little is known, say the same of all sequences; it learns along.
    """

    def __init__(self, prior: Chances | None = None) -> None:
        self._prior = prior
        self._right = [0.0] * _KINDS
        self._tried = [0.0] * _KINDS

    def of(self, match: int) -> float:
        """The chance that the token after a match of so many is guessed right, 0 to 1."""
        kind = _kind(match)
        prior = _START if self._prior is None else self._prior.of(match)
        return (self._right[kind] + _WEIGHT * prior) / (self._tried[kind] + _WEIGHT)

    def learn(self, match: int, right: bool) -> None:
        """A guess after such a match was verified."""
        kind = _kind(match)
        self._right[kind] = self._right[kind] * _FADE + right
        self._tried[kind] = self._tried[kind] * _FADE + 1
        if self._prior is not None:
            self._prior.learn(match, right)

    def forget(self, match: int) -> None:
        """A guess was to be had and not tried: what was learned grows old, so that it is tried again some day."""
        kind = _kind(match)
        self._right[kind] *= _FORGET
        self._tried[kind] *= _FORGET
        if self._prior is not None:
            self._prior.forget(match)


class RowCost:
    """Seconds of a decode pass = base + per_row x rows: least squares over the recent past.

    A pass that takes far longer than expected met a busy machine, and counts as twice the expected only.
    """

    _FADE = 0.99
    _GUESS = 0.1  # of a pass of one row, while passes have all been of one size

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        if self._weight > 4:
            seconds = min(seconds, 2 * self.seconds(rows))
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._weight, self._x, self._y, self._xx, self._xy = (
            old * self._FADE + x for old, x in zip(sums, new, strict=True)
        )

    @property
    def per_row(self) -> float:
        """Seconds that one row more takes; 0 before the first pass."""
        if not self._weight:
            return 0.0
        mean = self._x / self._weight
        spread = self._xx / self._weight - mean * mean
        if spread < 0.1:
            return self._GUESS * self._y / self._weight
        return max(0.0, (self._xy / self._weight - mean * self._y / self._weight) / spread)

    def seconds(self, rows: int) -> float:
        """What a pass of so many rows is expected to take; 0 before the first."""
        if not self._weight:
            return 0.0
        return max(0.0, self._y / self._weight + self.per_row * (rows - self._x / self._weight))

    def least_chance(self, sequences: int) -> float:
        """How likely a guess must be right to be worth its row, beside so many sequences that decode."""
        whole = self.seconds(sequences)
        return min(1.0, LEAST_GAIN * self.per_row * sequences / whole) if whole else LEAST_GAIN * self._GUESS


def draft_length(chances: Chances, match: int, longest: int, least_chance: float) -> int:
    """How many tokens to guess after a match: as long as all up to there are right with at least that chance."""
    all_right = 1.0
    for length in range(longest):
        all_right *= chances.of(match + length)
        if all_right < least_chance:
            return length
    return longest
