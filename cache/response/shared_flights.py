"""Flights across processes and machines: one upstream call for all gateways that share a Redis.

A lease decides who leads. The leader flies as always, and as soon as somebody waits elsewhere it tells what it gets,
from the first piece on, to a stream in Redis; the others follow that stream in place of an upstream. A leader that is
gone (its lease ran out, it never said the end) is replaced while nothing of its answer has been passed on. Whatever is
wrong with Redis, the answer is: make the call yourself. Heads and pieces are bytes here; what they mean is the
gateway's business.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from cache.response.flights import Flight, Follower
from cache.stores.breaker import GuardedStore
from cache.stores.leases import Leases, Told

MAX_TOLD = 8 << 20
"""Bytes told of one flight; the followers of a longer one are left to themselves."""
STREAM_TTL = 10.0
"""Seconds that what was told stays readable after the leader's last word."""
STORED_FOR = 1.0
"""Seconds after the end of a stored answer in which newcomers, who looked just before, are told to look again."""
FIRST_LOOK, LAST_LOOK = 0.01, 0.1
"""Seconds between two looks at a stream, right after something came and after nothing came for long."""

_HEAD, _PIECE, _END = b"h", b"p", b"e"
Head = TypeVar("Head")
Part = TypeVar("Part")
Result = TypeVar("Result")


class LeaderLost(Exception):
    """The leader is gone, or can be heard no more."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer has just been put into the store."""


class SharedFlights:
    """``lease``: seconds after which a leader that says nothing counts as dead; ``renew``: how often it does."""

    def __init__(self, store: GuardedStore, leases: Leases, *, lease: float = 2.0, renew: float = 0.25) -> None:
        self.store = store
        self.leases = leases
        self.lease = lease
        self.renew = renew

    async def board(self, name: bytes, *, anew: bool = False) -> Lead | Follow | Stored | None:
        """Asks who leads the flight of this name; None: Redis does not say, so call yourself. ``anew``: what has just
        been stored is of no use.
        """
        token = secrets.token_hex(8).encode()
        try:
            leader = await self.store.call("board", lambda: self.leases.board(name, token, self.lease, anew=anew))
        except asyncio.CancelledError:
            # Whether we were given the lease will never be known: nobody is to wait for us.
            await self.store.call("end", lambda: self.leases.end(name, token, anyway=True, stored=0))
            raise
        if leader is None:
            return None
        if leader == token:
            return Lead(self, name, token)
        return Follow(self, name, leader) if leader else Stored()


class Lead:
    """A lease that we hold."""

    def __init__(self, shared: SharedFlights, name: bytes, token: bytes) -> None:
        self._shared = shared
        self._name = name
        self._token = token
        self._told = 0

    async def share(
        self,
        flight: Flight[Head, Part, Result],
        head: Callable[[Head], bytes],
        piece: Callable[[Part], bytes],
        stored: Callable[[Result], Awaitable[bool]],
    ) -> None:
        """Keeps the lease for as long as the flight takes, tells whoever waits elsewhere, and gives it up. Meanwhile it
        follows the flight itself, so that callers elsewhere keep it going as callers here do. ``stored``: whether the
        result is in the store, once it is.
        """
        seat, in_store = flight.join(), False
        telling: asyncio.Task[bool] | None = None
        try:
            while not await flight.lands_within(self._shared.renew):
                waiting = await self._renew()
                if waiting == -1:
                    return
                if waiting and telling is None:
                    telling = asyncio.create_task(self._tell(flight, seat, head, piece))
                if telling is None and not flight.joinable:
                    return
                if telling is not None and _failed(telling):
                    return
                if not waiting and flight.followers == 1 and await self._end(stored=False, anyway=False) <= 0:
                    return
            try:
                in_store = await stored(await flight.result())
            except Exception:  # its own followers are told; those elsewhere try for themselves
                return
            if await self._end(stored=in_store, anyway=False) > 0:
                await (telling or self._tell(flight, seat, head, piece))
        finally:
            if telling is not None:
                telling.cancel()
            flight.leave(seat)
            await self._end(stored=in_store, anyway=True)

    async def _tell(
        self,
        flight: Flight[Head, Part, Result],
        seat: Follower[Part],
        head: Callable[[Head], bytes],
        piece: Callable[[Part], bytes],
    ) -> bool:
        """Tells all from the beginning to the end; False: it could not."""
        left = MAX_TOLD
        try:
            if not await self._say(_HEAD, head(await flight.head())):
                return False
            async for part in flight.pieces(seat):
                data = piece(part)
                left -= len(data)
                if left < 0 or (data and not await self._say(_PIECE, data)):
                    return False
        except Exception:  # too much is gone, or the flight has failed
            return False
        return await self._say(_END, b"")

    async def _say(self, kind: bytes, data: bytes) -> bool:
        self._told += 1
        told = Told(self._told, kind, data)
        shared = self._shared
        said = await shared.store.call("tell", lambda: shared.leases.tell(self._name, self._token, told, STREAM_TTL))
        return said is True

    async def _renew(self) -> int | None:
        shared = self._shared
        return await shared.store.call(
            "renew", lambda: shared.leases.renew(self._name, self._token, shared.lease, STREAM_TTL)
        )

    async def _end(self, *, stored: bool, anyway: bool) -> int:
        shared, seconds = self._shared, STORED_FOR if stored else 0.0
        waiting = await shared.store.call(
            "end", lambda: shared.leases.end(self._name, self._token, anyway=anyway, stored=seconds)
        )
        return 0 if waiting is None else waiting


class Follow:
    """A flight that somebody else leads. `leave` it in the end."""

    def __init__(self, shared: SharedFlights, name: bytes, leader: bytes) -> None:
        self._shared = shared
        self._name = name
        self._leader = leader
        self._read = 0
        self._first: list[Told] = []
        self._ended = False

    async def head(self) -> bytes:
        """The head, once there is something to go with it; raises `LeaderLost`."""
        told = await self._hear()
        while len(told) < 2:
            told += await self._hear()
        if told[0].kind != _HEAD:
            raise LeaderLost
        self._first = told[1:]
        return told[0].data

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The pieces behind the head, to their end; raises `LeaderLost`."""
        told = self._first
        while True:
            for one in told:
                if one.kind == _END:
                    self._ended = True
                    return
                yield one.data
            told = await self._hear()

    async def leave(self) -> None:
        """Waits no more."""
        if not self._ended:
            shared = self._shared
            await shared.store.call("leave", lambda: shared.leases.leave(self._name, self._leader))

    async def _hear(self) -> list[Told]:
        """What the leader says next."""
        shared, pause, clock = self._shared, FIRST_LOOK, asyncio.get_running_loop().time
        patient_until = clock() + shared.lease if self._read else 0.0
        while True:
            heard = await shared.store.call("hear", lambda: shared.leases.hear(self._name, self._leader, self._read))
            if heard is not None and heard.told:
                if [one.number for one in heard.told] != list(range(self._read + 1, heard.told[-1].number + 1)):
                    raise LeaderLost  # a part was evicted
                self._read = heard.told[-1].number
                return heard.told
            if (heard is not None and not heard.led) or (heard is None and clock() >= patient_until):
                raise LeaderLost
            await asyncio.sleep(pause)
            pause = min(LAST_LOOK, pause * 1.5)


def _failed(telling: asyncio.Task[bool]) -> bool:
    return telling.done() and (telling.cancelled() or not telling.result())
