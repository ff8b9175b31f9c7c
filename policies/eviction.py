"""What to evict from a cache of independent entries, bounded in bytes: S3-FIFO, SIEVE, LRU.

These classes hold keys and sizes only; the caller holds the values and drops those whose keys come back from `insert`.
Every operation is O(1), amortised: work an eviction does on surviving entries was paid for by earlier touches.
Blocks of a prefix chain are not independent of each other; `policies/prefix_eviction.py` is for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Decides which keys stay resident in `capacity` bytes. Never holds more, whatever is inserted."""

    @property
    def capacity(self) -> int:
        """Bytes that may be resident."""
        ...

    @property
    def used(self) -> int:
        """Bytes that are resident: the sum of the sizes of the resident keys."""
        ...

    def insert(self, key: K, size: int) -> list[K]:
        """Make `key` resident with `size` bytes (≥ 1, else ValueError); return the keys that are no longer resident.

        A resident key keeps its place and takes the new size. `key` itself is among those returned if it was not
        admitted (larger than `capacity`) or did not survive its own growth.
        """
        ...

    def touch(self, key: K) -> None:
        """Record a hit. An unknown key is ignored."""
        ...

    def remove(self, key: K) -> None:
        """Forget `key` (expired or purged, not evicted). An unknown key is ignored."""
        ...

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...


class _Bounded(ABC, Generic[K]):
    """The accounting that all policies share; a subclass keeps only the order of eviction."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, got {capacity}")
        self._capacity = capacity
        self._used = 0
        self._sizes: dict[K, int] = {}

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def used(self) -> int:
        return self._used

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def insert(self, key: K, size: int) -> list[K]:
        if size < 1:
            raise ValueError(f"size must be at least 1 byte, got {size}")
        if size > self._capacity:
            self.remove(key)
            return [key]
        before = self._sizes.get(key)
        evicted: list[K] = []
        if before is None:
            # Room first: a newcomer must never be the victim of its own arrival.
            while self._used + size > self._capacity:
                evicted.append(self._evict())
            self._place(key, size)
        else:
            self._resized(key, size - before)
        self._sizes[key] = size
        self._used += size - (before or 0)
        while self._used > self._capacity:
            evicted.append(self._evict())
        return evicted

    def remove(self, key: K) -> None:
        size = self._sizes.get(key)
        if size is not None:
            self._unlink(key, size)
            self._forget(key)

    def _evict(self) -> K:
        key = self._pop_victim()
        self._forget(key)
        return key

    def _forget(self, key: K) -> None:
        self._used -= self._sizes.pop(key)

    @abstractmethod
    def touch(self, key: K) -> None: ...

    @abstractmethod
    def _place(self, key: K, size: int) -> None:
        """Put a new key into the order."""

    @abstractmethod
    def _unlink(self, key: K, size: int) -> None:
        """Take a resident key out of the order."""

    @abstractmethod
    def _pop_victim(self) -> K:
        """Choose the key to evict and take it out of the order; called only while something is resident."""

    def _resized(self, key: K, delta: int) -> None:
        """A resident key grew by `delta` bytes; only an order that counts bytes cares."""
        return


class Lru(_Bounded[K]):
    """Least recently used: evicts what was neither inserted nor hit for the longest time."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[K, None] = OrderedDict()  # coldest first

    def touch(self, key: K) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def _place(self, key: K, size: int) -> None:
        self._order[key] = None

    def _unlink(self, key: K, size: int) -> None:
        del self._order[key]

    def _pop_victim(self) -> K:
        return self._order.popitem(last=False)[0]


class S3Fifo(_Bounded[K]):
    """S3-FIFO: three FIFO queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23).

    A newcomer waits in the small queue (10 % of the bytes). There it earns a place in the main queue by two hits, or
    leaves early and is remembered in the ghost queue (keys only, worth as many bytes as main); a newcomer that the
    ghost still remembers goes straight to main. Main evicts the oldest entry that is not hit again, each hit
    (3 counted at most) buying one more round. So a scan of things asked once passes through the small queue alone.
    """

    SMALL_SHARE = 0.1
    PROMOTE_HITS = 2
    MAX_HITS = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_capacity = max(1, int(capacity * self.SMALL_SHARE))
        self._ghost_capacity = capacity - self._small_capacity
        self._small: OrderedDict[K, int] = OrderedDict()  # key -> hits, oldest first
        self._main: OrderedDict[K, int] = OrderedDict()  # key -> hits left to spend, oldest first
        self._ghost: OrderedDict[K, int] = OrderedDict()  # key -> size it had, oldest first
        self._small_used = 0
        self._ghost_used = 0

    def touch(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        hits = queue.get(key)
        if hits is not None and hits < self.MAX_HITS:
            queue[key] = hits + 1

    def _place(self, key: K, size: int) -> None:
        remembered = self._ghost.pop(key, None)
        if remembered is None:
            self._small[key] = 0
            self._small_used += size
        else:
            self._ghost_used -= remembered
            self._main[key] = 0

    def _unlink(self, key: K, size: int) -> None:
        if self._small.pop(key, None) is None:
            del self._main[key]
        else:
            self._small_used -= size

    def _resized(self, key: K, delta: int) -> None:
        if key in self._small:
            self._small_used += delta

    def _pop_victim(self) -> K:
        while self._small and (self._small_used >= self._small_capacity or not self._main):
            key, hits = self._small.popitem(last=False)
            size = self._sizes[key]
            self._small_used -= size
            if hits < self.PROMOTE_HITS:
                self._remember(key, size)
                return key
            self._main[key] = 0
        while True:
            key, hits = self._main.popitem(last=False)
            if not hits:
                return key
            self._main[key] = hits - 1

    def _remember(self, key: K, size: int) -> None:
        self._ghost[key] = size
        self._ghost_used += size
        while self._ghost_used > self._ghost_capacity:
            self._ghost_used -= self._ghost.popitem(last=False)[1]


class _Node(Generic[K]):
    """A link of SIEVE's queue."""

    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: K) -> None:
        self.key = key
        self.visited = False
        self.newer: _Node[K] | None = None
        self.older: _Node[K] | None = None


class Sieve(_Bounded[K]):
    """SIEVE: one FIFO queue and a moving hand (Zhang et al., NSDI'24).

    A hit only marks an entry as visited. To evict, the hand walks from old to new, clearing marks, and takes the first
    unmarked entry; the next eviction goes on from there. Survivors keep their place, so popular entries sink behind
    the hand and newcomers, met soon after they arrive, must prove themselves.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._nodes: dict[K, _Node[K]] = {}
        self._newest: _Node[K] | None = None
        self._oldest: _Node[K] | None = None
        self._hand: _Node[K] | None = None  # None: start at the oldest

    def touch(self, key: K) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.visited = True

    def _place(self, key: K, size: int) -> None:
        node = self._nodes[key] = _Node(key)
        node.older = self._newest
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = node

    def _unlink(self, key: K, size: int) -> None:
        node = self._nodes.pop(key)
        if self._hand is node:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older

    def _pop_victim(self) -> K:
        while True:
            node = self._hand or self._oldest
            assert node is not None, "called only while something is resident"
            self._hand = node.newer
            if not node.visited:
                self._unlink(node.key, self._sizes[node.key])
                return node.key
            node.visited = False


_POLICIES: dict[str, type[_Bounded]] = {"s3fifo": S3Fifo, "sieve": Sieve, "lru": Lru}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy called `name` in the configuration, over `capacity` bytes; ValueError names the known ones."""
    try:
        return _POLICIES[name](capacity)
    except KeyError:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(_POLICIES)}") from None
