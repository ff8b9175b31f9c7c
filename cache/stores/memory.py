"""The in-process store: bounded in bytes, by an eviction policy, with expiry; no locks, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from policies.eviction import make_policy

V = TypeVar("V")
Key = bytes  # the class below has a property of that name

# Bytes that one entry costs beside key and value: dictionary slots, tuple and queue nodes here and in the policy, and
# the keys of evicted entries that S3-FIFO remembers (measured with full stores: 410 to 650).
OVERHEAD = 650


class MemoryStore(Generic[V]):
    """Values with sizes and expiry times. Not for threads: one event loop owns it."""

    def __init__(self, max_bytes: int, eviction: str = "s3fifo", clock: Callable[[], float] = time.time) -> None:
        self._name = eviction
        self._max_bytes = max_bytes
        self._clock = clock
        self._items: dict[Key, tuple[V, float]] = {}
        self._policy = make_policy(eviction, max_bytes)
        self.evictions = 0

    @property
    def bytes(self) -> int:
        """Bytes held now, keys and bookkeeping counted; never above `max_bytes`."""
        return self._policy.used

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Key) -> V | None:
        item = self._items.get(key)
        if item is None:
            return None
        value, expires = item
        if expires <= self._clock():
            self.delete(key)
            return None
        self._policy.touch(key)
        return value

    def set(self, key: Key, value: V, size: int, expires: float) -> None:
        """Keep `value` (`size` bytes) until `expires` (unix seconds); one that is too large is not kept."""
        if expires <= self._clock():
            self.delete(key)
            return
        self._items[key] = (value, expires)
        for gone in self._policy.insert(key, size + len(key) + OVERHEAD):
            del self._items[gone]
            self.evictions += 1

    def delete(self, key: Key) -> None:
        if self._items.pop(key, None) is not None:
            self._policy.remove(key)

    def clear(self) -> None:
        self._items.clear()
        self._policy = make_policy(self._name, self._max_bytes)
