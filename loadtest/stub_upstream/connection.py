"""The stub upstream's side of a socket: raw asyncio and httptools, since faults need control of every byte."""

import asyncio
import socket
import struct
import time
from collections import deque
from typing import Protocol, cast

import httptools

from loadtest.stub_upstream.call import Call
from loadtest.stub_upstream.reply import Wire


class Stub(Protocol):
    """Who decides the replies."""

    def connected(self, connection: "Connection") -> None: ...
    def disconnected(self, connection: "Connection") -> None: ...
    def arrived(self, call: Call) -> Wire: ...
    def left(self, call: Call, *, answered: bool, by_peer: bool) -> None: ...


class Connection(asyncio.Protocol):
    """Reads requests and answers them one after the other."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._call = Call()  # the one being read
        self._body: list[bytes] = []
        self._expects = False
        self._raw = bytearray()
        self._waiting: deque[Call] = deque()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._answering: asyncio.Task[None] | None = None
        self._dropped = False

    def drop(self) -> None:
        """Close at once; that is not the client's doing."""
        self._dropped = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._stub.connected(self)
        self._answering = asyncio.get_running_loop().create_task(self._answer_all())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()
        self._stub.disconnected(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._raw += data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self._transport.close()

    # The parser's side

    def on_message_begin(self) -> None:
        self._call = Call()
        self._body = []
        self._expects = False

    def on_url(self, url: bytes) -> None:
        self._call.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._call.raw_headers.append((name, value))
        self._expects |= name.lower() == b"expect"

    def on_headers_complete(self) -> None:
        self._call.method = self._parser.get_method().decode()
        if self._expects:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._call.body = b"".join(self._body)
        self._call.raw = bytes(self._raw)  # of pipelined requests, the first has those behind it as well
        self._raw.clear()
        self._waiting.append(self._call)
        self._arrived.set()

    # Answers

    async def _answer_all(self) -> None:
        while not self._transport.is_closing():
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            call = self._waiting.popleft()
            answered = False
            try:
                await self._send(self._stub.arrived(call), call)
                answered = True
            finally:
                self._stub.left(call, answered=answered, by_peer=not self._dropped)

    async def _send(self, wire: Wire, call: Call) -> None:
        """Write a reply, to the end that it is meant to have. Cancelled when the connection is lost."""
        for pause in wire.before:
            await pause.wait()
        chunked = wire.framing == "chunked"
        pending = [] if wire.framing == "raw" else [_head(wire)]  # leaves with the first bytes of the body
        for step in wire.steps:
            if not isinstance(step, bytes):
                self._flush(pending)
                await step.wait()
                continue
            pending += (b"%x\r\n" % len(step), step, b"\r\n") if chunked else (step,)
            call.writes.append(time.monotonic())
            self._flush(pending)
            await self._writable.wait()
            await asyncio.sleep(0)
        if chunked and wire.ending == "end":
            pending.append(b"0\r\n\r\n")
        self._flush(pending)
        if wire.ending == "stall":
            await asyncio.Event().wait()
        elif wire.ending == "reset":
            await self._reset()
        elif wire.ending == "close" or wire.framing in ("close", "raw"):
            self._transport.close()

    def _flush(self, pending: list[bytes]) -> None:
        if pending:
            self._transport.write(b"".join(pending))
            pending.clear()

    async def _reset(self) -> None:
        """Close with a TCP reset, after what was written before has left and been read."""
        async with asyncio.timeout(5):
            while self._transport.get_write_buffer_size():  # noqa: ASYNC110 (transports have no event for it)
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _head(wire: Wire) -> bytes:
    lines = [f"HTTP/1.1 {wire.status} Stub", *(f"{name}: {value}" for name, value in wire.headers)]
    if wire.framing == "chunked":
        lines.append("transfer-encoding: chunked")
    elif wire.framing == "length":
        lines.append(f"content-length: {wire.size if wire.length is None else wire.length}")
    else:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
