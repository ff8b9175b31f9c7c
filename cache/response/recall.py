"""Has this been answered before? Memory first, then the shared store; believed only when the fingerprint agrees and
nothing was purged.
"""

from __future__ import annotations

from asyncio import Future
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from cache.response.canonical import Identity
from cache.response.entry import BadEntry, Entry, decode
from cache.response.keep import hold
from cache.response.tags import Generations
from cache.stores.breaker import GuardedStore
from cache.stores.memory import MemoryStore

MOST_CONFIRMED = 100_000
"""Keys; beyond it all are asked for once more."""


class Found(NamedTuple):
    """An entry and the tier it came from."""

    entry: Entry
    tier: str


class Lookup(NamedTuple):
    """A lookup in the shared store under way, and the last renewal heard of when it began."""

    call: Future[bytes | None]
    renewed: int


class Read(NamedTuple):
    """What a shared store held under a key, as bytes and as the entry that they are."""

    data: bytes
    entry: Entry


class Recall:
    """Looks entries up. ``bad_entries`` counts what was found but not believed, by reason."""

    def __init__(
        self, memory: MemoryStore[Entry] | None, shared: GuardedStore | None, generations: Generations
    ) -> None:
        self._memory = memory
        self._shared = shared
        self._generations = generations
        self.bad_entries: Counter[str] = Counter()
        self._renewed = 0
        self._confirmed: set[bytes] = set()  # keys in memory for which the shared store was asked since `_renewed`

    def in_memory(self, identity: Identity, *, again: bool = False) -> Entry | None:
        """The entry, if the memory tier holds it, up to its ``kept_until``. ``again``: it was just asked."""
        if self._memory is None:
            return None
        entry = self._memory.get(identity.key)
        if entry is None:
            return None
        if entry.fingerprint != identity.fingerprint:
            self.bad_entries["other request"] += not again
            return None
        if not self._generations.alive(entry.generations, entry.born):
            self._memory.delete(identity.key)
            return None
        return entry

    async def find(self, identity: Identity, now: float, tags: tuple[str, ...] = ()) -> Found | None:
        """The entry from the nearest tier, an old one in memory only if nothing newer lies below. What the shared store
        held moves up with the life it had left, never a longer one. ``tags``: scopes under which it is asked for.
        """
        entry = self.for_tags(self.in_memory(identity), tags)
        if entry is None or not self.confirmed(identity) or self._fresh_until(entry) <= now:
            below = await self.below(identity, now, tags)
            if below is not None:
                return below
            again = self.in_memory(identity, again=True)  # perhaps kept while the shared store was asked
            entry = self.for_tags(again, tags)
        return Found(entry, "memory") if entry is not None else None

    def confirmed(self, identity: Identity) -> bool:
        """Whether what memory holds may be taken for the newest: no other process has renewed an answer since the
        shared store was asked for this one.
        """
        if self._shared is None or not self._generations.renewed:
            return True
        self._forget_old_confirmations()
        return identity.key in self._confirmed

    def _fresh_until(self, entry: Entry) -> float:
        return self._generations.fresh_until(entry.generations, entry.born, entry.expires)

    def _forget_old_confirmations(self) -> None:
        if self._renewed != self._generations.renewed or len(self._confirmed) >= MOST_CONFIRMED:
            self._renewed = self._generations.renewed
            self._confirmed.clear()

    def _confirm(self, key: bytes, renewed: int) -> None:
        """Takes note of a lookup that began when `renewed` was the last renewal heard of."""
        self._forget_old_confirmations()
        if renewed and renewed == self._renewed and self._memory is not None:
            self._confirmed.add(key)

    def for_tags(self, entry: Entry | None, tags: tuple[str, ...]) -> Entry | None:
        """The entry as one who asks under these tags may see it: what is older than a purge of a tag is not for them,
        even if it was made for somebody who did not name the tag.
        """
        if entry is None:
            return None
        stamped = self._generations.widened(entry.generations, tags, entry.born) if tags else entry.generations
        if not self._generations.alive(stamped, entry.born):
            return None
        return replace(entry, generations=stamped) if tags else entry

    async def below(self, identity: Identity, now: float, tags: tuple[str, ...] = ()) -> Found | None:
        """What the shared store has, unless memory has something newer: then that."""
        if self._shared is None:
            return None
        renewed = self._generations.renewed
        data, answered = await self._shared.ask(identity.key)
        if answered:
            self._confirm(identity.key, renewed)
        entry = self.for_tags(self.believe(identity, data, now), tags) if data is not None else None
        return Found(entry, self._shared.name) if entry is not None else None

    def begin(self, identity: Identity) -> Lookup | None:
        """Starts a lookup in the shared store without a task; None: there is no store, or it is not to be asked now."""
        call = self._shared.begin_get(identity.key) if self._shared is not None else None
        return Lookup(call, self._generations.renewed) if call is not None else None

    def end(self, identity: Identity, lookup: Lookup, now: float, last: Read | None = None) -> Read | None:
        """What a lookup that is done has found. ``last``: what the same lookup found before; equal bytes are not read
        anew.
        """
        if self._shared is None:
            return None
        data, answered = self._shared.end_get(lookup.call)
        if answered:
            self._confirm(identity.key, lookup.renewed)
        entry = self.believe(identity, data, now, last) if data is not None else None
        return Read(data, entry) if data is not None and entry is not None else None

    def believe(self, identity: Identity, data: bytes, now: float, last: Read | None = None) -> Entry | None:
        """Reads what a shared store held; what is believed moves up with the life it had left."""
        try:
            known = last is not None and last.data == data
            entry = last.entry if last is not None and known else decode(data, identity.fingerprint)
        except BadEntry as error:
            self.bad_entries[str(error)] += 1
            return None
        if entry.kept_until <= now or not self._generations.alive(entry.generations, entry.born):
            return None
        return hold(self._memory, identity.key, entry) if self._memory is not None else entry
