"""Which sequences get a draft in this step, and how long: a lookup, weighed by `policies/speculation.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.speculate.lookup import Answers, Match, Runs
from policies.speculation import Chances, RowCost, draft_length


@dataclass
class Drafting:
    """What is known of one sequence: its own text, how well guesses at it went, the match the last came from."""

    runs: Runs
    chances: Chances
    match: Match | None = None


@dataclass
class Drafter:
    """Makes drafts and learns from what became of them.

    `most_rows` says how many rows a pass may have so that the rows it would have without drafts do not change by a bit.
    Each row of a draft is then exactly the row that decoding would come to: so the sampler is asked row by row, as if
    there were no draft, and a draft is right as far as it agrees. Answers are the same whatever is drafted, sampled
    ones too.
    """

    most_rows: Callable[[int], int]
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    _answers: Answers = field(default_factory=Answers)
    _chances: Chances = field(default_factory=Chances)
    _cost: RowCost = field(default_factory=RowCost)

    def room(self, sequences: int) -> int:
        """Rows for drafts in a pass in which so many sequences decode."""
        return self.most_rows(sequences) - sequences

    def draft(self, sequence: Sequence, sequences: int, room: int) -> list[int]:
        """At most `room` tokens that may follow, worth verifying beside so many sequences; often none."""
        longest = min(room, sequence.max_tokens - sequence.output_length - 1)
        state = sequence.drafting
        if state is None:
            state = sequence.drafting = Drafting(Runs(sequence.tokens), Chances(self._chances))
        state.match = None
        if longest <= 0:
            return []
        said, recalled = state.runs.longest(sequence.tokens), self._answers.longest(sequence.salt, sequence.tokens)
        match = max(filter(None, (said, recalled)), key=lambda match: match.length, default=None)
        if match is None:
            return []
        length = draft_length(state.chances, match.length, longest, self._cost.least_chance(sequences))
        if not length:
            state.chances.forget(match.length)
        state.match = match
        return match.guess(length)

    def verified(self, sequence: Sequence, draft: list[int], right: int) -> None:
        """The first `right` tokens of a draft were what the model said; with the next one it went another way."""
        state = sequence.drafting
        assert state is not None
        assert state.match is not None
        self.drafts += 1
        self.drafted += len(draft)
        self.accepted += right
        for at in range(min(right + 1, len(draft))):
            state.chances.learn(state.match.length + at, at < right)

    def timed(self, rows: int, seconds: float) -> None:
        """A decode pass of so many rows took so long."""
        self._cost.observe(rows, seconds)

    def remember(self, sequence: Sequence) -> None:
        """A sequence has ended: its answer may come again."""
        prompt, answer = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
        self._answers.add(sequence.salt, prompt, answer)
