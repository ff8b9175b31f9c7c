"""Putting an answer on a connection without ASGI: whole in one write, or a stream's pieces in the moment they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.http import Headers, Stream


def response_head(status: int, common: bytes, headers: Headers, framing: bytes) -> bytes:
    """Status line and headers up to and with the blank line; ``common``: header lines that all answers share;
    ``framing``: those that say how the body is delimited. The last of ``headers`` may differ from answer to answer; the
    others are better the same each time. Raises ValueError for a header that would break the framing.
    """
    lines = _known_lines(tuple(headers[:-1])) + _lines(headers[-1:])
    return b"%b%b%b%b\r\n" % (STATUS_LINE[status], common, lines, framing)


def _lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])
    # Counting is enough and quick: each header brings one CR and one LF, so any more came in with a value.
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
        raise ValueError("a response header holds a line break or a NUL")
    return lines


@lru_cache(maxsize=256)
def _known_lines(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return _lines(headers)


class Chunks:
    """A stream on its way to the caller, in chunks (RFC 9112 section 7.1), as fast as the caller takes them.

    ``over`` is done when all is written, or holds what cut the stream short.
    """

    def __init__(self, head: bytes, body: Stream, transport: asyncio.Transport, flow: FlowControl) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body, self._transport, self._flow = body, transport, flow
        body.wake = self._more
        self._send(head)
        self.go_on()

    def go_on(self) -> None:
        """Sends all there is, unless the caller has to catch up first."""
        while self._more():
            pass

    def _more(self) -> bool:
        """Sends what has come since; whether there was anything."""
        if self._flow.write_paused or self.over.done():
            return False
        try:
            return self._send(b"")
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)
            return False

    def _send(self, ahead: bytes) -> bool:
        data, ended = self._body.take(), self._body.ended
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if ended:
            chunk += b"0\r\n\r\n"
            self.over.set_result(None)
        if ahead or chunk:
            self._transport.write(ahead + chunk)
        return bool(data)
