"""Flights: one upstream call that several callers wait on (request coalescing, streaming too).

A producer pushes pieces and at the end lands with a result; callers follow from the first piece on, however late they
join. The producer waits only for the fastest follower (back-pressure), never for a slow one; pieces are kept once, for
all, within a bound, and a follower that falls behind the bound is told so (`FellBehind`) rather than given a cut
answer. When the last follower leaves, the producer is cancelled.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cache.response.tags import Generations

Head = TypeVar("Head")
Result = TypeVar("Result")

Part = TypeVar("Part")


class FellBehind(Exception):
    """This follower read so slowly that what it needs next is no longer held."""


class Flight(Generic[Head, Part, Result]):
    """``Head`` comes first (status and headers), then any number of pieces, then the result.

    ``window`` is how far in bytes the producer may run ahead of the fastest follower, ``bound`` how many bytes of
    pieces are kept.
    """

    def __init__(self, size: Callable[[Part], int], *, window: int, bound: int) -> None:
        self._size = size
        self._window = window
        self._bound = bound
        self._pieces: deque[tuple[Part, int]] = deque()
        self._first = 0  # position of the oldest piece still held
        self._held = 0
        self._cursors: dict[object, int] = {}
        self._ahead = 0  # bytes pushed that no follower has read yet
        self._front = 0  # position that the fastest follower has reached
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._keep_going = False
        loop = asyncio.get_running_loop()
        self._head: asyncio.Future[Head] = loop.create_future()
        self._result: asyncio.Future[Result] = loop.create_future()

    @property
    def joinable(self) -> bool:
        """Whether a newcomer would still get everything from the first piece on."""
        ending = self._task is not None and self._task.cancelling() > 0
        return self._first == 0 and not self._result.done() and not ending

    @property
    def opened(self) -> bool:
        """Whether its followers have a head, and so perhaps a part of the answer."""
        return self._head.done()

    @property
    def landed(self) -> bool:
        """Whether it is over, however it ended."""
        return self._result.done()

    async def head(self) -> Head:
        """Waits for the head; raises what the producer failed with. Who gives up waiting disturbs no one else."""
        return await asyncio.shield(self._head)

    async def result(self) -> Result:
        """Waits for the result, in the same way."""
        return await asyncio.shield(self._result)

    async def lands_within(self, seconds: float) -> bool:
        """Waits so long at most; whether it is over."""
        await asyncio.wait([self._result], timeout=seconds)
        return self._result.done()

    @property
    def followers(self) -> int:
        """Callers waiting on it."""
        return len(self._cursors)

    def start(self, producer: Coroutine[Any, Any, Result], on_end: Callable[[], None]) -> None:
        """Runs the producer in a task of its own; ``on_end`` is called when it is over, however it ended."""

        async def fly() -> None:
            try:
                result = await producer
                self._settle(self._result, result)
            except asyncio.CancelledError:
                self._head.cancel()
                self._result.cancel()
                raise
            except Exception as error:
                for future in (self._head, self._result):
                    if not future.done():
                        future.set_exception(error)
                        future.exception()  # seen: a flight without followers has nobody to tell
            finally:
                self._changed.set()
                on_end()

        self._task = asyncio.get_running_loop().create_task(fly())

    def keep_going(self) -> None:
        """Lets the producer finish even when nobody waits (a refresh in the background)."""
        self._keep_going = True

    def open(self, head: Head) -> None:
        """The producer has the head."""
        self._settle(self._head, head)

    def land(self, result: Result) -> None:
        """The producer has the result, and at most one piece left to push, which it must push at once."""
        self._settle(self._result, result)

    async def push(self, piece: Part) -> None:
        """The producer has a piece; waits while the fastest follower is more than the window behind."""
        size = self._size(piece)
        self._pieces.append((piece, size))
        self._held += size
        self._ahead += size
        while self._held > self._bound and self._pieces and (self._first < self._front or not self._cursors):
            self._held -= self._pieces.popleft()[1]
            self._first += 1
        self._changed.set()
        while self._ahead > self._window and self._cursors:
            self._drained.clear()
            await self._drained.wait()

    def join(self) -> object:
        """Adds a follower, at the first piece; the token it returns must be given to `leave`."""
        token = object()
        self._cursors[token] = 0
        return token

    def leave(self, token: object) -> None:
        """Removes a follower; the last one's departure ends the flight. May be called twice."""
        if self._cursors.pop(token, None) is None:
            return
        self._front = max(self._cursors.values(), default=self._front)
        unread = list(self._pieces)[max(0, self._front - self._first) :]
        self._ahead = sum(size for _, size in unread)
        self._drained.set()
        if not self._cursors and not self._keep_going and self._task is not None:
            self._task.cancel()

    async def pieces(self, token: object) -> AsyncGenerator[Part, None]:
        """Every piece for this follower, as it comes; raises `FellBehind`, or what the producer failed with."""
        while token in self._cursors:
            position = self._cursors[token]
            if position < self._first:
                raise FellBehind
            if position < self._first + len(self._pieces):
                piece, size = self._pieces[position - self._first]
                self._cursors[token] = position + 1
                if position + 1 > self._front:
                    self._front = position + 1
                    self._ahead -= size
                    self._drained.set()
                yield piece
            elif self._result.done():
                self._result.result()
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    @staticmethod
    def _settle(future: asyncio.Future[Any], value: object) -> None:
        if not future.done():
            future.set_result(value)


AnyFlight = TypeVar("AnyFlight", bound=Flight[Any, Any, Any])


@dataclass(frozen=True, slots=True)
class _UnderWay(Generic[AnyFlight]):
    flight: AnyFlight
    born: float
    stamped: dict[str, int]


class Flights(Generic[AnyFlight]):
    """The flights that may be joined, by key. None of them tells anybody what was purged before he asked."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._under_way: dict[bytes, _UnderWay[AnyFlight]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def values(self) -> list[AnyFlight]:
        """All of them."""
        return [found.flight for found in self._under_way.values()]

    def get(self, key: bytes, oldest: float | None = None) -> AnyFlight | None:
        """The flight to join, if it took off at ``oldest`` (unix seconds) or later and nothing was purged since."""
        found = self._under_way.get(key)
        if found is None or not found.flight.joinable or (oldest is not None and found.born < oldest):
            return None
        if not self._generations.alive(found.stamped, found.born):
            return None
        fresh = self._generations.fresh_until(found.stamped, found.born, math.inf)
        return found.flight if fresh == math.inf else None

    def add(self, key: bytes, flight: AnyFlight, born: float, stamped: dict[str, int]) -> None:
        """Lets others join a flight that takes off now, in place of one that they may not join any more."""
        self._under_way[key] = _UnderWay(flight, born, stamped)

    def drop(self, key: bytes, flight: AnyFlight) -> None:
        """The flight is over."""
        found = self._under_way.get(key)
        if found is not None and found.flight is flight:
            del self._under_way[key]
