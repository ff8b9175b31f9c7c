"""Flights: one upstream call that several callers wait on (request coalescing, streaming too).

A producer puts pieces and at the end lands with a result; callers follow from the first piece on, however late they
join. Nobody needs a task for it: a follower is woken when there is something to take, and takes all there is. The
producer waits only for the fastest follower (back-pressure), never for a slow one; pieces are kept once, for all,
within a bound, and a follower that falls behind the bound is told so (`FellBehind`) rather than given a cut answer.
When the last follower leaves, the producer is cancelled.
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


class Follower(Generic[Part]):
    """One caller's place in a flight. ``wake`` is called when there is something to take, or nothing more will come."""

    __slots__ = ("_flight", "position", "wake")

    def __init__(self, flight: Flight[Any, Part, Any]) -> None:
        self._flight = flight
        self.position = 0  # of the piece it takes next
        self.wake: Callable[[], object] = _sleep

    def take(self) -> list[Part]:
        """All that came since, in order; raises `FellBehind`, or, behind the last piece, what its producer raised."""
        return self._flight.pieces_for(self)

    @property
    def ended(self) -> bool:
        """Whether it has taken all there will ever be."""
        return self._flight.landed and self.position == self._flight.end


class Flight(Generic[Head, Part, Result]):
    """``Head`` comes first (status and headers), then any number of pieces, then the result.

    ``window`` is how far in bytes the producer may run ahead of the fastest follower, ``bound`` how many bytes of
    pieces are kept; of a flight that is not ``shared`` only what its one follower has not taken.
    """

    def __init__(self, size: Callable[[Part], int], *, window: int, bound: int, shared: bool = True) -> None:
        self._size = size
        self._window = window
        self._bound = bound
        self._shared = shared
        self._pieces: deque[tuple[Part, int]] = deque()
        self._first = 0  # position of the oldest piece still held
        self.end = 0  # position behind the newest
        self._held = 0
        self._ahead = 0  # bytes put that no follower has taken yet
        self._front = 0  # position that the fastest follower has reached
        self._followers: list[Follower[Part]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._held_up = False  # the producer was told to wait
        self.on_room: Callable[[], None] = _sleep  # called, from the event loop, when it may go on
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Result] | None = None
        self._keep_going = False
        self.opened = False
        self._head: Head | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None
        self.landed = False

    @property
    def joinable(self) -> bool:
        """Whether a newcomer would still get everything from the first piece on."""
        ending = self._task is not None and self._task.cancelling() > 0
        return self._first == 0 and not self.landed and not ending

    @property
    def followers(self) -> int:
        """Callers waiting on it."""
        return len(self._followers)

    # The producer's side

    def start(self, producer: Coroutine[Any, Any, Result], on_end: Callable[[], None]) -> None:
        """Runs the producer in a task of its own; ``on_end`` is called when it is over, however it ended."""

        def over(task: asyncio.Task[Result]) -> None:
            if task.cancelled():
                self.fail(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                self.fail(error)
            else:
                self.land(task.result())
            on_end()

        self._task = self._loop.create_task(producer)
        self._task.add_done_callback(over)

    def keep_going(self) -> None:
        """Lets the producer finish even when nobody waits (a refresh in the background)."""
        self._keep_going = True

    def open(self, head: Head) -> None:
        """The producer has the head."""
        if not self.opened:
            self.opened, self._head = True, head
            self._tell()

    def put(self, piece: Part) -> None:
        """The producer has a piece; it should not put more while the flight is `full`."""
        self._add(piece)
        self._tell()

    @property
    def full(self) -> bool:
        """Whether the fastest follower is more than the window behind; then `on_room` will be called."""
        self._held_up = self._ahead > self._window and bool(self._followers)
        return self._held_up

    async def push(self, piece: Part) -> None:
        """Puts a piece, and waits while the flight is full."""
        self.put(piece)
        await self.room()

    async def room(self) -> None:
        """Waits while the flight is full."""
        while self.full:
            there_is = asyncio.Event()
            self.on_room = there_is.set
            await there_is.wait()

    def land(self, result: Result, last: Part | None = None) -> None:
        """The producer has the result, and with it the ``last`` piece."""
        if not self.landed:
            self.landed, self._result = True, result
            if last is not None:
                self._add(last)
            self._tell()

    def fail(self, error: BaseException) -> None:
        """The producer has failed; its followers are told so behind the last piece."""
        if not self.landed:
            self.landed, self._error = True, error
            self._tell()

    def _add(self, piece: Part) -> None:
        size = self._size(piece)
        self._pieces.append((piece, size))
        self.end += 1
        self._held += size
        self._ahead += size
        while self._held > self._bound and self._pieces and (self._first < self._front or not self._followers):
            self._held -= self._pieces.popleft()[1]
            self._first += 1

    def _tell(self) -> None:
        for follower in tuple(self._followers):
            follower.wake()
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # The followers' side

    def join(self) -> Follower[Part]:
        """Adds a follower, at the first piece; it must be given to `leave`."""
        follower = Follower(self)
        self._followers.append(follower)
        return follower

    def leave(self, follower: Follower[Part]) -> None:
        """Removes a follower; the last one's departure ends the flight. May be called twice."""
        if follower not in self._followers:
            return
        self._followers.remove(follower)
        follower.wake = _sleep
        if self._followers:
            self._front = max(other.position for other in self._followers)
            self._ahead = sum(size for _, size in list(self._pieces)[max(0, self._front - self._first) :])
        elif not self._keep_going and not self.landed and self._task is not None:
            self._task.cancel()
        self._make_room()

    def pieces_for(self, follower: Follower[Part]) -> list[Part]:
        """See `Follower.take`."""
        at, end = follower.position, self.end
        if at < self._first:
            raise FellBehind
        if at == end:
            if self._error is not None:
                raise self._error
            return []
        skipped = at - self._first
        taken = [piece for piece, _ in (list(self._pieces)[skipped:] if skipped else self._pieces)]
        follower.position = end
        if end > self._front:
            self._front = end
            self._ahead = 0
            self._make_room()
        if not self._shared:
            self._pieces.clear()
            self._first, self._held = end, 0
        return taken

    def _make_room(self) -> None:
        if self._held_up and (self._ahead <= self._window or not self._followers):
            self._held_up = False
            self._loop.call_soon(self.on_room)

    async def head(self) -> Head:
        """Waits for the head; raises what the producer failed with. Who gives up waiting disturbs no one else."""
        while not self.opened:
            if self._error is not None:
                raise self._error
            await self._news()
        return self._head  # type: ignore[return-value]

    async def result(self) -> Result:
        """Waits for the result, in the same way."""
        while not self.landed:
            await self._news()
        return self.outcome

    @property
    def outcome(self) -> Result:
        """The result of a flight that has landed; raises what the producer failed with."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    async def lands_within(self, seconds: float) -> bool:
        """Waits so long at most; whether it is over."""
        try:
            async with asyncio.timeout(seconds):
                while not self.landed:
                    await self._news()
        except TimeoutError:
            pass
        return self.landed

    async def pieces(self, follower: Follower[Part]) -> AsyncGenerator[Part, None]:
        """Every piece for this follower, as it comes; raises what `Follower.take` does."""
        while follower in self._followers:
            taken = follower.take()
            for piece in taken:
                yield piece
            if not taken:
                if self.landed:
                    return
                await self._news()

    async def _news(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter


def _sleep() -> None:
    """What wakes nobody."""


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

    def get(self, key: bytes, oldest: float | None = None, tags: tuple[str, ...] = ()) -> AnyFlight | None:
        """The flight to join, if it took off at ``oldest`` (unix seconds) or later and nothing was purged since, nor
        under the scopes ``tags`` of who asks.
        """
        found = self._under_way.get(key)
        if found is None or not found.flight.joinable or (oldest is not None and found.born < oldest):
            return None
        stamped = self._generations.widened(found.stamped, tags, found.born) if tags else found.stamped
        if not self._generations.alive(stamped, found.born):
            return None
        fresh = self._generations.fresh_until(stamped, found.born, math.inf)
        return found.flight if fresh == math.inf else None

    def add(self, key: bytes, flight: AnyFlight, born: float, stamped: dict[str, int]) -> None:
        """Lets others join a flight that takes off now, in place of one that they may not join any more."""
        self._under_way[key] = _UnderWay(flight, born, stamped)

    def drop(self, key: bytes, flight: AnyFlight) -> None:
        """The flight is over."""
        found = self._under_way.get(key)
        if found is not None and found.flight is flight:
            del self._under_way[key]
