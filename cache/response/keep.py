"""Keeping an answer: in memory at once, in the shared store behind the caller's back, never past its bounds."""

from __future__ import annotations

import asyncio

from cache.response.entry import Entry, encode
from cache.response.tags import RENEWED
from cache.stores.breaker import GuardedStore
from cache.stores.memory import MemoryStore
from policies.admission import Sightings
from policies.misses import Misses

MAX_WRITES_IN_FLIGHT = 1024
"""Writes to the shared store that may wait at once; beyond it an answer stays in memory only."""
TELL_EVERY = 0.25
"""Seconds from one announcement of renewals to the next: each has all processes ask for all that they hold."""


class Keeper:
    """Writes entries, from the ``min_uses``-th sighting of a question on. ``skipped`` counts shared writes given up
    because too many were waiting. ``misses`` is told what is kept.
    """

    def __init__(
        self, memory: MemoryStore[Entry] | None, shared: GuardedStore | None, misses: Misses | None = None
    ) -> None:
        self._memory = memory
        self._shared = shared
        self._writes: dict[asyncio.Task[bool], bytes] = {}
        self._untold = False  # a renewal of which other processes have not been told
        self._telling: asyncio.Task[None] | None = None
        self._tell_from = 0.0  # when others may be told again, by the loop's clock
        self.skipped = 0
        self.min_uses = 1
        self._sightings = Sightings()
        self._misses = misses or Misses()

    def sight(self, key: bytes) -> None:
        """Counts a question that could not be answered from the store."""
        if self.min_uses > 1:
            self._sightings.add(key)

    def admits(self, key: bytes) -> bool:
        """Whether it has been asked often enough."""
        return self.min_uses <= 1 or self._sightings.count(key) >= self.min_uses

    def keep(self, key: bytes, entry: Entry, now: float, *, renews: bool = False) -> None:
        """Stores an entry until its ``kept_until``, unless a newer answer is there (a slow call was overtaken).
        ``renews``: it may take the place of one that is fresh, which other processes are to hear of.
        """
        ttl = entry.kept_until - now
        if ttl <= 0:
            return
        self._misses.stored(key, entry.expires)
        if self._memory is not None and hold(self._memory, key, entry) is not entry:
            return
        if self._shared is None:
            return
        if len(self._writes) >= MAX_WRITES_IN_FLIGHT:
            self.skipped += 1
            return
        write = asyncio.get_running_loop().create_task(self._shared.set(key, encode(entry), ttl))
        self._writes[write] = key
        write.add_done_callback(self._writes.pop)
        if renews:
            write.add_done_callback(self._announce)

    async def written(self, key: bytes) -> None:
        """Waits until what was kept under ``key`` is in the shared store, or has failed to get there."""
        writes = [write for write, whose in self._writes.items() if whose == key]
        if writes:
            await asyncio.wait(writes)

    async def drain(self) -> None:
        """Waits for the writes under way, and until others know what was renewed."""
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)
        if self._telling is not None:
            await self._telling

    def _announce(self, _: asyncio.Task[bool]) -> None:
        """A renewal is in the shared store. What is renewed before others may be told again is told in one go."""
        self._untold = True
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        assert self._shared is not None
        clock = asyncio.get_running_loop().time
        while self._untold:
            await asyncio.sleep(self._tell_from - clock())
            self._untold = False
            await self._shared.bump(RENEWED)
            self._tell_from = clock() + TELL_EVERY
        self._telling = None


def hold(memory: MemoryStore[Entry], key: bytes, entry: Entry) -> Entry:
    """Puts an entry into memory unless a newer answer to the same request is there; returns the one that stays."""
    held = memory.get(key)
    if held is not None and held.fingerprint == entry.fingerprint and held.born > entry.born:
        return held
    memory.set(key, entry, entry.size, entry.kept_until)
    return entry
