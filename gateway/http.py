"""Requests and responses as plain values, so that the pipeline knows nothing of the server that carries them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that belong to one connection (RFC 9110 section 7.6.1)."""


@dataclass(slots=True)
class Request:
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    raw_path: bytes = b""
    """The path as the caller spelled it, percent signs and all."""
    passed_on: Headers | None = field(default=None, repr=False, compare=False)
    """Those of its headers that go upstream, once somebody has picked them (`gateway.upstreams.headers`)."""
    _by_name: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)

    def with_body(self, body: bytes) -> Request:
        """The same head, and what is known of it, before another body."""
        request = Request(self.method, self.path, self.query, self.headers, body, self.raw_path, self.passed_on)
        request._by_name = self._by_name
        return request

    def header(self, name: bytes) -> str | None:
        """A header's value, several of one name joined by a comma (RFC 9110 section 5.3); None when absent."""
        named = self._by_name
        if named is None:
            named = self._by_name = {}
            for key, value in self.headers:
                named[key] = value if key not in named else named[key] + b", " + value
        found = named.get(name)
        return found.decode("latin-1") if found is not None else None


class Stream(ABC):
    """A body that comes in pieces. Whoever sends it sets ``wake``, takes what there is whenever it is woken, until it
    has ``ended``, and closes it, however that went.

    ``on_close`` is called once, with what `take` raised, if anything.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], object] = _nothing
        self.on_close: Callable[[Exception | None], None] = _nothing
        self.ended = False
        self._closed = False

    @abstractmethod
    def take(self) -> bytes:
        """What has come since; empty while there is nothing. Raises what cut the body short."""

    def close(self, failure: Exception | None = None) -> None:
        """Nothing more will be taken. May be called twice."""
        if not self._closed:
            self._closed = True
            self.wake = _nothing
            self.leave()
            self.on_close(failure)

    @abstractmethod
    def leave(self) -> None:
        """Lets go of where it comes from."""


@dataclass(slots=True)
class Response:
    """A response whose body is whole or comes in pieces."""

    status: int
    headers: Headers
    body: bytes | Stream


def _nothing(_: object = None) -> None:
    """What nobody waits for."""


JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
EVENT_STREAM: tuple[bytes, bytes] = (b"content-type", b"text/event-stream; charset=utf-8")
NO_BUFFERING: Headers = [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
"""What keeps the proxies between us and the caller from holding an event stream back."""
