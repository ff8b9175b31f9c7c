"""What the gateway must know of an API: one `Dialect` per endpoint, with its request, stream, usage and error forms.

A stored answer is kept in the dialect's plain form without its identity (``id``, ``created``). `Collector` joins a
stream into that form, `Dialect.render` splits it again; both must lose nothing, so what cannot be joined surely raises
`Unjoinable` and is not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, overload

from gateway.sse import Event
from policies.cacheability import Ask, Outcome, Turn


class Unjoinable(ValueError):
    """Pieces of a stream that no rule joins surely; the message names the field."""


class BrokenStream(ValueError):
    """The upstream's stream stopped making sense; nothing of it after this point is passed on."""


class Piece(NamedTuple):
    """A part of an answer, a number of whole events of a stream: its bytes for callers who asked for usage, and for
    those who did not (either may be empty).
    """

    asked: bytes
    unasked: bytes

    @staticmethod
    def same(raw: bytes) -> Piece:
        return Piece(raw, raw)


@dataclass(slots=True)
class Answer:
    """A whole answer: its plain form without identity (None: nothing to keep), how it ended, and its tokens."""

    message: bytes | None
    outcome: Outcome
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Bytes of an answer with gaps for its fresh identity and its echo: ``(identity + echo).join(segments)`` is the
    body.
    """

    plain: tuple[bytes, ...]
    stream: tuple[bytes, ...]
    stream_with_usage: tuple[bytes, ...]


class Lazily(Sequence[Turn]):
    """Turns that are read out of a request when they are first looked at, which most requests need not be."""

    def __init__(self, read: Callable[[], Sequence[Turn]]) -> None:
        self._read = read
        self._turns: Sequence[Turn] | None = None

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, at: int) -> Turn: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Turn]: ...
    def __getitem__(self, at: int | slice) -> Turn | Sequence[Turn]:
        return self._all()[at]

    def _all(self) -> Sequence[Turn]:
        if self._turns is None:
            self._turns = self._read()
        return self._turns


class Collector(ABC):
    """Reads one upstream stream: decides what each event means to the caller, and joins the whole into an answer."""

    @abstractmethod
    def feed(self, event: Event) -> Piece:
        """Takes an event and gives what to pass on; raises `BrokenStream`."""

    @abstractmethod
    def may_skip(self, events: bytes) -> bool:
        """Whether whole events say nothing that must be known of an answer which nobody keeps: no end, no error, no
        usage. They may then be passed on unread.
        """

    @abstractmethod
    def usage(self) -> dict[str, int]:
        """Tokens as far as they are known."""

    @abstractmethod
    def close(self) -> Answer:
        """The answer once the stream has ended, with a fault when it had not ended as its dialect ends."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the caller has been told in the dialect's own form that the stream is over, well or with an error."""


class Dialect(ABC):
    """One endpoint of one API."""

    name: ClassVar[str]
    path: ClassVar[str]
    excluded: ClassVar[Mapping[str, str]]
    """Top-level request fields that are not in the key, each with the reason why no answer depends on it."""
    vary: ClassVar[tuple[str, ...]] = ()
    """Request headers that change the answer, and so belong to the key."""
    interchangeable: ClassVar[bool] = True
    """Whether another model's answer may stand in where the one asked for fails."""
    held: ClassVar[int] = 0
    """Bytes of a plain answer that are held back to be read, even where no single entry may be as large."""

    @abstractmethod
    def ask(self, body: Mapping[str, Any]) -> Ask:
        """What the cacheability policy needs to see of a request."""

    @abstractmethod
    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Fields to set in what is sent upstream so that every answer can be accounted for; empty: send the caller's
        own bytes.
        """

    def hint(self, body: Mapping[str, Any], salt: str) -> dict[str, Any]:
        """Fields to set so that the provider caches the prefix, where the operator wishes it; ``salt`` stands for the
        tenant.
        """
        return {}

    @abstractmethod
    def wants_usage(self, body: Mapping[str, Any]) -> bool:
        """Whether this caller's stream is to carry a usage event."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], answer: bytes) -> Answer:
        """Reads a plain answer to the request ``body``."""

    def usage_in(self, answer: bytes) -> dict[str, int]:
        """The tokens that a plain answer reports, where nothing else of it is to be known."""
        return self.read({}, answer).usage

    @abstractmethod
    def collector(self, body: Mapping[str, Any]) -> Collector:
        """A collector for one streamed answer to the request ``body``."""

    @abstractmethod
    def render(self, message: bytes) -> Rendered:
        """Splits a stored message into its plain and streamed forms."""

    @abstractmethod
    def identity(self, now: float) -> bytes:
        """A fresh identity for one answer, as bytes that fill the gaps of `Rendered`. ``now``: unix seconds."""

    def echo(self, body: Mapping[str, Any]) -> bytes:
        """Fields of the answer that repeat excluded fields of this caller's own request ``body``; they follow the
        identity.
        """
        return b""

    @abstractmethod
    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        """A message that says ``text``, or None where the request asks for more than a curated text can give."""

    @abstractmethod
    def error(self, status: int, message: str, code: str | None = None, request_id: str = "") -> bytes:
        """An error body in the dialect's form."""

    @abstractmethod
    def error_event(self, message: str, code: str) -> bytes:
        """The one event that ends a stream which failed after it began."""

    @staticmethod
    def streams(body: Mapping[str, Any]) -> bool:
        """Whether the caller asked for a stream."""
        return body.get("stream") is True
