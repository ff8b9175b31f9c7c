"""Who holds which block of the pool, and which blocks still hold a known prefix.

A block is *held* (count above zero), or free. A free block may still be *indexed*: its content is known by its chain
identity and can be taken up again until the space is needed; it is then *idle*. Free blocks without content go first,
then idle ones by `policies/prefix_eviction.py`: the one whose place is least worth keeping, tails always before heads;
the least recently used as long as nothing is known about the traffic.
Everything is O(1) per block. Identity is confirmed by the whole `Block`, never by its hash (`cache/prefix/blocks.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cache.prefix.blocks import Block
from policies.prefix_eviction import PrefixEviction


class BlockEvents(Protocol):
    """Hears what the index gains and loses; `flush` comes after every step."""

    def stored(self, block: Block) -> None: ...
    def removed(self, block: Block) -> None: ...
    def cleared(self) -> None: ...
    def flush(self) -> None: ...


class NoEvents:
    """Listens to nothing."""

    def stored(self, block: Block) -> None: ...
    def removed(self, block: Block) -> None: ...
    def cleared(self) -> None: ...
    def flush(self) -> None: ...


class BlockManager:
    """Reference counts, free lists and the prefix index over `blocks` blocks. Not thread-safe: one owner."""

    def __init__(self, blocks: int, events: BlockEvents) -> None:
        self.total = blocks
        self.collisions = 0
        self.evictions = 0
        self.on_evict: Callable[[int, Block], None] | None = None
        """Told of a known block whose space is taken, while its bytes are still there."""
        self._events = events
        self._counts = [0] * blocks
        self._content: list[Block | None] = [None] * blocks
        self._tenants = [b""] * blocks
        self._uses = [0] * blocks
        self._index: dict[bytes, int] = {}
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._places: dict[bytes, int] = {}  # of indexed blocks by digest
        self._eviction = PrefixEviction[bytes](blocks)  # of indexed blocks by digest; those held are pinned
        self._idle = 0

    @property
    def free(self) -> int:
        """Blocks that an `allocate` could have now."""
        return len(self._empty) + self._idle

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Takes `count` blocks, each held once; all or nothing. Continues behind block `after` if there is room."""
        if count > self.free:
            return None
        taken: list[int] = []
        for _ in range(count):
            after = self._take(after)
            taken.append(after)
        return taken

    def _take(self, after: int | None) -> int:
        if self._empty:
            block = after + 1 if after is not None and after + 1 in self._empty else next(iter(self._empty))
            del self._empty[block]
        else:
            digest = self._eviction.evict()
            assert digest is not None
            block = self._places.pop(digest)
            content = self._content[block]
            assert content is not None
            if self.on_evict is not None:
                self.on_evict(block, content)
            self._content[block] = None
            self._idle -= 1
            del self._index[content.hash]
            self._events.removed(content)
            self.evictions += 1
        self._counts[block] = 1
        return block

    def find(self, wanted: Block) -> int | None:
        """The pool block that holds exactly this content, or None."""
        block = self._index.get(wanted.hash)
        if block is None:
            return None
        if self._content[block] != wanted:
            self.collisions += 1
            return None
        return block

    def indexed(self) -> list[Block]:
        """All blocks that can be found now."""
        return [block for block in self._content if block is not None]

    def is_held(self, block: int) -> bool:
        """Whether some sequence holds the block now."""
        return self._counts[block] > 0

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each block, which for an indexed one is one more use."""
        for block in blocks:
            content = self._content[block]
            if content is not None:
                self._eviction.touch(content.digest)
            if self._counts[block] == 0:
                if content is None:
                    del self._empty[block]
                else:
                    self._eviction.pin(content.digest)
                    self._idle -= 1
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder from each block, last block first."""
        for block in reversed(blocks):
            self._counts[block] -= 1
            if self._counts[block]:
                continue
            content = self._content[block]
            if content is None:
                self._empty[block] = None
            else:
                self._eviction.unpin(content.digest)
                self._idle += 1

    def content(self, block: int) -> Block | None:
        """What an indexed block holds."""
        return self._content[block]

    def tenant(self, block: int) -> bytes:
        """Whose an indexed block is."""
        return self._tenants[block]

    def uses(self, block: int) -> int:
        """How many prompts have used an indexed block, the one that made it included."""
        return self._uses[block]

    def use(self, block: int) -> int:
        """Counts one more use; returns how many there are now."""
        self._uses[block] += 1
        return self._uses[block]

    def publish(self, block: int, content: Block, tenant: bytes = b"", *, uses: int = 1) -> bool:
        """Makes a held, completely written block findable. False if its content, or its hash, is indexed elsewhere."""
        other = self._index.get(content.hash)
        if other is not None:
            self.collisions += self._content[other] != content
            return False
        self._content[block] = content
        self._tenants[block], self._uses[block] = tenant, uses
        self._index[content.hash] = self._places[content.digest] = block
        self._eviction.insert(content.digest, content.parent, pinned=True)
        self._events.stored(content)
        return True

    def reset(self) -> None:
        """Forgets every known prefix. Blocks that are held stay with their holders, unindexed."""
        for digest, block in self._places.items():
            self._eviction.remove(digest)
            self._content[block] = None
            if not self._counts[block]:
                self._empty[block] = None
        self._index.clear()
        self._places.clear()
        self._idle = 0
        self._events.cleared()

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless counts equal the holders' claims and every block is in exactly one place."""
        claims = Counter(block for blocks in holders for block in blocks)
        spare = 0
        for block in range(self.total):
            content = self._content[block]
            idle = content is not None and not self._counts[block]
            places = (self._counts[block] > 0, block in self._empty, idle)
            assert self._counts[block] == claims[block], f"block {block}: {self._counts[block]} != {claims[block]}"
            assert sum(places) == 1, f"block {block} is held, empty, idle: {places}"
            assert not (places[1] and content), f"block {block} is empty but has content"
            spare += places[1] or idle
        assert spare == self.free, f"{self.free} blocks are said to be free, {spare} are"
        places = {content.digest: block for block, content in enumerate(self._content) if content}
        assert places == self._places and len(places) == len(self._eviction), "the index and its eviction differ"
        indexed = {content.hash: block for block, content in enumerate(self._content) if content}
        assert indexed == self._index, "the index and the blocks' contents differ"
