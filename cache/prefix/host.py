"""The tier in host memory: one preallocated buffer of whole blocks, bounded in bytes and per tenant.

Page-first: a slot holds all layers of one block side by side, so a block moves in one copy. The verbs are those of
`tiers.Tier` without `await`, for memory has nothing to wait for. Safe to call from several threads; the lock is not
held while bytes are copied: a leased slot is pinned instead, and a slot being written is not found until complete.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cache.prefix.blocks import Block
from cache.prefix.tiers import TierStats
from policies.prefix_eviction import PrefixEviction
from policies.tiering import Cost

MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it yet

Pin = Callable[[np.ndarray], None]
"""Registers the buffer's memory with a device (CUDA: `cudaHostRegister`), for asynchronous copies."""


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a slot.

    Attributes:
        uses: prompts that needed the block so far.
        settled_until: until this time it need not be offered to the next tier (on the caller's clock).
        leases: transfers that read or write the slot now.
        complete: all bytes are written; until then nobody finds it.
    """

    block: Block
    tenant: bytes
    slot: int
    uses: int
    settled_until: float = 0.0
    leases: int = 1
    complete: bool = False


@dataclass(slots=True, eq=False)
class HostLease:
    """Slots that a transfer may read (`prepare_load`) or write (`prepare_store`) until it is completed.

    `evicted` (stores only) names the entries that made room, each with its bytes, which stay intact until the lease's
    views are written to.
    """

    entries: list[Entry] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    evicted: list[tuple[Entry, memoryview]] = field(default_factory=list)

    @property
    def blocks(self) -> list[Block]:
        return [entry.block for entry in self.entries]


class HostTier:
    """Blocks of `block_bytes` each in `capacity_bytes` of memory, evicted tails before heads (`PrefixEviction`).

    Args:
        quota: bytes a tenant may hold, None for no limit. A tenant at its limit displaces its own blocks, the least
            recently used first.
        pin: called once with the whole buffer (uint8, [slots, block_bytes]).

    Raises `ValueError` if the capacity is less than one block.
    """

    name = "host"

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        *,
        quota: Callable[[bytes], int | None] = lambda tenant: None,
        pin: Pin | None = None,
    ) -> None:
        slots = capacity_bytes // block_bytes
        if slots < 1:
            raise ValueError(f"a host tier of {capacity_bytes} bytes cannot hold one block of {block_bytes} bytes")
        self.block_bytes = block_bytes
        self.capacity_bytes = slots * block_bytes
        self.collisions = 0
        self.stats = TierStats()
        self.cost = Cost()
        self._quota = quota
        self._buffer = np.frombuffer(_memory(slots * block_bytes), np.uint8).reshape(slots, block_bytes)
        if pin is not None:
            pin(self._buffer)
        self._free = list(range(slots))[::-1]
        self._entries: dict[bytes, Entry] = {}  # by hash
        self._eviction = PrefixEviction[bytes](slots)  # of entries by digest
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # by digest; neither written nor leased; oldest use first
        self._held: Counter[bytes] = Counter()  # blocks by tenant
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use."""
        return len(self._entries) * self.block_bytes

    def tenant_bytes(self, tenant: bytes) -> int:
        """Bytes that a tenant holds."""
        return self._held[tenant] * self.block_bytes

    def lookup(self, blocks: Sequence[Block]) -> int:
        """How many leading blocks could be loaded now."""
        with self._lock:
            for count, block in enumerate(blocks):
                if self._find(block) is None:
                    return count
        return len(blocks)

    def touch(self, blocks: Sequence[Block], uses: int = 1) -> None:
        """Another prompt used these blocks (wherever it found them)."""
        with self._lock:
            entries = [entry for block in blocks if (entry := self._find(block))]
            for entry in reversed(entries):  # heads last: the most recent, evicted after their tails
                entry.uses += uses
                self._eviction.touch(entry.block.digest)
                if entry.block.digest in self._idle:
                    self._idle.move_to_end(entry.block.digest)

    def prepare_load(self, blocks: Sequence[Block]) -> HostLease:
        """Pins the leading blocks that are here; their views stay valid and unchanged until `complete_load`."""
        lease = HostLease()
        with self._lock:
            for block in blocks:
                entry = self._find(block)
                if entry is None:
                    break
                entry.leases += 1
                self._eviction.pin(block.digest)
                self._idle.pop(block.digest, None)
                lease.entries.append(entry)
                lease.views.append(self._view(entry))
        return lease

    def complete_load(self, lease: HostLease) -> None:
        """Unpins. To be called exactly once for each lease."""
        with self._lock:
            self._release(lease)

    def prepare_store(self, blocks: Sequence[Block], tenant: bytes, uses: int = 1) -> HostLease:
        """Reserves slots for the blocks not here yet, in order, until one finds no room; the others count as used.

        Blocks of one chain. No block of it is evicted for another: a beginning is not given up to gain its end.
        """
        lease = HostLease()
        with self._lock:
            chain = blocks[-1].lineage() if blocks else []
            keep = {block.digest for block in chain}
            held = [block.digest for block in chain if block.digest in self._idle]
            for key in held:
                self._eviction.pin(key)
            for block in blocks:
                entry = self._entries.get(block.hash)
                if entry is not None and entry.block == block:
                    entry.uses += uses
                    if uses:
                        self._eviction.touch(block.digest)
                    continue
                slot = self._make_room(block, tenant, keep, lease)
                if slot is None:
                    break
                entry = self._entries[block.hash] = Entry(block, tenant, slot, uses)
                self._eviction.insert(block.digest, block.parent, pinned=True)
                self._held[tenant] += 1
                lease.entries.append(entry)
                lease.views.append(self._view(entry))
            for key in reversed(held):
                if key in self._idle:
                    self._eviction.unpin(key)
        return lease

    def complete_store(self, lease: HostLease, written: int | None = None) -> None:
        """Publishes the first `written` blocks (None: all); the slots of the others are free again."""
        with self._lock:
            count = len(lease.entries) if written is None else written
            for entry in lease.entries[:count]:
                entry.complete = True
            for entry in lease.entries[count:]:
                self._drop(entry)
            del lease.entries[count:], lease.views[count:]
            self._release(lease)

    def unsettled(self, blocks: Sequence[Block], uses: int, now: float) -> list[Block]:
        """Those of the blocks that were used at least `uses` times and should be offered to the next tier."""
        with self._lock:
            entries = [entry for block in blocks if (entry := self._find(block))]
            return [entry.block for entry in entries if entry.uses >= uses and entry.settled_until <= now]

    def settle(self, blocks: Sequence[Block], until: float) -> None:
        """The next tier holds these blocks, or does not want them, until then."""
        with self._lock:
            for block in blocks:
                if (entry := self._find(block)) is not None:
                    entry.settled_until = until

    def clear(self) -> None:
        """Forgets all that is not being transferred."""
        with self._lock:
            for entry in list(self._idle.values()):
                self._drop(entry)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every slot is in exactly one place and the counts agree."""
        with self._lock:
            slots = [*self._free, *(entry.slot for entry in self._entries.values())]
            assert sorted(slots) == list(range(len(self._buffer))), "a slot is lost or used twice"
            assert self._held.total() == len(self._entries), "tenants' counts differ from the entries"
            for key, entry in self._entries.items():
                assert key == entry.block.hash and entry.leases >= 0
                idle = entry.complete and not entry.leases
                assert (self._idle.get(entry.block.digest) is entry) == idle, "a leased slot may be evicted"
                assert entry.block.digest in self._eviction
            assert all(self._entries[entry.block.hash] is entry for entry in self._idle.values())
            assert len(self._eviction) == len(self._entries)

    def _find(self, block: Block) -> Entry | None:
        entry = self._entries.get(block.hash)
        if entry is None or not entry.complete:
            return None
        if entry.block != block:
            self.collisions += 1
            return None
        return entry

    def _view(self, entry: Entry) -> memoryview:
        return memoryview(self._buffer[entry.slot])

    def _make_room(self, block: Block, tenant: bytes, keep: set[bytes], lease: HostLease) -> int | None:
        """A free slot, evicting one entry if it must, but none of `keep`, which are pinned."""
        other = self._entries.get(block.hash)
        limit = self._quota(tenant)
        at_limit = limit is not None and (self._held[tenant] + 1) * self.block_bytes > limit
        if other is not None:  # a hash collision: the newcomer takes the name over
            victim = other if other.block.digest in self._idle and (other.tenant == tenant or not at_limit) else None
        elif at_limit:
            victim = next((e for key, e in self._idle.items() if e.tenant == tenant and key not in keep), None)
        elif self._free:
            return self._free.pop()
        else:
            key = self._eviction.evict()
            victim = None if key is None else self._idle[key]
        if victim is None:
            return None
        lease.evicted.append((victim, self._view(victim)))
        self._drop(victim)
        return self._free.pop()

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.block.hash]
        self._idle.pop(entry.block.digest, None)
        self._eviction.remove(entry.block.digest)
        self._held[entry.tenant] -= 1
        self._free.append(entry.slot)

    def _release(self, lease: HostLease) -> None:
        for entry in reversed(lease.entries):  # heads last, see `touch`
            entry.leases -= 1
            if not entry.leases:
                self._idle[entry.block.digest] = entry
                self._eviction.unpin(entry.block.digest)


def _memory(size: int) -> mmap.mmap:
    """Memory that is really there: a page fault on first use costs more than the copy that meets it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
        try:
            memory.madvise(advice)
        except OSError:  # an older kernel, or one without huge pages: slower at first, no other harm
            pass
    return memory
