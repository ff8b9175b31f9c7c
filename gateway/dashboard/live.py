"""The dashboard's numbers as server-sent events: told at once, and again as often as their span of time is worth it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from gateway.dashboard.overview import RANGES, Asked
from gateway.ledger import LedgerClosed
from gateway.sse import frame

LONGEST = 600.0
"""Seconds after which a stream ends and the page asks again, so that none outlives what it was allowed to see."""


async def events(
    asked: Asked, tell: Callable[[Asked], Awaitable[bytes]], closing: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """Events with what ``tell`` gives (JSON), until ``closing`` or `LONGEST`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + LONGEST
    while loop.time() < end and not closing.is_set():
        try:
            yield frame(await tell(asked))
        except LedgerClosed as error:
            yield b": " + str(error).replace("\n", " ").encode() + b"\n\n"
        try:
            await asyncio.wait_for(closing.wait(), RANGES[asked.range][2])
        except TimeoutError:
            pass
