"""What an upstream answered: status and headers at once, the body as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Literal, Protocol

HIGH_WATER = 256 * 1024  # bytes waiting for a slow consumer before the connection stops reading

ErrorKind = Literal["connect", "tls", "dns", "timeout", "reset", "protocol", "too_large"]


class UpstreamError(Exception):
    """An upstream could not be asked, or its answer could not be had whole.

    sent: whether the request may have reached the upstream, that is, whether asking again could do the work twice.
    """

    def __init__(self, kind: ErrorKind, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.sent = sent


class Source(Protocol):
    """What a response needs of the connection that its body comes from."""

    def expect_body(self) -> None:
        """Somebody waits for the next bytes from now on."""
        ...

    def resume(self) -> None:
        """The consumer has caught up."""
        ...

    def abandon(self) -> None:
        """Nobody wants the rest."""
        ...


class UpstreamResponse:
    """One answer. Read it to its end or `close` it; an unread body holds the connection.

    ``on_arrival`` is called whenever there may be more to `take`, once for all that came in one read.
    """

    __slots__ = (
        *("_buffer", "_buffered", "_complete", "_connection", "_error", "_waiter"),
        *("awaited", "headers", "on_arrival", "status"),
    )

    def __init__(self, connection: Source, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers  # names in lower case, order and repeats as received
        self._connection: Source | None = connection  # None once the connection is no longer ours
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._complete = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.awaited = False  # a consumer waits for the next bytes right now
        self.on_arrival: Callable[[], object] | None = None

    @property
    def ended(self) -> bool:
        """Whether the whole body has arrived and was taken."""
        return self._complete and not self._buffer

    @property
    def complete(self) -> bool:
        """Whether the whole body has arrived, as its framing says (it may still wait to be read)."""
        return self._complete

    @property
    def buffered(self) -> int:
        """Bytes that have arrived and wait for the consumer."""
        return self._buffered

    def take(self) -> bytes:
        """What of the body has come since, transfer-decoded, not content-decoded; empty while there is nothing, or
        nothing more, and then it counts as waited for. Raises UpstreamError as `chunks` does.
        """
        if self._buffer:
            return self._take()
        if self._error is not None:
            raise self._error
        if self._connection is not None:
            self.awaited = True
            self._connection.expect_body()
        return b""

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body, once, in order: transfer-decoded, not content-decoded. What piled up comes as one chunk.

        Raises UpstreamError on a reset, a short body or a timeout, after all that had arrived before. Leaving the
        iteration early (an exception, a cancelled task) closes the response.
        """
        try:
            while True:
                if self._buffer:
                    yield self._take()
                elif self._complete:
                    return
                else:
                    await self._arrival()
        finally:
            self.close()

    async def read(self, limit: int) -> bytes:
        """The whole body, transfer-decoded. Raises UpstreamError(kind="too_large") beyond `limit` bytes."""
        taken: list[bytes] = []
        size = 0
        try:
            while True:
                size += self._buffered
                if size > limit:
                    raise UpstreamError("too_large", f"the upstream's answer is larger than {limit} bytes", sent=True)
                if self._buffer:
                    taken.append(self._take())
                elif self._complete:
                    return taken[0] if len(taken) == 1 else b"".join(taken)
                else:
                    await self._arrival()
        finally:
            self.close()

    def close(self) -> None:
        """Give up the rest of the body; its connection is closed at once. Nothing happens if the body is complete."""
        connection, self._connection, self.on_arrival = self._connection, None, None
        if connection is not None:
            connection.abandon()
            self.fail(UpstreamError("reset", "the response was closed before its end", sent=True))

    def _take(self) -> bytes:
        data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        self._buffered = 0
        if self._connection is not None:
            self._connection.resume()
        return data

    async def _arrival(self) -> None:
        if self._error is not None:
            raise self._error
        assert self._connection is not None and self._waiter is None, "one reader at a time"
        self.awaited = True
        self._connection.expect_body()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # What follows is called by the connection.

    def receive(self, data: bytes) -> bool:
        """Take the next body bytes; true if the consumer has fallen behind."""
        self._buffer.append(data)
        self._buffered += len(data)
        return self._buffered > HIGH_WATER

    def arrived(self) -> None:
        """All that came in one read has been received."""
        if self._buffer:
            self._wake()

    def finish(self) -> None:
        """The body is whole."""
        self._complete = True
        self._connection = None
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        """The body will never be whole."""
        self._error = error
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        self.awaited = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_arrival is not None:
            self.on_arrival()
