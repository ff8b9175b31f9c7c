"""Chats that grow turn by turn, many at once, and what became of their prefixes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx

from loadtest.streamed import Told, ask
from loadtest.workloads import Chat

ANSWER = 16
"""Tokens of each answer."""
THINK = 0.5
"""Seconds that a user reads before the next question, at most."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the prompt's tokens, those of them that were held, and how it ended (`ok`, `lost`: without a single
    byte of an answer, `broken`: behind the first).
    """

    prompt: int
    cached: int
    end: str


@dataclass
class Replay:
    """All turns, in the order in which they ended."""

    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def reuse(self) -> float:
        """The share of all prompt tokens that was held."""
        return reuse(self.turns)

    def ended(self, how: str) -> int:
        return sum(turn.end == how for turn in self.turns)

    def quarter(self, number: int) -> float:
        """The reuse in the first (0) to last (3) quarter of the turns."""
        size = len(self.turns) // 4
        return reuse(self.turns[number * size : (number + 1) * size])


def reuse(turns: list[Turn]) -> float:
    """The share of prompt tokens that was held; turns that failed count for nothing."""
    return sum(turn.cached for turn in turns) / max(1, sum(turn.prompt for turn in turns))


async def replay(
    urls: Sequence[str],
    model: str,
    chats: int,
    turns: int,
    at_once: int,
    midway: Callable[[], Awaitable[None]] | None = None,
) -> Replay:
    """Drives so many chats, ``at_once`` requests at a time, each over any of the ``urls``; the same questions each time
    it is called. ``midway`` is called beside them when half of the turns are over.
    """
    result, gate = Replay(), asyncio.Semaphore(at_once)
    halfway = asyncio.Event()
    began = time.monotonic()

    async def one(clients: list[httpx.AsyncClient], number: int) -> None:
        rng, chat = random.Random(number), Chat(random.Random(1000 + number), turns)
        while not chat.over:
            body = chat.body(model) | {"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True}
            async with gate:
                told = await ask(rng.choice(clients), body)
            chat.answered(told.said)
            result.turns.append(_turn(told))
            if len(result.turns) * 2 >= chats * turns:
                halfway.set()
            await asyncio.sleep(rng.random() * THINK)

    async def mischief() -> None:
        await halfway.wait()
        if midway is not None:
            await midway()

    limits = httpx.Limits(max_connections=None)
    async with AsyncExitStack() as stack:
        made = [httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) for url in urls]
        clients = [await stack.enter_async_context(client) for client in made]
        await asyncio.gather(mischief(), *(one(clients, number) for number in range(chats)))
    result.seconds = time.monotonic() - began
    return result


def _turn(told: Told) -> Turn:
    if told.end == "ok" and told.usage:
        return Turn(told.prompt, told.cached, "ok")
    return Turn(0, 0, "broken" if told.said else "lost")
