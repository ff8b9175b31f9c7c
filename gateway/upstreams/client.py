"""Keep-alive HTTP/1.1 client for upstreams, built for a proxy: little work per chunk, back-pressure kept, TLS.

One client per process and event loop. Idle connections are kept per origin and used last in, first out.
"""

import asyncio
import socket
import ssl
from collections import deque
from typing import NamedTuple

from gateway.upstreams.connection import Answered, Connection, StaleConnection, Timeouts
from gateway.upstreams.request import request_head
from gateway.upstreams.response import UpstreamError, UpstreamResponse

__all__ = ["Origin", "Timeouts", "UpstreamClient", "UpstreamError", "UpstreamResponse"]

KEEP_IDLE = 60.0  # seconds
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Where connections go: scheme `http` or `https`, host name or address (IPv6 without brackets), port."""

    scheme: str
    host: str
    port: int

    def authority(self) -> bytes:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = host if self.port == _DEFAULT_PORTS.get(self.scheme) else f"{host}:{self.port}"
        return shown.encode("idna" if not shown.isascii() else "ascii")


class _Pool:
    """The connections of one origin."""

    def __init__(self, origin: Origin) -> None:
        self.authority = origin.authority()
        self.idle: deque[Connection] = deque()  # oldest first

    def take(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                return connection
        return None


class UpstreamClient:
    """Sends requests to any number of origins over pooled connections."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None, keep_idle: float = KEEP_IDLE) -> None:
        """ssl_context: whom to trust (absent: the system's authorities). keep_idle: seconds a free connection lives."""
        self._ssl_context = ssl_context
        self._keep_idle = keep_idle
        self._pools: dict[Origin, _Pool] = {}
        self._connections: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def open_connections(self) -> int:
        """Connections, busy or idle."""
        return len(self._connections)

    @property
    def idle_connections(self) -> int:
        """Connections waiting for a request."""
        return sum(len(pool.idle) for pool in self._pools.values())

    async def send(
        self,
        origin: Origin,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        timeouts: Timeouts,
        *,
        once: bool = False,
    ) -> UpstreamResponse:
        """Send a request; return when the response head has arrived. `once`: on a new connection, since one that was
        kept may turn out to be stale, and the request would have to be sent again.

        Host, framing and hop-by-hop headers are the client's own; those in `headers` are left out. A kept connection
        that turns out to be stale before any response byte is replaced once. Raises UpstreamError. Cancelling the
        awaiting task closes the connection.
        """
        loop = asyncio.get_running_loop()
        pool = self._pools.get(origin)
        if pool is None:
            pool = self._pools[origin] = _Pool(origin)
        head = request_head(method, target, pool.authority, headers, len(body))
        bodyless = method == "HEAD"
        total_at = loop.time() + timeouts.total
        connection = None if once else pool.take()
        if connection is not None:
            try:
                return await connection.exchange(head, body, bodyless=bodyless, timeouts=timeouts, total_at=total_at)
            except StaleConnection:
                pass
        connection = await self._connect(loop, origin, pool, min(loop.time() + timeouts.connect, total_at))
        return await connection.exchange(head, body, bodyless=bodyless, timeouts=timeouts, total_at=total_at)

    def begin(
        self,
        origin: Origin,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        timeouts: Timeouts,
        answered: Answered,
    ) -> Connection | None:
        """Send a request over a kept connection and call ``answered`` when its head has come, or why none will (a
        `StaleConnection` may be tried again); None if there is no such connection. Abandoning it ends the request.
        """
        pool = self._pools.get(origin)
        if pool is None or not pool.idle:
            return None
        head = request_head(method, target, pool.authority, headers, len(body))
        connection = pool.take()
        if connection is not None:
            total_at = asyncio.get_running_loop().time() + timeouts.total
            bodyless = method == "HEAD"
            connection.begin(head, body, answered, bodyless=bodyless, timeouts=timeouts, total_at=total_at)
        return connection

    async def close(self) -> None:
        """Close every connection; answers under way end with UpstreamError(kind="reset")."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)  # let the transports tell their protocols

    async def _connect(self, loop: asyncio.AbstractEventLoop, origin: Origin, pool: _Pool, until: float) -> Connection:
        if self._closed:
            raise UpstreamError("connect", "the client is closed", sent=False)

        def idle(connection: Connection) -> None:
            connection.idle_since = loop.time()
            pool.idle.append(connection)
            if self._sweep is None:
                self._sweep = loop.call_later(self._keep_idle, self._close_idle, loop)

        def lost(connection: Connection) -> None:
            self._connections.discard(connection)
            try:
                pool.idle.remove(connection)
            except ValueError:
                pass

        secure = origin.scheme == "https"
        try:
            async with asyncio.timeout_at(until):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, idle, lost),
                    origin.host,
                    origin.port,
                    ssl=self._tls() if secure else None,
                )
        except TimeoutError:
            raise UpstreamError("timeout", f"no connection to {origin.host} in time", sent=False) from None
        except (ssl.SSLError, ssl.CertificateError) as error:
            raise UpstreamError("tls", f"TLS with {origin.host} failed: {error}", sent=False) from error
        except (socket.gaierror, UnicodeError) as error:
            raise UpstreamError("dns", f"host {origin.host} was not found", sent=False) from error
        except OSError as error:
            message = f"no connection to {origin.host}:{origin.port}: {error.strerror or error}"
            raise UpstreamError("connect", message, sent=False) from error
        self._connections.add(connection)
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    def _close_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what has been idle too long and look again when the next one may be."""
        self._sweep = None
        before = loop.time() - self._keep_idle
        oldest = None
        for pool in self._pools.values():
            while pool.idle and pool.idle[0].idle_since <= before:
                pool.idle.popleft().close()
            if pool.idle:
                oldest = min(oldest or pool.idle[0].idle_since, pool.idle[0].idle_since)
        if oldest is not None:
            self._sweep = loop.call_at(oldest + self._keep_idle, self._close_idle, loop)
