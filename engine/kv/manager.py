"""Who holds which block of the pool, and which blocks still hold a known prefix.

A block is *held* (count above zero), or free. A free block may still be *indexed*: its content is known by its chain
identity and can be taken up again until the space is needed. Free blocks without content go first, then indexed ones,
least recently used first; a sequence gives its blocks back tail first, so that tails are evicted before heads.
Everything is O(1) per block. Identity is confirmed by the whole `Block`, never by its hash (`cache/prefix/blocks.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cache.prefix.blocks import Block


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
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that an `allocate` could have now."""
        return len(self._empty) + len(self._evictable)

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
            block, _ = self._evictable.popitem(last=False)
            content = self._content[block]
            if self.on_evict is not None and content is not None:
                self.on_evict(block, content)
            self._forget(block)
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
        """Adds one holder to each block."""
        for block in blocks:
            if self._counts[block] == 0:
                del (self._evictable if self._content[block] else self._empty)[block]
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder from each block, last block first."""
        for block in reversed(blocks):
            self._counts[block] -= 1
            if self._counts[block] == 0:
                (self._evictable if self._content[block] else self._empty)[block] = None

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
        """Makes a held, completely written block findable. False if the same content is already indexed elsewhere."""
        other = self._index.get(content.hash)
        if other is not None:
            if self._content[other] == content:
                return False
            self.collisions += 1
            self._forget(other)
            if self._counts[other] == 0:
                del self._evictable[other]
                self._empty[other] = None
        self._content[block] = content
        self._tenants[block], self._uses[block] = tenant, uses
        self._index[content.hash] = block
        self._events.stored(content)
        return True

    def reset(self) -> None:
        """Forgets every known prefix. Blocks that are held stay with their holders, unindexed."""
        self._index.clear()
        self._content = [None] * self.total
        self._empty.update(self._evictable)
        self._evictable.clear()
        self._events.cleared()

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._index[content.hash]
            self._content[block] = None
            self._events.removed(content)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless counts equal the holders' claims and every block is in exactly one place."""
        claims = Counter(block for blocks in holders for block in blocks)
        for block in range(self.total):
            places = (self._counts[block] > 0, block in self._empty, block in self._evictable)
            assert self._counts[block] == claims[block], f"block {block}: {self._counts[block]} != {claims[block]}"
            assert sum(places) == 1, f"block {block} is held, empty, evictable: {places}"
            assert not (places[1] and self._content[block]), f"block {block} is empty but has content"
            assert not (places[2] and not self._content[block]), f"block {block} is evictable without content"
        indexed = {content.hash: block for block, content in enumerate(self._content) if content}
        assert indexed == self._index, "the index and the blocks' contents differ"
