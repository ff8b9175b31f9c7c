"""Reading an upstream's answer on its way to whoever follows: what comes in goes out in the same moment, without a task
of its own, and in the end the flight lands with what was learnt.

Bytes are fed by whoever has them: an upstream's response (`gateway.pump`), or another gateway that made the call
(`gateway.sharing`). They go to a `Sink`: a flight that any number of callers follow, or one caller's connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from cache.response.flights import Flight
from gateway.dialects.base import Answer, BrokenStream, Piece
from gateway.encoding import EncodingError
from gateway.http import Headers
from gateway.plan import Plan
from gateway.sse import Event, EventReader, EventTooLarge, events
from gateway.upstreams.client import UpstreamError
from policies.cacheability import Outcome

WINDOW = 256 * 1024
"""Bytes that an upstream may run ahead of the fastest reader."""
BOUND = 8 * 1024 * 1024
"""Bytes that one flight holds for late joiners and slow readers."""


@dataclass(slots=True)
class Head:
    """How an upstream's answer begins. ``whole``: its body is complete and comes as one piece. ``elsewhere``: when
    another process began the call (unix seconds), if one did; ``kept``: its answer is in the store already, and comes
    as the result alone. ``fallback``: the model that stood in for the one asked for. ``echo``: what the answer repeats
    of the bookkeeping of the request that was sent (`Dialect.echo`): as it is, it is for nobody with other bookkeeping.
    """

    status: int
    headers: Headers
    upstream: str
    stream: bool
    whole: bool
    elsewhere: float | None = None
    kept: bool = False
    fallback: str = ""
    echo: bytes = b""


@dataclass(slots=True)
class Landed:
    """How it ended: the answer, whether it was stored or why not, and what went wrong on the way, if anything."""

    head: Head
    answer: Answer
    stored: bool
    reason: str
    failure: str = ""


class Sink(Protocol):
    """Where an answer goes. `full`: it can take no more now; then it calls ``on_room`` when it can."""

    opened: bool
    on_room: Callable[[], None]

    @property
    def full(self) -> bool: ...
    def open(self, head: Head) -> None: ...
    def put(self, piece: Piece) -> None: ...
    def land(self, result: Landed, last: Piece | None = None) -> None: ...


CallFlight = Flight[Head, Piece, Landed]
Keep = Callable[[Landed], Landed]
"""Stores what may be stored, and says so."""


def new_flight(*, shared: bool) -> CallFlight:
    """A flight for one upstream call, which others may join if it is ``shared``."""
    return Flight(_size, window=WINDOW, bound=BOUND, shared=shared)


def _size(piece: Piece) -> int:
    return len(piece.asked)


class Reading(ABC):
    """One answer. ``done``: it needs no more bytes, and has landed. ``begun`` is called at its first bytes; nothing is
    passed on before, so that another upstream may be asked until then.
    """

    def __init__(self, sink: Sink, head: Head, keep: Keep, begun: Callable[[], None]) -> None:
        self.sink = sink
        self.done = False
        self._head = head
        self._keep = keep
        self._begun = begun

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """More of the body, decoded."""

    @abstractmethod
    def end(self) -> None:
        """The body has ended."""

    def fail(self, error: UpstreamError | EncodingError) -> None:
        """The body has broken off; raises the error where the followers cannot be told in an answer's own form."""
        raise error

    def _open(self) -> None:
        if not self.sink.opened:
            self._begun()
            self.sink.open(self._head)

    def _land(self, answer: Answer, failure: str = "", last: Piece | None = None) -> None:
        """Settles all before the last piece is handed over: callers leave when they have it."""
        self.done = True
        self.sink.land(self._keep(Landed(self._head, answer, False, "", failure)), last)


class Raw(Reading):
    """A body that cannot be read, passed on as it comes. ``why``: so that it cannot be kept."""

    def __init__(self, sink: Sink, head: Head, keep: Keep, begun: Callable[[], None], why: str) -> None:
        super().__init__(sink, head, keep, begun)
        self._why = why

    def feed(self, data: bytes) -> None:
        self._open()
        self.sink.put(Piece(data, data))

    def end(self) -> None:
        self._open()
        self._land(Answer(None, Outcome(fault=self._why)))


class Plain(Reading):
    """A plain answer, held back until it is whole, so that its fate is known when its head is sent; one that is larger
    than ``most`` bytes is passed on. ``wanted``: somebody wants its message, and not its usage alone.
    """

    def __init__(
        self,
        sink: Sink,
        head: Head,
        keep: Keep,
        begun: Callable[[], None],
        plan: Plan,
        most: int,
        *,
        wanted: bool,
    ) -> None:
        super().__init__(sink, head, keep, begun)
        self._plan = plan
        self._most = most
        self._wanted = wanted
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        if self.sink.opened:
            self.sink.put(Piece(data, data))
            return
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._most:
            self._head = replace(self._head, whole=False)
            self._open()
            self.sink.put(Piece.same(b"".join(self._parts)))

    def end(self) -> None:
        if self.sink.opened:
            self._land(Answer(None, Outcome(fault="too large to keep")))
            return
        text = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if not 200 <= self._head.status < 300:
            answer = Answer(None, Outcome(fault=f"status {self._head.status}"))
        elif self._wanted:
            answer = self._plan.dialect.read(self._plan.body, text)
        else:
            answer = Answer(None, Outcome(), self._plan.dialect.usage_in(text))
        self._open()
        self._land(answer, last=Piece(text, text))


class EventStream(Reading):
    """A stream of events, passed on as they come. One that breaks ends with exactly one error event, and no made-up
    end. ``wanted``: somebody wants its message, which is joined from the events.
    """

    def __init__(
        self, sink: Sink, head: Head, keep: Keep, begun: Callable[[], None], plan: Plan, *, wanted: bool
    ) -> None:
        super().__init__(sink, head, keep, begun)
        self._plan = plan
        self._wanted = wanted
        self._collector = plan.dialect.collector(plan.body)
        self._reader = EventReader()

    def feed(self, data: bytes) -> None:
        if not self.sink.opened:
            self._open()
        try:
            whole = self._reader.whole(data)
        except EventTooLarge as error:
            self._break(str(error))
            return
        if not self._wanted and self._collector.may_skip(whole):
            if whole:
                self.sink.put(Piece(whole, whole))
        else:
            self._read(events(whole))

    def end(self) -> None:
        self._open()
        self._read(self._reader.finish())
        if not self.done:
            self._break("the upstream's stream ended early")

    def fail(self, error: UpstreamError | EncodingError) -> None:
        if not self.sink.opened:
            raise error
        self._break(str(error) or type(error).__name__)

    def _read(self, found: list[Event]) -> None:
        collector, asked, unasked, broken = self._collector, [], [], ""
        try:
            for event in found:
                piece = collector.feed(event)
                asked.append(piece.asked)
                unasked.append(piece.unasked)
                if collector.ended:
                    break
        except BrokenStream as error:
            broken = str(error)
        read = Piece(b"".join(asked), b"".join(unasked))
        if collector.ended:
            self._land(self._answer(), last=read)
        elif read.asked or read.unasked:
            self.sink.put(read)
        if broken:
            self._break(broken)

    def _answer(self) -> Answer:
        return self._collector.close() if self._wanted else Answer(None, Outcome(), self._collector.usage())

    def _break(self, why: str) -> None:
        answer = self._answer()
        broken = Answer(None, Outcome(fault=answer.outcome.fault or f"incomplete: {why}"), answer.usage)
        event = self._plan.dialect.error_event(f"The upstream failed in mid-stream: {why}.", "upstream_error")
        self._land(broken, why, Piece(event, event))
