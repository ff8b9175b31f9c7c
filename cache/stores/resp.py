"""A Redis client made for lookups: commands of one event-loop turn go out in one write, replies resolve plain futures.

No task, lock or coroutine per command; hiredis parses. Speaks RESP3 where the server does, else RESP2.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import hiredis

from cache.stores.address import Address
from cache.stores.base import Kind, StoreError
from cache.stores.deadlines import Deadlines

log = logging.getLogger(__name__)
T = TypeVar("T")
Argument = bytes | str | int
Reply = Any  # bytes, int, float, bool, None, or lists and dicts of them
Push = Callable[[Reply], None]

MAX_UNSENT = 16 << 20  # bytes that may wait for a server that does not read; more is refused
MAX_REPLY = 256 << 20  # bytes of one unfinished reply; more is a lie
STALL = 1.0  # seconds without any byte, after a command timed out, until the connection is given up
CLOSING = 1.0  # seconds that close() waits for the answers to what was sent
MAX_BACKOFF = 2.0  # seconds between attempts to connect

pack = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)  # its stub knows one argument only
_INCOMPLETE = object()
_KINDS: dict[str, Kind] = {
    "OOM": "full", "READONLY": "readonly", "MISCONF": "readonly", "NOREPLICAS": "readonly",
    "LOADING": "busy", "BUSY": "busy", "TRYAGAIN": "busy", "MASTERDOWN": "busy", "CLUSTERDOWN": "busy",
    "NOAUTH": "denied", "WRONGPASS": "denied", "NOPERM": "denied",
    "MOVED": "moved", "ASK": "moved", "WRONGTYPE": "data",
}  # fmt: skip


def _reply_error(text: str) -> StoreError:
    return StoreError(_KINDS.get(text.partition(" ")[0], "protocol"), text)


class Connection(asyncio.Protocol):
    """One connection: the n-th reply answers the n-th command. What nobody asked for goes to `on_push`."""

    def __init__(self, on_push: Push | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=_reply_error, notEnoughData=_INCOMPLETE)
        self._waiting: deque[tuple[Future[Any], Callable[[Reply], Any] | None]] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._full = False
        self._on_push = on_push
        self._silent_since: float | None = None
        self.closed: Future[StoreError] = self._loop.create_future()  # resolves when the connection is lost

    @classmethod
    async def connect(cls, address: Address, timeout: float, on_push: Push | None = None) -> Connection:
        """A connection ready for commands; StoreError if there is none within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        connection = cls(on_push)
        try:
            async with asyncio.timeout(timeout):
                if address.path:
                    await loop.create_unix_connection(lambda: connection, address.path)
                else:
                    await loop.create_connection(lambda: connection, address.host, address.port, ssl=address.tls)
                await connection._greet(address)
        except TimeoutError:
            connection.abort("no greeting")
            raise StoreError("timeout", f"{address} did not let us in within {timeout:g} s") from None
        except OSError as error:
            raise StoreError("unavailable", f"cannot connect to {address}: {error}") from error
        except BaseException:
            connection.abort("greeting failed")
            raise
        return connection

    async def _greet(self, address: Address) -> None:
        credentials = (address.user or "default", address.password) if address.password else ()
        try:
            auth = (b"AUTH", *credentials) if credentials else ()
            await self.send(b"HELLO", 3, *auth, b"SETNAME", b"warmgate")
        except StoreError as error:
            if error.kind != "protocol" or self.closed.done():
                raise
            if credentials:  # a server before Redis 6: RESP2, and users exist only where one was named
                await self.send(b"AUTH", *(credentials if address.user else credentials[1:]))
        if address.db:
            await self.send(b"SELECT", address.db)

    def send(self, *command: Argument, parse: Callable[[Reply], T] | None = None) -> Future[T]:
        """The future reply of `command`, after `parse` (which raises StoreError for a reply it cannot accept)."""
        future = self._loop.create_future()
        self.submit(pack(command), future, parse)
        return future

    def submit(self, packed: bytes, future: Future[Any], parse: Callable[[Reply], Any] | None) -> None:
        if self._transport is None:
            error = self.closed.result() if self.closed.done() else StoreError("unavailable", "closed")
            future.set_exception(error.copy())
        elif self._full:
            future.set_exception(StoreError("busy", "the server does not read what is sent"))
        else:
            self._waiting.append((future, parse))
            self.write(packed)

    def write(self, packed: bytes) -> None:
        """Send without expecting a reply (it would go to `on_push`)."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(packed)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.writelines(self._out)
        self._out.clear()

    def stalled(self) -> None:
        """A command timed out: if no byte comes for a while, the connection is dead though nobody said so."""
        if self._silent_since is None:
            self._silent_since = self._loop.time()
            self._loop.call_later(STALL, self._check_stall, self._silent_since)

    def _check_stall(self, since: float) -> None:
        if self._silent_since == since:
            self.abort(f"no byte in {STALL:g} s")

    def abort(self, reason: str, kind: Kind = "unavailable") -> None:
        """Close at once; all that wait fail with StoreError(kind)."""
        self._lost(StoreError(kind, reason))
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=MAX_UNSENT)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._silent_since = None
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while True:
                reply = reader.gets()
                if reply is _INCOMPLETE:
                    if reader.len() > MAX_REPLY:
                        raise hiredis.ProtocolError("the reply is too long")
                    return
                if not waiting or type(reply) is hiredis.PushNotification:
                    if self._on_push is None:
                        raise hiredis.ProtocolError("a reply to nothing")
                    self._on_push(reply)
                    continue
                future, parse = waiting.popleft()
                if not future.done():  # else it timed out or its caller left: the reply has no taker
                    _resolve(future, parse, reply)
        except hiredis.ProtocolError as error:
            self.abort(f"this is not Redis speaking: {error}", "protocol")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(StoreError("unavailable", f"the connection was lost: {exc or 'closed by the server'}"))

    def _lost(self, error: StoreError) -> None:
        if not self.closed.done():
            self.closed.set_result(error)
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error.copy())


def _resolve(future: Future[Any], parse: Callable[[Reply], Any] | None, reply: Reply) -> None:
    if isinstance(reply, StoreError):
        future.set_exception(reply)
    elif parse is None:
        future.set_result(reply)
    else:
        try:
            future.set_result(parse(reply))
        except StoreError as error:
            future.set_exception(error)
        except (TypeError, ValueError, AttributeError) as error:
            future.set_exception(StoreError("data", f"unexpected reply: {error}"))


class Client:
    """A connection that comes back by itself. Commands fail at once while the server is known to be away.

    `timeout`: seconds a command may take, then it fails with StoreError("timeout"); `connect_timeout`: the same for
    connecting and logging in. Safe to use after a fork and from one event loop after another.
    """

    def __init__(self, url: str, timeout: float = 0.05, connect_timeout: float = 1.0) -> None:
        self.address = Address.parse(url)
        self.connect_timeout = connect_timeout
        self._deadlines = Deadlines(timeout, self._timed_out)
        self._loop: AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._early: list[tuple[bytes, Future[Any], Callable[[Reply], Any] | None]] = []
        self._down: StoreError | None = None  # why the last attempt to connect failed

    async def open(self) -> None:
        """Wait for the first attempt to connect, whatever comes of it."""
        if self._keeper is None:
            self._start(asyncio.get_running_loop())
        with contextlib.suppress(StoreError):
            await self.execute(b"PING")

    async def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None and self._loop is asyncio.get_running_loop():
            keeper.cancel()
            await asyncio.wait([keeper])
            if self._connection is not None:  # the answer to this comes after those to all that was sent before
                await asyncio.wait([self._connection.send(b"PING")], timeout=CLOSING)
        self._down = StoreError("unavailable", "closed")
        self._fail_early(self._down)
        if self._connection is not None:
            self._connection.abort("closed")
            self._connection = None
            await asyncio.sleep(0)  # the turn in which the socket is closed

    def execute(self, *command: Argument, parse: Callable[[Reply], T] | None = None) -> Future[T]:
        """The future reply of `command`, after `parse`. Fails with StoreError; may be cancelled."""
        return self.execute_packed(pack(command), parse)

    def execute_packed(self, packed: bytes, parse: Callable[[Reply], T] | None) -> Future[T]:
        """The same of a command in its form on the wire."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._start(loop)
        future: Future[T] = loop.create_future()
        if self._connection is not None:
            self._connection.submit(packed, future, parse)
        elif self._down is not None:
            future.set_exception(self._down.copy())
            return future
        else:
            self._early.append((packed, future, parse))
        self._deadlines.watch(future)
        return future

    def _start(self, loop: AbstractEventLoop) -> None:
        # A connection of another loop is another process's or a dead one's: forget it, touch nothing of it.
        self._loop, self._connection, self._down, self._early = loop, None, None, []
        self._keeper = loop.create_task(self._keep())

    async def _keep(self) -> None:
        """Hold a connection, for as long as the client is open."""
        backoff = 0.05
        while True:
            try:
                self._connection = await Connection.connect(self.address, self.connect_timeout)
            except StoreError as error:
                self._down = error
                self._fail_early(error)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(2 * backoff, MAX_BACKOFF)
                continue
            self._down, backoff = None, 0.05
            early, self._early = self._early, []
            for packed, future, parse in early:
                if not future.done():
                    self._connection.submit(packed, future, parse)
            closed = self._connection.closed
            await asyncio.wait([closed])
            self._connection = None
            log.debug("lost Redis at %s: %s", self.address, closed.result())

    def _fail_early(self, error: StoreError) -> None:
        early, self._early = self._early, []
        for _, future, _ in early:
            if not future.done():
                future.set_exception(error.copy())

    def _timed_out(self) -> None:
        if self._connection is not None:
            self._connection.stalled()
