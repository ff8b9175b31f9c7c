"""The bytes of an HTTP/1.1 request (RFC 9112), with nothing in them that could start a second request."""

import re
from functools import lru_cache

from gateway.upstreams.response import UpstreamError

# Who is asked and how long the body is are said by the connection itself, never by the caller (hop-by-hop and framing).
_OWN = frozenset(
    b"host connection content-length expect keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[!-~\x80-\xff]+")
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})


def request_head(
    method: str, target: bytes, host: bytes, headers: list[tuple[bytes, bytes]], body_length: int
) -> bytes:
    """Request line and headers, ending in the blank line. Connection and framing headers in `headers` are left out. The
    last of them may differ from request to request; the others are better the same each time.

    Raises UpstreamError(kind="protocol", sent=False) if a part holds bytes that would break the framing.
    """
    last = _joined([_line(*headers[-1])]) if headers else b""
    length = b"content-length: %d\r\n" % body_length if body_length or method not in _BODYLESS else b""
    return b"%b%b%b\r\n" % (_beginning(method, target, host, tuple(headers[:-1])), last, length)


@lru_cache(maxsize=256)
def _beginning(method: str, target: bytes, host: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """What requests of one caller to one upstream begin with, again and again."""
    if not (method.isascii() and _TOKEN.fullmatch(method.encode()) and _TARGET.fullmatch(target)):
        raise UpstreamError("protocol", "the request line holds a character that HTTP does not allow", sent=False)
    first = [method.encode() + b" " + target + b" HTTP/1.1", b"host: " + host]
    return _joined([*first, *(_line(name, value) for name, value in headers)])


def _line(name: bytes, value: bytes) -> bytes:
    """A header's line, or nothing for one that the connection writes itself."""
    shown = _shown(name)
    if shown is None:
        raise UpstreamError("protocol", f"header name {name!r} is not allowed by HTTP", sent=False)
    return shown + value if shown else b""


def _joined(lines: list[bytes]) -> bytes:
    lines = [line for line in lines if line]
    head = b"".join([line + b"\r\n" for line in lines])
    # Counting is enough and quick: each line brings one CR and one LF, so any more came in with a value.
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
        raise UpstreamError("protocol", "a header value holds a line break or a NUL", sent=False)
    return head


@lru_cache(maxsize=128)
def _shown(name: bytes) -> bytes | None:
    """`name: `, or empty for a header that the connection writes itself, or None if it is no header name."""
    if not _TOKEN.fullmatch(name):
        return None
    return b"" if name.lower() in _OWN else name + b": "
