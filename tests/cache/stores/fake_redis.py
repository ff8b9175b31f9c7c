"""A Redis that says what a test scripts: errors, half replies, silence, nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import hiredis

Command = list[bytes]
Script = Callable[[Command], "bytes | None"]  # the raw reply; None: say nothing

NIL = b"$-1\r\n"
OK = b"+OK\r\n"


class HangUp(Exception):
    """Raised by a script: send `last`, then close the connection."""

    def __init__(self, last: bytes = b"") -> None:
        self.last = last


class FakeRedis:
    """Greets like Redis 7 unless `greet` says otherwise; the script answers all else. Records what it was sent."""

    def __init__(self, script: Script, greet: Script) -> None:
        self.script = script
        self.greet = greet
        self.commands: list[Command] = []
        self.reads: list[list[Command]] = []  # the commands that came with one read
        self.connections = 0
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        parser = hiredis.Reader(notEnoughData=...)
        try:
            while data := await reader.read(1 << 20):
                parser.feed(data)
                batch: list[Command] = []
                while (command := parser.gets()) is not ...:
                    batch.append(command)  # type: ignore[arg-type]
                self.commands += batch
                self.reads.append(batch)
                for command in batch:
                    greeting = command[0] in (b"HELLO", b"AUTH", b"SELECT")
                    reply = self.greet(command) if greeting else self.script(command)
                    writer.write(reply or b"")
                await writer.drain()
        except HangUp as end:
            writer.write(end.last)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def hang_up(self) -> None:
        """Close every connection."""
        for writer in list(self._writers):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def redis7(command: Command) -> bytes:
    return b"%1\r\n+proto\r\n:3\r\n" if command[0] == b"HELLO" else OK


@contextlib.asynccontextmanager
async def fake_redis(script: Script, greet: Script = redis7) -> AsyncIterator[FakeRedis]:
    fake = FakeRedis(script, greet)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield fake
        await fake.hang_up()
