"""The tiers below the device as one: host memory, and a remote tier behind it. What the engine calls.

No method waits for I/O: the engine's thread looks things up in host memory and copies into it; all else happens on one
I/O thread, and is polled (or announced by `on_done`). A load that is late, torn or partly gone yields the blocks before
the gap; the engine recomputes from there.

A block used by two prompts is written through to the remote tier at once; one used once is written back when host
memory needs its room. While a request waits, what only the remote tier holds of it is brought into host memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from cache.prefix.blocks import Block
from cache.prefix.host import HostTier
from cache.prefix.mover import Mover
from cache.prefix.tiers import GuardedTier, TierStats, copy
from cache.prefix.transfer import Done, Lookup, Transfer, nobody
from policies.tiering import Cost, Decision, decide


class TierStack:
    """Host memory and a remote tier; either may be absent.

    Args:
        block_bytes, block_tokens: size of one block.
        step: blocks per prefill chunk: a load ends on a multiple of it in the prompt.
        write_through_uses: prompts that must have used a block before it goes to the remote tier at once; 1: all do.
        backlog_bytes: what may wait to be stored remotely; more is dropped.
        load_timeout: seconds a load may take where the time to recompute is not known yet.
        margin: see `policies.tiering.decide`.

    One engine thread calls everything but `stats`, which any thread may.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        block_tokens: int,
        host: HostTier | None = None,
        remote: GuardedTier | None = None,
        step: int = 1,
        write_through_uses: int = 2,
        backlog_bytes: int = 64 * 2**20,
        load_timeout: float = 5.0,
        margin: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.remote = remote
        self.prefill = Cost()
        self.decisions: Counter[str] = Counter()
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._step = step
        self._load_timeout = load_timeout
        self._margin = margin
        self._clock = clock
        self._mover = Mover(
            host,
            remote,
            block_bytes=block_bytes,
            worth=lambda lookup: self._decide(lookup).blocks,
            uses=write_through_uses,
            backlog_bytes=backlog_bytes,
            clock=clock,
        )

    def lookup(self, blocks: Sequence[Block], tenant: bytes, *, on_done: Done = nobody) -> Lookup:
        """Starts finding out which leading ones of `blocks` the tiers hold, and fetching remote ones ahead of need.

        `on_done` is called on the I/O thread; on this one, at once, if there is nothing to wait for.
        """
        found = 0
        if self.host is not None:
            found = self.host.lookup(blocks)
            self.host.stats.add(lookups=1, found=found)
        lookup = Lookup(blocks, tenant, found, on_done)
        self._mover.look_up(lookup)
        return lookup

    def decide(self, lookup: Lookup) -> Decision:
        """How many leading blocks to load rather than recompute, counted by reason."""
        decision = self._decide(lookup)
        self.decisions[decision.reason] += 1
        stats = self._stats()
        for tier, count in decision.refused:
            stats[tier].add(refused=count)
        return decision

    def load(
        self, lookup: Lookup, decision: Decision, buffers: Sequence[memoryview], *, on_done: Done = nobody
    ) -> Transfer:
        """Starts filling one writable buffer of `block_bytes` per block of the decision, first to last.

        It ends no later than recomputing the same blocks is expected to take.
        """
        seconds = self._load_timeout if decision.recompute_seconds is None else decision.recompute_seconds
        transfer = Transfer(lookup, decision, buffers, self._clock() + seconds, self._clock, on_done)
        self._mover.load(transfer)
        return transfer

    def missing(self, blocks: Sequence[Block]) -> list[int]:
        """Positions of the blocks that `store` would have to copy."""
        if self.host is None:
            return list(range(len(blocks)))
        return [position for position, block in enumerate(blocks) if not self.host.lookup([block])]

    def store(self, blocks: Sequence[Block], payloads: Sequence[memoryview], tenant: bytes, *, uses: int = 1) -> int:
        """Keeps blocks that leave the device, or that `uses` prompts used there; returns how many leading ones it took.

        Copies before it returns: the payloads (`block_bytes` each, one per block) are the caller's again.
        """
        if self.host is None:
            return self._mover.write_back(blocks, payloads, tenant)
        lease = self.host.prepare_store(blocks, tenant, uses)
        written = 0
        try:
            self._mover.make_room(lease)
            payload_of = dict(zip((block.digest for block in blocks), payloads, strict=True))
            for block, view in zip(lease.blocks, lease.views, strict=True):
                copy(view, payload_of[block.digest])
                written += 1
        finally:
            self.host.complete_store(lease, written)
        self.host.stats.add(stored=written, stored_bytes=written * self._block_bytes)
        self._mover.write_through(blocks, tenant)
        return self.host.lookup(blocks)

    def touch(self, blocks: Sequence[Block], tenant: bytes) -> None:
        """Another prompt used these blocks on the device."""
        if self.host is not None:
            self.host.touch(blocks)
            self._mover.write_through(blocks, tenant)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """The device computed `tokens` in `seconds`."""
        self.prefill.observe(tokens, seconds, self._clock())

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters by tier, see `TierStats`."""
        return {name: stats.snapshot() for name, stats in self._stats().items()}

    def close(self, timeout: float = 5.0) -> None:
        """Stores what still waits, for `timeout` seconds at most, and ends the I/O thread."""
        self._mover.close(timeout)

    def _decide(self, lookup: Lookup) -> Decision:
        held, costs = [], {}
        if self.host is not None:
            held.append((self.host.name, lookup.host))
            costs[self.host.name] = self.host.cost
        if self.remote is not None:
            held.append((self.remote.name, lookup.remote))
            costs[self.remote.name] = self.remote.cost
        return decide(
            held,
            block_bytes=self._block_bytes,
            block_tokens=self._block_tokens,
            costs=costs,
            prefill=self.prefill,
            now=self._clock(),
            start=lookup.blocks[0].index if lookup.blocks else 0,
            step=self._step,
            margin=self._margin,
        )

    def _stats(self) -> dict[str, TierStats]:
        tiers = [tier for tier in (self.host, self.remote) if tier is not None]
        return {tier.name: tier.stats for tier in tiers}
