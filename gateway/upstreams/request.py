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
    """Request line and headers, ending in the blank line. Connection and framing headers in `headers` are left out.

    Raises UpstreamError(kind="protocol", sent=False) if a part holds bytes that would break the framing.
    """
    if not (method.isascii() and _TOKEN.fullmatch(method.encode()) and _TARGET.fullmatch(target)):
        raise UpstreamError("protocol", "the request line holds a character that HTTP does not allow", sent=False)
    lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: " + host]
    for name, value in headers:
        shown = _shown(name)
        if shown:
            lines.append(shown + value)
        elif shown is None:
            raise UpstreamError("protocol", f"header name {name!r} is not allowed by HTTP", sent=False)
    if body_length or method not in _BODYLESS:
        lines.append(b"content-length: %d" % body_length)
    lines += (b"", b"")
    head = b"\r\n".join(lines)
    # Counting is enough and quick: each join adds one CR and one LF, so any more came in with a value.
    breaks = len(lines) - 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise UpstreamError("protocol", "a header value holds a line break or a NUL", sent=False)
    return head


@lru_cache(maxsize=128)
def _shown(name: bytes) -> bytes | None:
    """`name: `, or empty for a header that the connection writes itself, or None if it is no header name."""
    if not _TOKEN.fullmatch(name):
        return None
    return b"" if name.lower() in _OWN else name + b": "
