"""Effective compute: what an engine could have computed in a time, what it did compute, and what caches spared it.

All work is counted in prompt tokens: an output token stands for `OUTPUT` of them. Divided by what the engine computes
in a second, it becomes engine-seconds. What is not known is None, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT = 4.0
"""Prompt tokens that one output token costs an engine: what providers charge for it, on the whole."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What happened at one engine in a time. ``computed``, ``cached``: prompt tokens that it computed or found in its
    own tiers (None: it did not say), ``unsplit`` those of which it did not say which; ``output`` what it generated.
    ``saved_prompt``, ``saved_output``: of answers that the response cache gave in its stead (None: nobody knows).
    """

    computed: int | None
    cached: int | None
    unsplit: int
    output: int
    saved_prompt: int | None
    saved_output: int | None

    @property
    def work(self) -> float:
        """What it computed, in prompt tokens; a prompt of which it told nothing counts whole."""
        return (self.computed or 0) + self.unsplit + OUTPUT * self.output

    @property
    def spared_by_answers(self) -> float | None:
        """What it would have computed for saved answers: of their prompts, the share that it computes of others."""
        if self.saved_prompt is None or self.saved_output is None:
            return None
        told = (self.computed or 0) + (self.cached or 0)
        share = (self.computed or 0) / told if told else 1.0
        return share * self.saved_prompt + OUTPUT * self.saved_output


@dataclass(frozen=True, slots=True)
class Effective:
    """Engine-seconds of one engine: those it had (``installed``), used, and was spared by answers from the response
    cache and by prefixes in its own tiers.
    """

    installed: float
    used: float
    by_answers: float | None
    by_prefixes: float | None

    @property
    def times(self) -> float | None:
        """How many times the engine it would have taken to do without caches what was done, against what it used."""
        spared = (self.by_answers or 0.0) + (self.by_prefixes or 0.0)
        return (self.used + spared) / self.used if self.used else None


def effective(tokens: Tokens, seconds: float, per_second: float) -> Effective:
    """``per_second`` (above 0): prompt tokens that the engine computes in a second at full load."""
    by_answers = tokens.spared_by_answers
    return Effective(
        installed=seconds,
        used=tokens.work / per_second,
        by_answers=by_answers / per_second if by_answers is not None else None,
        by_prefixes=tokens.cached / per_second if tokens.cached is not None else None,
    )
