"""Guesses from what was said before: find the longest earlier occurrence of a text's last tokens, and go on as it did.

No model, no training: a table of the runs of `RUN` tokens of a text, each with its latest places. What is looked
through is the session itself (prompt and answer) and the answers the same tenant was given lately.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

RUN = 3
"""The shortest match."""

_LONGEST_MATCH = 64
_PLACES = 4  # of one run, the latest ones
_TENANTS, _TENANT_TOKENS = 8, 1 << 13
_LEAD = 16  # tokens of a prompt's end kept before its answer: they tell whose answer it is
_END = -1  # no token: between two remembered answers


@dataclass(frozen=True)
class Match:
    """The last `length` tokens of a text also stand in `source`, before position `at`."""

    length: int
    source: list[int]
    at: int

    def guess(self, count: int) -> list[int]:
        """Up to `count` tokens that followed; a text that runs into its own end goes on repeating."""
        guessed: list[int] = []
        for at in range(self.at, self.at + count):
            token = self.source[at] if at < len(self.source) else guessed[at - len(self.source)]
            if token == _END:
                break
            guessed.append(token)
        return guessed


class Runs:
    """Where each run of tokens stands in one growing text (a list that others may append to)."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._ends: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._known = RUN

    def longest(self, text: list[int]) -> Match | None:
        """The longest match for the end of `text` (which may be this very text); of equals the latest."""
        self._catch_up()
        best = None
        for at in self._ends.get(tuple(text[-RUN:]), ()):
            length = self._length(text, at)
            if best is None or length >= best.length:
                best = Match(length, self.tokens, at)
        return best

    def _catch_up(self) -> None:
        """Takes in all runs that something follows."""
        tokens, ends = self.tokens, self._ends
        for at in range(self._known, len(tokens)):
            run = tuple(tokens[at - RUN : at])
            ends[run] = (*ends.get(run, ())[1 - _PLACES :], at)
        self._known = max(self._known, len(tokens))

    def _length(self, text: list[int], at: int) -> int:
        most = min(_LONGEST_MATCH, at, len(text))
        length = RUN
        while length < most and self.tokens[at - 1 - length] == text[-1 - length]:
            length += 1
        return length


class Answers:
    """Answers given lately, by tenant: never does a guess tell one tenant, by its time, what another was told."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[bytes, list[Runs]] = OrderedDict()

    def add(self, tenant: bytes, prompt_end: list[int], answer: list[int]) -> None:
        """Remembers an answer behind its prompt's last tokens; the oldest are forgotten."""
        texts = self._tenants.setdefault(tenant, [Runs([])])
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)
        if len(texts[-1].tokens) > _TENANT_TOKENS:
            texts[:] = [texts[-1], Runs([])]
        texts[-1].tokens += [*prompt_end[-_LEAD:], *answer[:_TENANT_TOKENS], _END]

    def longest(self, tenant: bytes, text: list[int]) -> Match | None:
        """The longest match among a tenant's answers for the end of `text`."""
        found = [match for runs in self._tenants.get(tenant, ()) if (match := runs.longest(text)) is not None]
        return max(found, key=lambda match: match.length, default=None)
