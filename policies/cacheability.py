"""May this request be answered from the cache, and may this answer be kept? A verdict with its reason, from plain
values alone.

The default is that of a search engine's knowledge panel: what is deterministic is cached; what is sampled is cached
only when somebody asked for it, or when the operator switched ``faq`` on and the question is static and
self-contained. In doubt: no.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Sampled = Literal["never", "faq", "always"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its role and its text, or None where it is not plain text (pictures, tool results)."""

    role: str
    text: str | None


@dataclass(slots=True)
class Ask:
    """What a dialect reads out of a request body for the verdict.

    ``temperature`` is None when absent; ``side_effects`` names what the request does besides answering (storing it
    upstream, running in the background), ``world`` what its answer reads besides the prompt (hosted search, hosted
    files), ``reservation`` what speaks against a cached answer unless the caller wishes for one.
    """

    turns: Sequence[Turn]
    temperature: object = None
    tools: bool = False
    side_effects: str = ""
    world: str = ""
    reservation: str = ""
    always_deterministic: bool = False


@dataclass(slots=True)
class Verdict:
    """Whether the request takes part in the cache at all, and why."""

    cacheable: bool
    reason: str


@dataclass(slots=True)
class Outcome:
    """How an upstream's answer ended: its finish reasons in the dialect's words, and what is wrong with it, if
    anything.
    """

    finishes: tuple[str, ...] = ()
    fault: str = ""


def judge(ask: Ask, *, sampled: Sampled, opted_in: bool) -> Verdict:
    """Judges a request. ``sampled``: the operator's setting for this model; ``opted_in``: the caller's own wish."""
    if ask.side_effects:
        return Verdict(False, f"side effect: {ask.side_effects}")
    if opted_in:
        return Verdict(True, "caller opted in")
    if ask.world:
        return Verdict(False, f"answer depends on the world: {ask.world}")
    if ask.reservation:
        return Verdict(False, ask.reservation)
    if ask.always_deterministic:
        return Verdict(True, "deterministic by nature")
    if ask.temperature is not None and (
        isinstance(ask.temperature, bool) or not isinstance(ask.temperature, int | float | Decimal)
    ):
        return Verdict(False, "temperature is not a number")
    if ask.temperature is not None and ask.temperature == 0:
        return Verdict(True, "deterministic: temperature 0")
    if sampled == "always":
        return Verdict(True, "sampled, and the operator caches sampled answers")
    name = "no temperature given" if ask.temperature is None else "temperature above 0"
    if sampled == "never":
        return Verdict(False, f"sampled: {name}")
    doubt = not_static(ask)
    if doubt:
        return Verdict(False, f"sampled ({name}) and not a static question: {doubt}")
    return Verdict(True, "static question")


def storable(outcome: Outcome, accepted: Sequence[str]) -> Verdict:
    """Judges an answer: complete, and every choice ended for a reason in ``accepted``."""
    if outcome.fault:
        return Verdict(False, outcome.fault)
    if not outcome.finishes:
        return Verdict(False, "incomplete: no choices")
    for finish in outcome.finishes:
        if finish not in accepted:
            return Verdict(False, f"finish reason: {finish}")
    return Verdict(True, "complete")


LONGEST_QUESTION = 240
"""Characters; a longer text carries its own context more often than not."""

_OPENERS = frozenset(
    """what what's whats who who's when where which whose why how define explain describe name list is are was were
    does do did can""".split()
)
_TIME = frozenset(
    """now today tonight tomorrow yesterday currently current latest newest recent recently upcoming nowadays ago still
    yet this next last week month year day morning evening weekend weather forecast news price stock score date time
    live trending available open closed""".split()
)
_CHANGING = frozenset(
    """president minister chancellor ceo cfo cto chairman chairwoman chair mayor governor king queen pope leader
    champion champions winner record richest oldest youngest population version release salary cost costs rate worth
    old age status temperature capacity""".split()
)
_PERSONAL = frozenset(
    """i i'm i've i'd i'll im me my mine myself we we're we've our ours us you your yours yourself he him his she her
    hers they them""".split()
)
_SESSION = frozenset(
    """above below earlier previous previously before again continue continued it its that these those here there
    attached attachment following document file image picture random another else more same""".split()
)
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def not_static(ask: Ask) -> str:
    """Why this is not a frequently asked, static question; the empty string when it is one.

    The word lists are English; a text that they cannot judge (other scripts, no question word) is not static.
    """
    if ask.tools:
        return "tools"
    spoken = [turn for turn in ask.turns if turn.role not in ("system", "developer")]
    if len(spoken) != 1 or spoken[0].role != "user":
        return "not a single user turn"
    text = spoken[0].text
    if text is None:
        return "not plain text"
    if len(text) > LONGEST_QUESTION:
        return "long"
    if not text.isascii():
        return "a language the rules cannot judge"
    if "\n" in text.strip():
        return "several lines"
    words = _WORD.findall(text.lower())
    if not words or words[0] not in _OPENERS:
        return "no question word at its start"
    for kind, listed in (("time", _TIME), ("changing", _CHANGING), ("personal", _PERSONAL), ("session", _SESSION)):
        for word in words:
            if word in listed or word.removesuffix("'s") in listed:
                return f"{kind} word {word!r}"
    return ""
