"""A TCP server whose every byte is the test's own."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.upstreams.client import Origin, Timeouts, UpstreamClient, UpstreamResponse

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """One accepted connection, seen from the server."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number  # 1 is the first connection
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Read one request, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return head + await self.reader.readexactly(int(line.split(b":")[1]))
        return head

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, data: bytes) -> None:
        await self.request()
        await self.send(data)

    def reset(self) -> None:
        """Close with a TCP reset instead of a FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self, within: float) -> bool:
        """Whether the client closes this connection in time."""
        try:
            async with asyncio.timeout(within):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


class Server:
    """What the test may know of the server: where it listens and how many connections it has accepted."""

    def __init__(self) -> None:
        self.accepted = 0
        self.origin = Origin("http", "127.0.0.1", 0)


Handler = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Serve every connection with `handler`; close it when the handler returns."""
    server = Server()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.accepted += 1
        try:
            await handler(Peer(server.accepted, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls, backlog=1000)
    server.origin = Origin("https" if tls else "http", "127.0.0.1", listener.sockets[0].getsockname()[1])
    try:
        yield server
    finally:
        listener.close()


async def ask(
    client: UpstreamClient,
    server: Server,
    *,
    method: str = "POST",
    body: bytes = b"{}",
    headers: list[tuple[bytes, bytes]] | None = None,
    timeouts: Timeouts | None = None,
) -> UpstreamResponse:
    timeouts = timeouts or Timeouts(connect=2, first_byte=5, idle=5, total=20)
    return await client.send(server.origin, method, b"/v1/x", headers or [], body, timeouts)
