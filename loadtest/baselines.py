"""What our eviction policies are measured against: LFU, Belady's limit, and a cache without end."""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

Chains = Iterable[Sequence[int]]
NEVER = 1 << 60


class Lfu:
    """Least frequently used, counted while resident; of equals the least recently used. O(1), sizes of 1 only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: dict[int, int] = {}
        self._by_uses: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._least = 1

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def insert(self, key: int, size: int) -> list[int]:
        evicted = []
        if len(self._uses) == self._capacity:
            while not self._by_uses[self._least]:
                self._least += 1
            victim, _ = self._by_uses[self._least].popitem(last=False)
            del self._uses[victim]
            evicted.append(victim)
        self._uses[key] = self._least = 1
        self._by_uses[1][key] = None
        return evicted

    def touch(self, key: int) -> None:
        uses = self._uses[key]
        del self._by_uses[uses][key]
        self._uses[key] = uses + 1
        self._by_uses[uses + 1][key] = None


def infinite_hits(chains: Chains) -> int:
    """Leading blocks found by a cache that forgets nothing."""
    seen: set[int] = set()
    hits = 0
    for blocks in chains:
        held = 0
        for block in blocks:
            if block not in seen:
                break
            held += 1
        seen.update(blocks[held:])
        hits += held
    return hits


def belady_hits(chains: Chains, capacity: int) -> int:
    """Blocks found by a cache that knows the future, keeps what is needed soonest, and need not admit.

    Blocks count each for itself, not only leading ones, so no policy can do better (Belady, 1966; with bypass).
    """
    blocks = [block for chain in chains for block in chain]
    upcoming = [NEVER] * len(blocks)
    last: dict[int, int] = {}
    for at in range(len(blocks) - 1, -1, -1):
        upcoming[at] = last.get(blocks[at], NEVER)
        last[blocks[at]] = at
    held: dict[int, int] = {}  # block -> when it is needed next
    farthest: list[tuple[int, int]] = []  # heap of (-when, block), also of those that have since moved nearer
    hits = 0
    for block, when in zip(blocks, upcoming, strict=True):
        if block in held:
            hits += 1
            if when == NEVER:
                del held[block]
                continue
        elif when == NEVER:
            continue
        elif len(held) >= capacity:
            while held.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] < when:
                continue
            del held[heapq.heappop(farthest)[1]]
        held[block] = when
        heapq.heappush(farthest, (-when, block))
    return hits
