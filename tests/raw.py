"""A raw HTTP/1.1 connection, for what no client library would send or would read so slowly."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """A whole response: head as it came, and the body without its chunk framing."""

    status: int
    head: bytes
    body: bytes

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names in lower case, in order."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


class RawConnection:
    """Bytes out, responses in. ``receive_buffer``: bytes that the system takes in before this side reads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str, receive_buffer: int | None = None) -> RawConnection:
        """Connects to the address of a gateway."""
        parts = urlsplit(url)
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        return cls(*await asyncio.open_connection(sock=sock, limit=max(65536, receive_buffer or 1 << 20)))

    async def __aenter__(self) -> RawConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self, timeout: float = 10) -> bytes:
        """The next response's head, without its blank line; empty if the connection ends before it."""
        try:
            async with asyncio.timeout(timeout):
                return (await self.reader.readuntil(b"\r\n\r\n"))[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def answer(self, timeout: float = 10) -> Answer | None:
        """The next response (interim ones left out); None if the connection is closed instead. Raises TimeoutError."""
        head = await self.head(timeout)
        if not head:
            return None
        status = int(head.split(b" ", 2)[1])
        if status < 200:
            return await self.answer(timeout)
        empty = Answer(status, head, b"")
        async with asyncio.timeout(timeout):
            if empty.header("transfer-encoding") == "chunked":
                return Answer(status, head, b"".join([chunk async for chunk in self._chunks()]))
            return Answer(status, head, await self.reader.readexactly(int(empty.header("content-length") or 0)))

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def is_closed(self, timeout: float = 2) -> bool:
        """Whether the other side ends the connection, with nothing more to read, within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def widen(self) -> None:
        """Takes in more from now on."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)

    def reset(self) -> None:
        """Closes with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def post(path: str, body: bytes, *headers: str, host: str = "h") -> bytes:
    """A plain ``POST`` with a length."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body
