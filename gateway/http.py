"""Requests and responses as plain values, so that the pipeline knows nothing of the server that carries them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

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

    def header(self, name: bytes) -> str | None:
        """A header's value, several of one name joined by a comma (RFC 9110 section 5.3); None when absent."""
        found = [value for key, value in self.headers if key == name]
        return b", ".join(found).decode("latin-1") if found else None


@dataclass(slots=True)
class Response:
    """A response whose body is whole or comes in chunks; a generator is closed when the caller leaves."""

    status: int
    headers: Headers
    body: bytes | AsyncGenerator[bytes, None]


async def begun(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Runs a body up to its first chunk, an empty one for this purpose: from then on closing it sees to its end, even
    if the caller leaves before anything is read. (A generator that was never begun ends without its ``finally``.)
    """
    await anext(body)
    return body


JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
EVENT_STREAM: tuple[bytes, bytes] = (b"content-type", b"text/event-stream; charset=utf-8")
NO_BUFFERING: Headers = [(b"cache-control", b"no-cache, no-transform"), (b"x-accel-buffering", b"no")]
"""What keeps the proxies between us and the caller from holding an event stream back."""
