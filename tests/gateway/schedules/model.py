"""The reference model: which answers may a request be given, told from outside, from what happened and when.

Nothing here knows how the gateway works. An answer names the upstream call that computed it; what is held against it
are the purges, the times and the request's own words. Moments are (seconds, place in the order of all events).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Ending = Literal["whole", "cut off", "failed", "dropped"]
"""``whole``: complete; ``cut off``: ended by a limit, so not to be stored; ``failed``: an error, or broken off;
``dropped``: the gateway hung up.
"""


class Moment(NamedTuple):
    at: float
    place: int


NEVER = Moment(math.inf, 1 << 60)


@dataclass
class Times:
    """How long answers live, in seconds, as configured."""

    ttl: float
    while_revalidate: float
    if_error: float


@dataclass
class Words:
    """A request's ``Cache-Control``."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age: float | None = None
    max_stale: float | None = None
    stale_if_error: float | None = None

    @property
    def header(self) -> str:
        flags = [("no-cache", self.no_cache), ("no-store", self.no_store), ("only-if-cached", self.only_if_cached)]
        times = [("max-age", self.max_age), ("max-stale", self.max_stale), ("stale-if-error", self.stale_if_error)]
        given = [f"{name}={value:g}" for name, value in times if value is not None]
        return ", ".join([name for name, said in flags if said] + given)


@dataclass
class Asked:
    """A request, and what its caller was told. ``text``: of the whole answer."""

    number: int
    question: str
    words: Words
    streams: bool
    gateway: int
    asked: Moment = NEVER
    done: Moment = NEVER
    left: bool = False
    status: int = 0
    text: str | None = None
    error: str = ""
    cache_status: str = ""


@dataclass
class Call:
    """An upstream call, made for the request ``asker``."""

    number: int
    question: str
    asker: int
    refresh: bool
    text: str
    began: Moment
    ended: Moment = NEVER
    ending: Ending | None = None


@dataclass
class Purge:
    """``done``: when it was acknowledged; ``everywhere``: the other gateways will obey it as well."""

    question: str | None  # None: all
    soft: bool
    done: Moment
    gateway: int
    everywhere: bool

    def holds_for(self, request: Asked) -> bool:
        """Whether the request came after it."""
        if self.question not in (None, request.question):
            return False
        if self.gateway == request.gateway:
            return self.done.place < request.asked.place
        return self.everywhere and self.done.at + WITHIN < request.asked.at


WITHIN = 1.0
"""Seconds in which a purge reaches every gateway."""


@dataclass
class Model:
    """What happened. ``lag``: seconds for which the answer of a call may still be under way between gateways;
    ``trouble``: when the shared store failed or a gateway died, which may break a stream off, and nothing else.
    """

    times: Times
    lag: float = 0.0
    requests: list[Asked] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    purges: list[Purge] = field(default_factory=list)
    trouble: list[float] = field(default_factory=list)

    def fault(self, request: Asked) -> str | None:
        """What is wrong with what a caller was told; None: nothing."""
        if request.done is NEVER:
            return "no answer"
        if request.text is None:
            return self._fault_of_error(request)
        number, _, _ = request.text.removeprefix("call ").partition(":")
        call = self.calls[int(number)]
        if request.text != call.text:
            return "not the whole answer"
        if call.question != request.question:
            return "the answer to another question"
        if call.ending not in ("whole", "cut off"):
            return f"the answer of a call that ended: {call.ending}"
        purges = [purge for purge in self.purges if purge.holds_for(request)]
        if any(not purge.soft and call.began.place < purge.done.place for purge in purges):
            return "computed before a purge that came before the request"
        stale_since = min(
            [purge.done.at for purge in purges if purge.soft and call.began.place < purge.done.place], default=math.inf
        )
        return self._fault_in_time(request, call, stale_since)

    def _fault_of_error(self, request: Asked) -> str | None:
        if request.words.only_if_cached and request.status == 504:
            return None
        broken_off = request.streams and request.status == 200
        if self._failure(request) or (broken_off and self._trouble(request)):
            return None
        return f"an error without a cause: {request.status} {request.error}"

    def _failure(self, request: Asked) -> bool:
        """Whether an upstream failed while the request was waiting."""
        return any(
            call.ending == "failed"
            and call.question == request.question
            and call.began.place < request.done.place
            and call.ended.at + self.lag >= request.asked.at
            for call in self.calls
        )

    def _trouble(self, request: Asked) -> bool:
        return any(request.asked.at - self.lag <= at <= request.done.at for at in self.trouble)

    def _fault_in_time(self, request: Asked, call: Call, stale_since: float) -> str | None:
        words, asker = request.words, self.requests[call.asker]
        now = request.asked.at
        mine = asker is request and not call.refresh
        if (words.no_cache or words.no_store) and not mine:
            return "not computed for it alone"
        if mine:
            return "made a call" if words.only_if_cached else None
        if asker.words.no_store and not call.refresh:
            return "the answer of a no-store request"
        if words.only_if_cached and "hit" not in request.cache_status:
            return "waited for a call"
        age, over = now - call.began.at, -math.inf
        if words.max_age is not None:
            over = age - words.max_age
        joined = call.ended.place > request.asked.place or call.ended.at + self.lag > now
        if joined and over <= 0 and stale_since == math.inf:
            return None
        if call.ending != "whole":
            return "stored, though cut off"
        past = now - min(call.ended.at + self.times.ttl, stale_since)
        if over <= 0:
            if past < 0 or past < self.times.while_revalidate:
                return None
            if words.max_stale is not None and past <= words.max_stale:
                return None
        allowed = self.times.if_error if words.stale_if_error is None else words.stale_if_error
        if 0 < allowed >= max(past, over) and self._failure(request):
            return None
        return f"too old: {age:g} s of age, {past:g} s past its time"
