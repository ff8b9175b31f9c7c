"""The short path: a uvicorn protocol that answers a fresh hit straight from the socket, before ASGI is entered.

It takes one complete ``POST`` whose head it surely understands (`gateway.heads`); all else, pipelined requests and
unfinished ones among it, goes to uvicorn's own protocol and the full path, which gives the same answer. What it uses of
uvicorn's internals: ``data_received``, ``on_message_begin``, ``on_message_complete``, ``_start_asgi_task``,
``send_400_response``, the keep-alive timer, ``app``, ``cycle``, ``flow``, ``pipeline`` and ``server_state``; the
version is pinned and `tests/gateway/test_wire.py` holds the rest.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.app import Gateway
from gateway.heads import MAX_HEAD, Head
from gateway.shortcut import Lookup

log = logging.getLogger(__name__)


class WireProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the short path in front; the application must be the `Gateway` itself, not wrapped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gateway = self.app
        assert isinstance(gateway, Gateway)
        self._heads = gateway.heads
        self._shortcut = gateway.shortcut
        self._in_message = False  # uvicorn's parser has begun a message and not seen its end
        self._head: Head | None = None  # the body of this head is still coming
        self._parts: list[bytes] = []
        self._missing = 0
        self._waiting: list[bytes] | None = None  # a lookup in the shared store is under way; what came meanwhile
        self._answering: RequestResponseCycle | None = None  # the last request that took the full path
        self._for_caller: asyncio.Task[None] | None = None  # its task, if it serves this caller only
        self._ending = False
        self._last_hit = 0.0
        self._common: list[tuple[bytes, bytes]] = []  # uvicorn's own headers, made anew each second
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
            lookup = self._shortcut.look_up(head.caught, body) if answer is None else None
        except Exception:
            log.exception("the short path failed; the full path answers")
            answer = lookup = None
        if answer is not None:
            self._respond(answer)
        elif lookup is not None:
            self._waiting = []
            lookup.call.add_done_callback(lambda _: self._looked_up(head, data, lookup))
        else:
            super().data_received(data)

    def _looked_up(self, head: Head, data: bytes, lookup: Lookup) -> None:
        """The shared store has answered, or failed; whatever came meanwhile is a further request, or an early end."""
        try:
            answer = self._shortcut.conclude(head.caught, lookup)
        except Exception:
            log.exception("the short path failed; the full path answers")
            answer = None
        behind, self._waiting = self._waiting, None
        if self.transport.is_closing():
            return
        if answer is not None:
            self._respond(answer)
        else:
            super().data_received(data)
        if behind:
            self.flow.resume_reading()
            self.data_received(b"".join(behind))
        if self._ending:
            self.shutdown()

    def _respond(self, answer: bytes) -> None:
        common = self.server_state.default_headers
        if common is not self._common:
            shown = b"".join(name + b": " + value + b"\r\n" for name, value in common)
            self._common, self._first_lines = common, STATUS_LINE[200] + shown
        self.transport.write(self._first_lines + answer)
        self.server_state.total_requests += 1
        self._last_hit = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._answering = cycle
        self._for_caller = task if cycle.scope["path"].startswith("/v1/") else None

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP ends the connection; it is told so only where the caller cannot take that for the answer to
        a request before, or for a part of it.
        """
        owed = self._answering
        if owed is not None and not owed.response_complete and (owed.response_started or not owed.more_body):
            self.transport.close()
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is computed for a caller who has left."""
        super().connection_lost(exc)
        if self._answering is not None:
            self._answering.disconnected = True  # which uvicorn says of the last request only, had others come behind
        if self._for_caller is not None:
            self._for_caller.cancel()

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
            self._last_hit = self.loop.time()  # a request is on its way
        left = self._last_hit + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()
