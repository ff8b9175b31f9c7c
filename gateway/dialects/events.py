"""What the collectors of all dialects share: the grammar of a stream around the events that carry an answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.dialects.base import Answer, BrokenStream, Collector, Piece, Unjoinable
from gateway.dialects.joining import load, loads_loosely
from gateway.sse import Event
from policies.cacheability import Outcome

DONE = b"[DONE]"
_KEEP_ALIVE = frozenset(("heartbeat", "keep-alive", "keepalive", "ping"))


class EventCollector(Collector):
    """Passes every event on as it came, and has those with data joined; what cannot be joined surely is passed on all
    the same.
    """

    done_ends: ClassVar[bool] = False
    """Whether ``[DONE]`` is this dialect's end. Where it is not, servers that send it behind the end do no harm."""
    marks: ClassVar[tuple[bytes, ...]] = (DONE, b"error")
    """What stands in an event that tells an end, an error or usage, and in hardly any other."""

    def __init__(self) -> None:
        self.done = False
        self._error = ""
        self._doubt = ""

    @property
    def ended(self) -> bool:
        return self.done or bool(self._error)

    def feed(self, event: Event) -> Piece:
        if event.data is None or event.name in _KEEP_ALIVE or self._error:
            return Piece.same(event.raw)
        if event.data.strip() == DONE:
            repeated = self.done_ends and self.done
            self.done = self.done or self.done_ends
            return Piece.same(b"" if repeated else event.raw)
        if self.done:
            self.refuse("an event after the end")
            return Piece.same(b"")
        data = self._read(event.data)
        if data is None:
            return Piece.same(event.raw)
        if event.name == "error" or data.get("type") == "error" or data.get("error"):
            self._error = "an error event"
            return Piece.same(event.raw)
        piece = self.piece(event, data)
        try:
            self.join(event.name, data)
        except Unjoinable as error:
            self.refuse(f"cannot be joined: {error}")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            self.refuse("cannot be joined: unknown form")
        return piece

    def may_skip(self, events: bytes) -> bool:
        for mark in self.marks:  # noqa: SIM110 - this is asked of every event of every stream
            if mark in events:
                return False
        return True

    def close(self) -> Answer:
        usage = self.usage()
        if self._error:
            return Answer(None, Outcome(fault=self._error), usage)
        if not self.done:
            return Answer(None, Outcome(fault="incomplete: the stream did not end as it should"), usage)
        if self._doubt:
            return Answer(None, Outcome(fault=self._doubt), usage)
        try:
            return self.answer()
        except Unjoinable as error:
            return Answer(None, Outcome(fault=f"cannot be joined: {error}"), usage)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return Answer(None, Outcome(fault="cannot be joined: unknown form"), usage)

    def refuse(self, doubt: str) -> None:
        """The answer will not be kept; the first doubt is the one that is told."""
        self._doubt = self._doubt or doubt

    def piece(self, event: Event, data: Mapping[str, Any]) -> Piece:
        """What of an event is passed on."""
        return Piece.same(event.raw)

    @abstractmethod
    def join(self, name: str, data: dict[str, Any]) -> None:
        """Adds the data of an event with this name; raises `Unjoinable`. Sets ``done`` at the dialect's own end."""

    @abstractmethod
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended well; raises `Unjoinable`."""

    def _read(self, text: bytes) -> dict[str, Any] | None:
        """The event's JSON object; None where only lenient readers can read it. Raises `BrokenStream`."""
        try:
            data = load(text)
        except ValueError:
            if not loads_loosely(text):
                raise BrokenStream("an event that is not JSON") from None
            self.refuse("cannot be joined: JSON that not every reader takes")
            return None
        if not isinstance(data, dict):
            raise BrokenStream("an event that is not a JSON object")
        return data
