"""One keep-alive HTTP/1.1 connection to an upstream: one request at a time, its response parsed by httptools."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from gateway.upstreams.response import ErrorKind, UpstreamError, UpstreamResponse

MAX_HEAD = 64 * 1024  # bytes of response head (or trailer section) before the upstream is taken for hostile
STALE_WINDOW = 2.0  # a kept connection that the upstream had closed shows it within a round trip, not later
_JOIN_BELOW = 64 * 1024  # a body this small is copied behind its head, so that both leave in one write

Answered = Callable[[UpstreamResponse | UpstreamError], None]
"""Told once of a request: its response when the head is there, or why none will come."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. connect: DNS, TCP and TLS. first_byte: from the request sent to the response head. idle: from one
    piece of the body to the next, while somebody waits for it. total: everything together."""

    connect: float = 5.0
    first_byte: float = 600.0
    idle: float = 300.0
    total: float = 3600.0


class StaleConnection(UpstreamError):
    """The connection died with the request's arrival, before a byte of an answer. If it was a kept one, the upstream
    had closed it before and never saw the request: it is safe to ask again."""


class Connection(asyncio.Protocol):
    """Owned by the client's pool while idle and by one response while busy.

    on_idle is called when the response has ended and the connection can be used again, on_lost when it is gone.
    After anything unusual the connection is dropped, never reused: what is left in it can't be trusted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_idle: Callable[["Connection"], None],
        on_lost: Callable[["Connection"], None],
    ) -> None:
        self.idle_since = 0.0
        self._loop = loop
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser | None = None
        self._reading = True

        # The exchange under way.
        self._busy = False
        self._answered: Answered | None = None  # while the response head is awaited
        self._response: UpstreamResponse | None = None  # while its body is received
        self._came: UpstreamResponse | None = None  # its head came in this read
        self._headers: list[tuple[bytes, bytes]] = []
        self._bodyless = False
        self._ended = False  # the parser saw the end of the message
        self._reusable = False
        self._unframed = 0  # bytes since the last head or body bytes
        self._sent_at = 0.0
        self._timeouts = Timeouts()
        self._total_at = 0.0

        # One timer that is moved rather than renewed: a request on a kept connection sets none at all.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._deadline = 0.0

    @property
    def usable(self) -> bool:
        """Whether an idle connection may carry another request, as far as this side knows."""
        return not self._transport.is_closing()

    async def exchange(
        self, head: bytes, body: bytes, *, bodyless: bool, timeouts: Timeouts, total_at: float
    ) -> UpstreamResponse:
        """Send a request and return its response when the head has arrived; the rest as in `begin`. Raises
        UpstreamError; cancelling closes the connection.
        """
        answer: asyncio.Future[UpstreamResponse] = self._loop.create_future()

        def answered(found: UpstreamResponse | UpstreamError) -> None:
            if answer.done():
                if isinstance(found, UpstreamResponse):
                    found.close()
            elif isinstance(found, UpstreamError):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        self.begin(head, body, answered, bodyless=bodyless, timeouts=timeouts, total_at=total_at)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                if self._answered is answered:
                    self.abandon()
            elif answer.exception() is None:  # it came in the same moment; the connection may be another's by now
                answer.result().close()
            raise

    def begin(
        self, head: bytes, body: bytes, answered: Answered, *, bodyless: bool, timeouts: Timeouts, total_at: float
    ) -> None:
        """Send a request; ``answered`` is called when its head has arrived, never before this returns.

        bodyless: the response has no body whatever its headers say (HEAD). total_at: loop time at which to give up.
        """
        self._busy = True
        self._headers = []
        self._bodyless = bodyless
        self._ended = False
        self._unframed = 0
        self._timeouts = timeouts
        self._total_at = total_at
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._sent_at = self._loop.time()
        self._wait_until(min(self._sent_at + timeouts.first_byte, total_at))
        self._answered = answered
        if len(body) < _JOIN_BELOW:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def abandon(self) -> None:
        """Close at once, without a word to whoever reads the response."""
        self._busy = False
        self._answered = self._response = self._came = None
        self._transport.abort()

    def close(self) -> None:
        """Close an idle connection in peace; end a busy one with an error for its response."""
        if self._busy:
            self._fail("reset", "the gateway closed the connection")
        else:
            self._transport.close()

    def expect_body(self) -> None:
        """From now on the upstream's silence counts as idle time."""
        when = self._loop.time() + self._timeouts.idle
        self._deadline = when = min(when, self._total_at)
        if self._timer is None or when < self._timer_at:
            self._wait_until(when)

    def resume(self) -> None:
        """The consumer has caught up."""
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:  # a first token may take minutes; middleboxes forget silent connections
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self._parser is None:
            self._transport.abort()  # bytes that nobody asked for
            return
        self._unframed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("protocol", "the upstream switched to another protocol unasked")
            return
        except httptools.HttpParserError as error:
            if not self._ended:
                reason = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
                self._fail("protocol", f"the upstream's answer is not HTTP: {reason}")
                return
            self._reusable = False  # the answer is whole, but bytes follow that nobody asked for
        if self._ended:
            self._release()
        elif self._unframed > MAX_HEAD:
            self._fail("protocol", "the upstream's headers are too large")
        elif self._response is not None:
            self._response.arrived()
        if self._came is not None:
            self._tell(self._came)

    def eof_received(self) -> None:
        if self._response is not None and not any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self._response.headers
        ):
            self._end()  # a body delimited by the end of the connection
            self._reusable = False
            self._release()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fail("reset", "the upstream closed the connection before the end of its answer")
        self._parser = None  # it refers back to this object
        self._on_lost(self)

    # The parser's side

    def on_message_begin(self) -> None:
        if self._ended:
            raise ValueError("bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is None:  # else it is a trailer, which nobody here needs
            name = name.lower()
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise ValueError("transfer coding other than chunked")
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        if self._unframed > MAX_HEAD and sum(len(n) + len(v) + 4 for n, v in self._headers) > MAX_HEAD:
            raise ValueError("headers too large")
        if self._answered is None:
            raise ValueError("nobody waits for it any more")
        self._unframed = 0
        self._response = self._came = UpstreamResponse(self, status, self._headers)
        if self._bodyless:
            self._end()
            self._parser = None  # it waits for the body that the headers announce

    def on_body(self, data: bytes) -> None:
        if self._ended:
            raise ValueError("a body where there is none")
        self._unframed = 0
        if self._response is not None and self._response.receive(data) and self._reading:
            self._reading = False
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response is not None:  # else it was an interim response
            self._end()

    # Ends

    def _end(self) -> None:
        """The message is whole. Decide here whether the connection can be kept; surplus bytes may still follow."""
        self._ended = True
        # An answer that comes before the whole request is out leaves the connection with the rest of that request.
        self._reusable = (
            self._parser is not None
            and self._parser.should_keep_alive()
            and self._transport.get_write_buffer_size() == 0
        )

    def _release(self) -> None:
        response, self._response = self._response, None
        self._busy = False
        if self._reusable:
            self.resume()
            self._on_idle(self)
        else:
            self._transport.abort()
        if response is not None:
            response.finish()

    def _fail(self, kind: ErrorKind, message: str) -> None:
        """End the exchange under way, if any, with an error, and the connection with it."""
        answered, response, came = self._answered, self._response, self._came
        stale = (
            kind == "reset"
            and answered is not None
            and self._unframed == 0
            and self._loop.time() - self._sent_at < STALE_WINDOW
        )
        self.abandon()
        error = (StaleConnection if stale else UpstreamError)(kind, message, sent=True)
        if response is not None:
            response.fail(error)
        if answered is not None:
            answered(came or error)

    def _tell(self, response: UpstreamResponse) -> None:
        """Hands a response over, outside the parser: whoever gets it may use the connection for another request."""
        answered, self._answered, self._came = self._answered, None, None
        if answered is not None:
            answered(response)

    # Time

    def _wait_until(self, when: float) -> None:
        self._deadline = when
        if self._timer is None or when < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = when
            self._timer = self._loop.call_at(when, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        if not self._busy:
            return
        now = self._loop.time()
        if now < self._deadline:
            self._wait_until(self._deadline)
        elif now >= self._total_at:
            self._fail("timeout", "the upstream's answer took longer than the total limit")
        elif self._answered is not None:
            self._fail("timeout", "the upstream sent no response in time")
        elif self._response is not None and self._response.awaited:
            self._fail("timeout", "the upstream fell silent in the middle of its answer")
        else:  # the consumer is the slow one: only the total limit counts
            self._wait_until(self._total_at)
