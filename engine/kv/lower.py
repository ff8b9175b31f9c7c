"""The tiers below the device, as the engine's thread uses them: bring blocks up before a prefill, keep what leaves.

Nothing here waits. A sequence whose blocks are being looked up or loaded is simply not ready; loads go into staging
memory, never into the pool itself, so a block of the pool can be given up at any moment, whatever still arrives. What
was not loaded in time is computed. Loaded prefixes are cut to whole prefill chunks, as all hits are.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.prefix.blocks import Block, LayoutId
from cache.prefix.codec import Codec
from cache.prefix.host import HostTier
from cache.prefix.lmcache import LMCacheTier, LMCacheUnavailable
from cache.prefix.remote import RedisTier
from cache.prefix.stack import TierStack
from cache.prefix.tiers import GuardedTier
from cache.prefix.transfer import Lookup, Transfer
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.manager import BlockManager
from engine.kv.pool import KVPool
from engine.sequence import Sequence

STORED_PER_STEP = 8
"""Blocks copied down after one step at most: a few milliseconds, so that no running request notices."""


@dataclass
class Fetch:
    """What is under way below for one sequence: first a lookup, then perhaps a transfer into `staging`."""

    lookup: Lookup
    again: bool
    transfer: Transfer | None = None
    staging: Tensor | None = None


class LowerTiers:
    """Moves blocks between the pool and a `TierStack`. Belongs to the engine thread; `wake` is called from another."""

    def __init__(
        self,
        stack: TierStack,
        pool: KVPool,
        manager: BlockManager,
        *,
        chunk_blocks: int,
        eager: bool,
        wake: Callable[[], None],
    ) -> None:
        self.stack = stack
        self._pool, self._manager, self._wake = pool, manager, wake
        self._chunk, self._size, self._eager = chunk_blocks, pool.block_size, eager
        self._loading: set[bytes] = set()
        self._leaving: list[tuple[int, Block, bytes, int]] = []
        self._pending: dict[int, Block] = {}
        manager.on_evict = self._evicting

    def want(self, sequence: Sequence, *, again: bool = False) -> None:
        """Starts finding out what the tiers hold of a waiting sequence's prompt, and fetching it ahead of need."""
        end = (sequence.prompt_length - 1) // (self._chunk * self._size) * self._chunk
        first = sequence.computed // self._size
        while first < end and self._manager.find(sequence.chain[first]) is not None:
            first += 1
        first -= first % self._chunk
        if first < end:
            lookup = self.stack.lookup(sequence.chain[first:end], sequence.salt, on_done=self._wake)
            sequence.fetch = Fetch(lookup, again)

    def ready(self, sequence: Sequence) -> bool:
        """Whether the sequence may compute now; False while something worth waiting for is under way."""
        while (fetch := sequence.fetch) is not None:
            if fetch.transfer is not None:
                if not fetch.transfer.done:
                    return False
                self._finish(sequence, fetch, fetch.transfer)
            elif not fetch.lookup.done:
                return False
            elif fetch.lookup.blocks[0].index != sequence.computed // self._size:
                self.abandon(sequence)  # the device has gained or lost blocks since: ask once more, from there
                if not fetch.again:
                    self.want(sequence, again=True)
            elif fetch.lookup.blocks[0].digest in self._loading:
                return False  # another sequence brings up the same prefix
            elif not self._start(sequence, fetch):
                sequence.fetch = None
        return True

    def abandon(self, sequence: Sequence) -> None:
        """Gives up whatever is under way for a sequence; from here on nothing is written for it."""
        fetch, sequence.fetch = sequence.fetch, None
        if fetch is not None:
            fetch.lookup.abandon()
            if fetch.transfer is not None:
                fetch.transfer.abandon()
                self._loading.discard(fetch.lookup.blocks[0].digest)

    def used(self, blocks: Several[int], sequence: Sequence) -> None:
        """A prompt took up these blocks on the device; those used for the second time will be kept below as well."""
        old = []
        for block in blocks:
            content, uses = self._manager.content(block), self._manager.use(block)
            if content is not None and uses == 2:
                self._pending[block] = content
            elif content is not None:
                old.append(content)
        if old:
            self.stack.touch(old, sequence.salt)

    def published(self, block: int, content: Block) -> None:
        """A block was computed and can be found; with eager write-through it will be kept below at once."""
        if self._eager:
            self._pending[block] = content

    def save_evicted(self) -> None:
        """Copies down what the last `schedule` evicted: to be called before the next write to the pool."""
        if self._leaving:
            self._store([entry for entry in self._leaving if self.stack.missing([entry[1]])])
            self._leaving.clear()

    def save_pending(self, limit: int | None = STORED_PER_STEP) -> bool:
        """Copies down some of the blocks that shall be kept below while they stay here; whether there were any."""
        chosen: list[tuple[int, Block, bytes, int]] = []
        while self._pending and (limit is None or len(chosen) < limit):
            block = next(iter(self._pending))
            content = self._pending.pop(block)
            if self._manager.content(block) == content:
                chosen.append((block, content, self._manager.tenant(block), self._manager.uses(block)))
        self._store(chosen)
        return bool(chosen)

    def _evicting(self, block: int, content: Block) -> None:
        self._pending.pop(block, None)
        self._leaving.append((block, content, self._manager.tenant(block), self._manager.uses(block)))

    def _store(self, entries: Several[tuple[int, Block, bytes, int]]) -> None:
        """Stores blocks, those of one tenant and one number of uses together and in the order of their chains."""
        groups: dict[tuple[bytes, int], list[tuple[int, Block]]] = {}
        for block, content, tenant, uses in entries:
            groups.setdefault((tenant, uses), []).append((block, content))
        for (tenant, uses), group in groups.items():
            group.sort(key=lambda entry: entry[1].index)
            payload = self._pool.export([block for block, _ in group]).cpu()
            self.stack.store([content for _, content in group], _views(payload), tenant, uses=uses)

    def _start(self, sequence: Sequence, fetch: Fetch) -> bool:
        decision = self.stack.decide(fetch.lookup)
        if not decision.blocks:
            fetch.lookup.abandon()
            return False
        taken = self._manager.allocate(decision.blocks, after=sequence.blocks[-1] if sequence.blocks else None)
        if taken is None:
            fetch.lookup.abandon()
            return False
        sequence.blocks += taken
        fetch.staging = self._pool.staging(decision.blocks)
        fetch.transfer = self.stack.load(fetch.lookup, decision, _views(fetch.staging), on_done=self._wake)
        self._loading.add(fetch.lookup.blocks[0].digest)
        return True

    def _finish(self, sequence: Sequence, fetch: Fetch, transfer: Transfer) -> None:
        """Takes over the whole chunks that were loaded, and gives the blocks of the others back."""
        sequence.fetch = None
        self._loading.discard(fetch.lookup.blocks[0].digest)
        first = fetch.lookup.blocks[0].index
        kept = transfer.loaded - transfer.loaded % self._chunk
        self._manager.release(sequence.blocks[first + kept :])
        del sequence.blocks[first + kept :]
        if not kept:
            return
        assert fetch.staging is not None
        self.save_evicted()  # what made room may have been evicted in this very step
        blocks = sequence.blocks[first:]
        self._pool.load(blocks, fetch.staging[:kept])
        for block, content in zip(blocks, fetch.lookup.blocks, strict=False):
            self._manager.publish(block, content, sequence.salt, uses=2)
        sequence.computed += kept * self._size
        if not sequence.preemptions:
            sequence.cached += kept * self._size
            left = kept
            for tier, count in transfer.by_tier.items():
                taken = min(count, left)
                left -= taken
                sequence.cached_by[tier] = sequence.cached_by.get(tier, 0) + taken * self._size


def _views(staging: Tensor) -> list[memoryview]:
    """One flat, writable view of bytes per block of a page-first tensor on the CPU."""
    rows = staging.view(torch.uint8).view(len(staging), -1).numpy()
    return [memoryview(row) for row in rows]


def _quota(limit: int) -> Callable[[bytes], int | None]:
    """The same byte quota for every tenant; 0: none."""
    return lambda tenant: limit or None


def build_stack(config: EngineConfig, layout: LayoutId, block_bytes: int) -> TierStack | None:
    """The tiers a configuration names; None if it names none. Raises `ModelError` for a remote that cannot be used."""
    if not config.prefix_reuse or not (config.kv_host_bytes or config.kv_remote):
        return None
    codec = Codec(layout.digest, block_bytes)
    scheme = config.kv_remote.partition("://")[0]
    try:
        if scheme in ("redis", "rediss", "unix"):
            remote = GuardedTier(RedisTier(config.kv_remote, codec, quota=_quota(config.kv_remote_quota)), block_bytes)
        elif scheme == "lmcache" and config.kv_remote_quota:
            raise ModelError("LMCache keeps no quotas by tenant; only a Redis remote tier does")
        elif scheme == "lmcache":
            remote = GuardedTier(LMCacheTier(config.kv_remote, codec, config.block_size), block_bytes)
        elif config.kv_remote:
            raise ModelError(f"the remote KV tier {config.kv_remote!r} is unknown; use redis://… or lmcache://…")
        else:
            remote = None
        host = (
            HostTier(config.kv_host_bytes, block_bytes, quota=_quota(config.kv_host_quota))
            if config.kv_host_bytes
            else None
        )
    except (LMCacheUnavailable, ValueError) as error:
        raise ModelError(f"the KV tiers cannot be set up: {error}") from error
    return TierStack(
        block_bytes=block_bytes,
        block_tokens=config.block_size,
        host=host,
        remote=remote,
        step=config.prefill_chunk // config.block_size,
        write_through_uses=config.write_through_uses,
    )
