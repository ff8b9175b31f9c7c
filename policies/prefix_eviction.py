"""Which block of a prefix cache to evict: the leaf whose place is least worth keeping.

A block is named by all tokens before it, so a block without its head is worth nothing: only leaves are evicted.
Among leaves the question is how soon each will be used again, and that is learned from the traffic itself.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from policies.reuse import AGE_STARTS, BUCKETS, ReuseCurve

K = TypeVar("K", bound=Hashable)

# Classes of blocks: tips, and others by uses after the first: none, 1, 2-3, 4-7, 8 and more.
_TIP, _ONCE, _KINDS = 0, 1, 6


def _kind(uses: int) -> int:
    return min(_ONCE + uses.bit_length(), _KINDS - 1)


class _Group:
    """Blocks of one class that were last used in the same epoch, and are therefore worth the same."""

    __slots__ = ("alive", "bucket", "epoch", "kind", "leaves", "lost", "queued", "reused")

    def __init__(self, kind: int, epoch: int) -> None:
        self.kind = kind
        self.epoch = epoch
        self.bucket = 0  # of ages
        self.alive = 0  # blocks not used since `epoch`, resident or remembered
        self.reused = 0  # blocks that were used while the group was in its present bucket
        self.lost = 0  # blocks that went out of sight meanwhile
        self.leaves: OrderedDict[Any, _Block] = OrderedDict()  # those that may be evicted now
        self.queued = False  # has a valid entry in the queue

    def reuse(self) -> None:
        """A block leaves the group because it was used."""
        self.alive -= 1
        self.reused += 1

    def lose(self) -> None:
        """A block leaves the group because it is no longer watched."""
        self.alive -= 1
        self.lost += 1


class _Block(Generic[K]):
    __slots__ = ("group", "head", "key", "pinned", "uses")

    def __init__(self, key: K, head: K | None, uses: int, group: _Group, pinned: bool) -> None:
        self.key = key
        self.head = head  # key of the block before it
        self.uses = uses  # not counting the first
        self.group = group
        self.pinned = pinned


class PrefixEviction(Generic[K]):
    """Chain-aware eviction for a prefix cache of `capacity` blocks of one size.

    Blocks fall into six classes: tips (used once, nothing after them), and all others by how often they were used
    again: 0, 1, 2-3, 4-7, 8 times and more. For each class the chance of reuse by age is learned online, also from a
    memory of evicted keys (keys only, four times the capacity), which shows what a larger cache would have kept.
    `evict` takes a leaf of the class and age that promise the fewest uses for the space. So a conversation that goes
    on outlives a prompt asked once, an idle one leaves when it has become unlikely to return, and nothing has to be
    tuned to a workload. Until something is learned, the least recently used goes first, tails before heads.

    Time is counted in uses of blocks, in epochs of 1/16 of the capacity; no clock is read. Operations are O(1)
    amortised, but for a heap of groups (of blocks alike in class and age), of which there are at most a few hundred.
    After Gittins (1979) and LHD (Beckmann et al., NSDI'18), whose hit density by class and age this brings to chains.
    """

    EPOCHS = 16  # per capacity
    GHOSTS = 4  # evicted keys remembered, per capacity
    LEARN_EVERY = 8  # epochs
    HALF_LIFE = 640  # epochs after which what was seen counts half

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, got {capacity}")
        self.capacity = capacity
        self._epoch_uses = max(64, capacity // self.EPOCHS)
        self._ghost_capacity = capacity * self.GHOSTS
        self._memory = 0.5 ** (self.LEARN_EVERY / self.HALF_LIFE)
        self._blocks: dict[K, _Block[K]] = {}
        self._tails: dict[K, int] = {}  # how many resident blocks that are not pinned follow a key, itself here or not
        self._ghosts: OrderedDict[K, _Block[K]] = OrderedDict()  # oldest first
        self._curves = [ReuseCurve() for _ in range(_KINDS)]
        self._epoch = 0
        self._uses = 0  # in the present epoch
        self._serial = 0
        self._queue: list[tuple[float, int, int, _Group]] = []  # heap of (worth, epoch, serial, group); see `_worst`
        self._due: defaultdict[int, list[_Group]] = defaultdict(list)  # epoch -> groups that enter their next bucket
        self._current = self._open_groups()  # by kind: those used in the present epoch

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def insert(self, key: K, parent: K | None, *, pinned: bool = False) -> None:
        """Make `key` resident behind `parent` (None for the first block of a chain). Nothing if it is resident.

        The parent need not be resident: a lower tier may hold a tail whose head is on another. When it comes, it is not
        evicted before that tail. Keys must not run in circles, which digests over all that comes before cannot.
        """
        if key in self._blocks:
            return
        uses = self._recall(key)
        group = self._current[_kind(uses) if uses else _TIP]
        group.alive += 1
        block = self._blocks[key] = _Block(key, parent, uses, group, pinned)
        head = None if parent is None else self._blocks.get(parent)
        if head is not None and head.group.kind == _TIP:
            self._move(head, self._current[_ONCE])
        if not pinned:
            self._offer(block)
        self._pass_time()

    def touch(self, key: K) -> None:
        """Record a use. To be called for every block of the matched prefix. An unknown key is ignored."""
        block = self._blocks.get(key)
        if block is None:
            return
        block.uses += 1
        block.group.reused += 1
        self._move(block, self._current[_kind(block.uses)])
        self._pass_time()

    def pin(self, key: K) -> None:
        """Keep `key` from being evicted until `unpin`; pins do not count. Pin heads before tails."""
        block = self._blocks.get(key)
        if block is not None and not block.pinned:
            block.pinned = True
            self._withdraw(block)

    def unpin(self, key: K) -> None:
        """Let `key` be evicted again. Unpin tails before heads."""
        block = self._blocks.get(key)
        if block is not None and block.pinned:
            block.pinned = False
            self._offer(block)

    def remove(self, key: K) -> None:
        """Forget `key` (lost or purged, not evicted). An unknown key is ignored."""
        block = self._blocks.get(key)
        if block is not None:
            self._drop(block)
            block.group.lose()

    def evict(self) -> K | None:
        """Choose the block to give up, forget it and return it; None if all are pinned.

        It has no children here that are not pinned themselves.
        """
        group = self._worst()
        if group is None:
            return None
        block = next(iter(group.leaves.values()))
        self._drop(block)
        self._remember(block)
        return block.key

    def admits(self, key: K) -> bool:
        """Whether a new block `key` would be worth more than the one that `evict` would give up for it.

        For a tier that may say no; a pool that needs the space for running requests evicts regardless.
        """
        group = self._worst()
        ghost = self._ghosts.get(key)
        kind = _ONCE if ghost is None else _kind(ghost.uses + 1)
        return group is not None and self._worth(group) < self._curves[kind].worth[0]

    def refuse(self, key: K) -> None:
        """Remember a block that was used and not admitted, as an evicted one is, so that asking again speaks for it."""
        uses = self._recall(key)
        block = _Block(key, None, uses, self._current[_kind(uses)], pinned=True)
        block.group.alive += 1
        self._remember(block)
        self._pass_time()

    def _recall(self, key: K) -> int:
        """How often `key` was used again, this time included, if it is remembered; else 0."""
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            return 0
        ghost.group.reuse()
        return ghost.uses + 1

    def _remember(self, block: _Block[K]) -> None:
        self._ghosts[block.key] = block
        if len(self._ghosts) > self._ghost_capacity:
            self._ghosts.popitem(last=False)[1].group.lose()

    def _worth(self, group: _Group) -> float:
        return self._curves[group.kind].worth[group.bucket]

    def _worst(self) -> _Group | None:
        """The group of least worth that has leaves; of equals the older."""
        while self._queue:
            worth, _, _, group = self._queue[0]
            valid = worth == self._worth(group)
            if valid and group.leaves:
                return group
            heapq.heappop(self._queue)
            group.queued = group.queued and not valid
        return None

    def _enqueue(self, group: _Group) -> None:
        group.queued = True
        self._serial += 1
        heapq.heappush(self._queue, (self._worth(group), group.epoch, self._serial, group))

    def _offer(self, block: _Block[K]) -> None:
        """An unpinned block joins the tree of those that may be evicted, tails before heads."""
        if block.key not in self._tails:
            self._add_leaf(block)
        if block.head is None:
            return
        self._tails[block.head] = tails = self._tails.get(block.head, 0) + 1
        if tails == 1 and (head := self._blocks.get(block.head)) is not None and not head.pinned:
            del head.group.leaves[head.key]

    def _withdraw(self, block: _Block[K]) -> None:
        block.group.leaves.pop(block.key, None)
        if block.head is None:
            return
        self._tails[block.head] -= 1
        if self._tails[block.head]:
            return
        del self._tails[block.head]
        head = self._blocks.get(block.head)
        if head is not None and not head.pinned:
            self._add_leaf(head)

    def _add_leaf(self, block: _Block[K]) -> None:
        group = block.group
        group.leaves[block.key] = block
        if not group.queued:
            self._enqueue(group)

    def _drop(self, block: _Block[K]) -> None:
        del self._blocks[block.key]
        if not block.pinned:
            self._withdraw(block)

    def _move(self, block: _Block[K], group: _Group) -> None:
        old = block.group
        old.alive -= 1
        group.alive += 1
        block.group = group
        if old.leaves.pop(block.key, None) is not None:
            self._add_leaf(block)

    def _pass_time(self) -> None:
        self._uses += 1
        if self._uses >= self._epoch_uses:
            self._uses = 0
            self._close_epoch()

    def _close_epoch(self) -> None:
        self._epoch += 1
        for group in self._due.pop(self._epoch):
            self._grow_older(group)
        if self._epoch % self.LEARN_EVERY == 0:
            for curve in self._curves:
                curve.learn(self._memory)
            groups = {id(group): group for *_, group in self._queue}.values()
            self._queue = []
            for group in groups:
                group.queued = False
                if group.leaves:
                    self._enqueue(group)
        self._current = self._open_groups()

    def _open_groups(self) -> list[_Group]:
        groups = [_Group(kind, self._epoch) for kind in range(_KINDS)]
        self._due[self._epoch + 1].extend(groups)
        return groups

    def _grow_older(self, group: _Group) -> None:
        """Note what became of the group in its bucket of ages, and move it on to the next."""
        entered = group.alive + group.reused + group.lost / 2  # a lost one was seen for half the time, on average
        self._curves[group.kind].observe(group.bucket, entered, group.reused)
        group.reused = group.lost = 0
        if not group.alive or group.bucket == BUCKETS - 1:
            return
        before = self._worth(group)
        group.bucket += 1
        self._due[group.epoch + AGE_STARTS[group.bucket + 1]].append(group)
        if group.queued and self._worth(group) != before:
            group.queued = False
            if group.leaves:
                self._enqueue(group)
