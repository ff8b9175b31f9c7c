"""The short path: a uvicorn protocol that answers a fresh hit straight from the socket, before ASGI is entered.

It takes one complete ``POST`` whose head it surely understands (`gateway.heads`); what memory cannot answer goes on to
the pipeline from here, too. All else, pipelined requests and unfinished ones among it, takes uvicorn's own protocol and
ASGI to the pipeline, which gives the same answer. What it uses of uvicorn's internals: ``data_received``,
``on_message_begin``, ``on_message_complete``, ``_start_asgi_task``, ``send_400_response``, ``resume_writing``, the
keep-alive timer, ``app``, ``cycle``, ``flow``, ``pipeline``, ``tasks`` and ``server_state``; the version is pinned and
`tests/gateway/test_wire.py` holds the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.app import Gateway
from gateway.direct import Errand
from gateway.exchange import Exchange
from gateway.heads import MAX_HEAD, Head
from gateway.http import Headers, Response
from gateway.outflow import Chunks, response_head
from gateway.shortcut import Lookup

log = logging.getLogger(__name__)

CHUNKED = b"transfer-encoding: chunked\r\n"
TEXT = (b"content-type", b"text/plain; charset=utf-8")


class WireProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the short path in front; the application must be the `Gateway` itself, not wrapped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gateway = self.app
        assert isinstance(gateway, Gateway)
        self._pipeline = gateway.pipeline
        self._direct = gateway.direct
        self._heads = gateway.heads
        self._shortcut = gateway.shortcut
        self._in_message = False  # uvicorn's parser has begun a message and not seen its end
        self._head: Head | None = None  # the body of this head is still coming
        self._parts: list[bytes] = []
        self._missing = 0
        self._waiting: list[bytes] | None = None  # an answer from here is awaited; what came meanwhile
        self._errand: Errand | None = None  # the answer comes straight from an upstream
        self._ahead = b""  # the head of its answer, which goes out with the first chunk
        self._chunks: Chunks | None = None  # the stream that is being sent from here
        self._answering: RequestResponseCycle | None = None  # the last request that came by ASGI
        self._for_caller: asyncio.Task[None] | None = None  # the last on the full path, if it serves this caller only
        self._ending = False
        self._last_answer = 0.0
        self._common: list[tuple[bytes, bytes]] = []  # uvicorn's own headers, made anew each second
        self._common_lines = b""
        self._first_lines = STATUS_LINE[200]

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None:
            self._waiting.append(data)
            self.flow.pause_reading()
        elif self._head is not None:
            self._more(self._head, data)
        elif self._is_busy():
            super().data_received(data)
        else:
            self._first(data)

    def _is_busy(self) -> bool:
        """Whether uvicorn has a request that is not over, or an answer that the caller has not taken yet."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return self._in_message or answering or bool(self.pipeline) or self.flow.write_paused

    def _first(self, data: bytes) -> None:
        """Data between two requests: it begins a new one."""
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD) + 4
        head = self._heads.get(data[:end]) if end > 4 else None
        missing = head.length + head.body_length - len(data) if head is not None else -1
        if head is None or missing < 0:
            super().data_received(data)
        elif missing:
            self._head, self._parts, self._missing = head, [data], missing
        else:
            self._whole(head, data)

    def _more(self, head: Head, data: bytes) -> None:
        """A further part of a body that comes in several reads."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        whole = b"".join(self._parts)
        self._head, self._parts = None, []
        if self._missing:
            super().data_received(whole)
        else:
            self._whole(head, whole)

    def _whole(self, head: Head, data: bytes) -> None:
        """One whole request and nothing behind it."""
        body = data[head.length :]
        try:
            answer = self._shortcut.answer(head.caught, body)
        except Exception:
            log.exception("the short path failed; the full path answers")
            answer = None
        if answer is None:
            self._enter(head, body)
        elif isinstance(answer, bytes):
            self._respond(answer)
        else:
            self._waiting, lookup = [], answer
            lookup.call.add_done_callback(lambda _: self._looked_up(head, data, lookup))

    def _looked_up(self, head: Head, data: bytes, lookup: Lookup) -> None:
        """The shared store has answered, or failed; whatever came meanwhile is a further request, or an early end."""
        try:
            answer = self._shortcut.conclude(head.caught, lookup)
        except Exception:
            log.exception("the short path failed; the full path answers")
            answer = None
        if self.transport.is_closing():
            self._waiting = None
        elif answer is not None:
            self._respond(answer)
            self._go_on()
        else:
            self._enter(head, data[head.length :])

    def _respond(self, answer: bytes) -> None:
        state = self.server_state
        if state.default_headers is not self._common:
            self._renew_common()
        self.transport.write(self._first_lines + answer)
        state.total_requests += 1
        self._rest()

    def _enter(self, head: Head, body: bytes) -> None:
        """No short way. What comes meanwhile waits: it is a further request, or an early end."""
        if self._waiting is None:
            self._waiting = []
        request = head.request.with_body(body)
        met: Exchange | None = None
        try:
            met = self._direct.meet(request, head.caught.caller)
            self._errand = self._direct.begin(met, self)
        except Exception:
            log.exception("the direct path failed; the full path answers")
        if self._errand is None:
            self.hand_over(self._pipeline.answer(request, met))

    # The outlet of an errand

    def whole(self, response: Response) -> None:
        """See `Outlet`, also for what follows."""
        try:
            self._send_whole(response)
        except ValueError:
            log.exception("an answer broke off")
            self.transport.close()
        self._done()

    def begin(self, status: int, headers: Headers) -> None:
        self._ahead = self._shown(status, headers, CHUNKED)

    def chunk(self, data: bytes, *, last: bool) -> None:
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if self._ahead:
            chunk, self._ahead = self._ahead + chunk, b""
        if last:
            self.transport.write(chunk + b"0\r\n\r\n")
            self._done()
        else:
            self.transport.write(chunk)

    def give_up(self) -> None:
        self.transport.close()
        self._done()

    def hand_over(self, work: Coroutine[Any, Any, Response], over: Callable[[], None] | None = None) -> None:
        self._errand = None
        task = self._for_caller = self.loop.create_task(self._full_path(work))
        task.add_done_callback(self.tasks.discard)
        if over is not None:
            task.add_done_callback(lambda _: over())
        self.tasks.add(task)

    async def _full_path(self, work: Coroutine[Any, Any, Response]) -> None:
        try:
            try:
                response = await work
            except Exception:
                log.exception("a request failed")
                self._ending, response = True, Response(500, [TEXT], b"Internal Server Error")
            await self._send(response)
        except asyncio.CancelledError:  # the caller has left, or the server ends
            self.transport.close()
        except Exception:
            log.exception("an answer broke off")
            self.transport.close()
        self._done()

    def _done(self) -> None:
        """The answer is out, or never will be."""
        self._errand = None
        self.server_state.total_requests += 1
        if self._ending:
            self.transport.close()
        if self.transport.is_closing():
            self._waiting = None
        else:
            self._rest()
            self._go_on()

    async def _send(self, response: Response) -> None:
        body = response.body
        if isinstance(body, bytes):
            self._send_whole(response)
            return
        failure: Exception | None = None
        try:
            head = self._shown(response.status, response.headers, CHUNKED)
            self._chunks = Chunks(head, body, self.transport, self.flow)
            await self._chunks.over
        except Exception as error:
            failure = error
            raise
        finally:
            self._chunks = None
            body.close(failure)

    def _send_whole(self, response: Response) -> None:
        assert isinstance(response.body, bytes)
        framing = b"content-length: %d\r\n" % len(response.body)
        self.transport.write(self._shown(response.status, response.headers, framing) + response.body)

    def _shown(self, status: int, headers: Headers, framing: bytes) -> bytes:
        if self.server_state.default_headers is not self._common:
            self._renew_common()
        if self._ending:
            framing += b"connection: close\r\n"
        return response_head(status, self._common_lines, headers, framing)

    def _renew_common(self) -> None:
        self._common = self.server_state.default_headers
        self._common_lines = b"".join(name + b": " + value + b"\r\n" for name, value in self._common)
        self._first_lines = STATUS_LINE[200] + self._common_lines

    def _rest(self) -> None:
        """The connection is idle from now on."""
        self._last_answer = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()

    def _go_on(self) -> None:
        """The answer is out: now to what came meanwhile."""
        behind, self._waiting = self._waiting, None
        if behind:
            self.flow.resume_reading()
            self.data_received(b"".join(behind))
        if self._ending:
            self.shutdown()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._chunks is not None:
            self._chunks.go_on()
        if self._errand is not None:
            self._errand.on_room()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._answering = cycle
        self._for_caller = task if cycle.scope["path"].startswith("/v1/") else None

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP ends the connection; it is told so only where the caller cannot take that for the answer to
        a request before, or for a part of it. An answer that is owed to a whole request is still given.
        """
        owed = self._answering
        if owed is None or owed.response_complete or (owed.more_body and not owed.response_started):
            super().send_400_response(msg)
        elif owed.more_body:
            self.transport.close()
        else:
            owed.keep_alive = False
            self.pipeline.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is computed for a caller who has left."""
        super().connection_lost(exc)
        if self._answering is not None:
            self._answering.disconnected = True  # which uvicorn says of the last request only, had others come behind
        if self._for_caller is not None:
            self._for_caller.cancel()
        if self._errand is not None:
            self._errand.leave()

    def shutdown(self) -> None:
        """A request that is still coming, or whose lookup is under way, is still answered."""
        self._ending = True
        if self._head is not None:
            self._head, begun = None, b"".join(self._parts)
            super().data_received(begun)
        if self._waiting is None:
            super().shutdown()

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """The timer is not renewed by every hit; when it fires it looks whether it is due."""
        if self._head is not None or self._waiting is not None:
            self._last_answer = self.loop.time()  # a request is on its way
        left = self._last_answer + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()
