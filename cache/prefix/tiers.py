"""What a tier behind host memory is, and the guard that keeps a bad one from harming a request.

A tier moves whole blocks in two steps, prepare and complete, so that nothing is visible before its bytes are safe and
nothing is freed while it is read. Its verbs may raise and may hang; `GuardedTier` turns that into misses: a time limit
per call, a circuit that opens (`cache.stores.breaker`), and counters.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from cache.prefix.blocks import Block
from cache.stores.breaker import LOG_EVERY, Breaker
from policies.tiering import Cost

log = logging.getLogger(__name__)
T = TypeVar("T")


class TierFull(Exception):
    """The tier is well, but takes no more."""


@dataclass(slots=True)
class Lease:
    """Blocks in transfer, and their payloads: to be read (load) or to be filled (store).

    Attributes:
        bad: load only: why the block after the last of `blocks` was refused (`BadBlock.reason`); None if it was not.
        dropped: store only: how many blocks found no room.
        handle: the tier's own.
    """

    blocks: list[Block] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    bad: str | None = None
    dropped: int = 0
    handle: Any = None


@dataclass(frozen=True)
class Limits:
    """Seconds that one call to a tier may take. A load or store moves one window of blocks at a time."""

    lookup: float = 0.25
    load: float = 1.0
    store: float = 5.0


class Tier(Protocol):
    """A store of blocks outside this process. All verbs run on one event loop; a cancelled verb leaves no trace."""

    name: str
    ttl: float
    """Seconds after which the tier may have forgotten what it was given."""
    limits: Limits
    """How long a call to it may reasonably take."""
    window_bytes: int
    """How much to ask for in one load."""

    async def lookup(self, blocks: Sequence[Block], tenant: bytes) -> int:
        """How many leading blocks it holds, as far as can be told without reading them."""
        ...

    async def prepare_load(self, blocks: Sequence[Block], tenant: bytes) -> Lease:
        """Leases the leading blocks that are here and proven to be what was asked for."""
        ...

    async def complete_load(self, lease: Lease) -> None:
        """Gives the lease of a load back."""
        ...

    async def prepare_store(self, blocks: Sequence[Block], tenant: bytes) -> Lease:
        """Leases room for those blocks that are not here yet, in order, as far as there is any."""
        ...

    async def complete_store(self, lease: Lease, ok: bool) -> None:
        """Publishes the filled lease; drops it if not `ok`. Raises (`TierFull`) if a block could not be published."""
        ...

    async def touch(self, blocks: Sequence[Block], tenant: bytes) -> None:
        """These blocks were used again: keep them longer."""
        ...

    async def close(self) -> None: ...


@dataclass
class TierStats:
    """Counters of one tier, since the start. Blocks unless said otherwise."""

    lookups: int = 0  # calls
    found: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    failures: int = 0  # calls that raised
    late: int = 0  # calls that ran out of time
    skipped: int = 0  # calls not made, the circuit being open
    bad: int = 0  # refused: not what was asked for, or damaged
    refused: int = 0  # held, but recomputing was expected to be quicker
    dropped: int = 0  # not stored: full, over quota, or too much waiting to be stored

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Adds to the named counters; safe from any thread."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        with self._lock:
            return asdict(self)


class GuardedTier:
    """A tier whose verbs never raise and never hang; what it learns about speed goes into `cost`."""

    def __init__(
        self,
        tier: Tier,
        block_bytes: int,
        *,
        limits: Limits | None = None,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.stats = TierStats()
        self.cost = Cost()
        self.breaker = breaker or Breaker(clock=clock)
        self._block_bytes = block_bytes
        self._limits = limits or tier.limits
        self._clock = clock
        self._logged_bad = float("-inf")

    async def lookup(self, blocks: Sequence[Block], tenant: bytes) -> int:
        """How many leading blocks it seems to hold; 0 if it does not answer in time."""
        started = self._clock()
        self.stats.add(lookups=1)
        found = await self._call(lambda: self.tier.lookup(blocks, tenant), self._limits.lookup)
        if found is None:
            return 0
        self.cost.observe_latency(self._clock() - started, self._clock())
        self.stats.add(found=found)
        return found

    async def load(
        self,
        blocks: Sequence[Block],
        tenant: bytes,
        take: Callable[[list[Block], list[memoryview]], None],
        deadline: float,
    ) -> int:
        """Hands the leading blocks and their proven payloads to `take`; returns how many. Ends by `deadline`."""
        started = self._clock()
        limit = deadline - started
        if limit <= 0:
            return 0
        lease = await self._call(lambda: self.tier.prepare_load(blocks, tenant), self._limits.load, limit)
        if lease is None:
            now = self._clock()
            if now - started >= min(limit, self._limits.load):  # too slow, by how much is not known
                self.cost.observe(len(blocks) * self._block_bytes, now - started, now)
            return 0
        try:
            take(lease.blocks, lease.views)
        finally:
            await self._end(self.tier.complete_load(lease))
        count, now = len(lease.blocks), self._clock()
        self.cost.observe(count * self._block_bytes, now - started, now)
        self.stats.add(loaded=count, loaded_bytes=count * self._block_bytes, bad=int(lease.bad is not None))
        if lease.bad is not None and now - self._logged_bad >= LOG_EVERY:
            self._logged_bad = now
            log.warning("%s tier: a KV block was refused: %s", self.name, lease.bad)
        return count

    async def store(self, blocks: Sequence[Block], tenant: bytes, payloads: Sequence[memoryview]) -> bool:
        """Stores those blocks that are not there yet; whether all of them are there now."""
        lease = await self._call(lambda: self.tier.prepare_store(blocks, tenant), self._limits.store)
        if lease is None:
            self.stats.add(dropped=len(blocks))
            return False
        filled = False
        try:
            payload_of = dict(zip((block.digest for block in blocks), payloads, strict=True))
            for block, view in zip(lease.blocks, lease.views, strict=True):
                copy(view, payload_of[block.digest])
            filled = True
        finally:
            if not filled:
                await self._end(self.tier.complete_store(lease, False))
        stored = await self._call(lambda: self._publish(lease), self._limits.store)
        count = len(lease.blocks)
        if stored is None:
            self.stats.add(dropped=count + lease.dropped)
            return False
        self.stats.add(stored=count, stored_bytes=count * self._block_bytes, dropped=lease.dropped)
        return not lease.dropped

    async def touch(self, blocks: Sequence[Block], tenant: bytes) -> None:
        """Passes on that the blocks were used."""
        await self._call(lambda: self.tier.touch(blocks, tenant), self._limits.lookup)

    async def close(self) -> None:
        """Lets the tier go."""
        await self._end(self.tier.close())

    async def _publish(self, lease: Lease) -> bool:
        await self.tier.complete_store(lease, True)
        return True

    async def _call(self, verb: Callable[[], Awaitable[T]], limit: float, patience: float = float("inf")) -> T | None:
        """The verb's result, or None. `patience` is how long the caller can wait, which is not the tier's fault."""
        if not self.breaker.allow():
            self.stats.add(skipped=1)
            return None
        try:
            async with asyncio.timeout(min(limit, patience)):
                result = await verb()
        except asyncio.CancelledError:
            self.breaker.abandon()
            raise
        except TimeoutError:
            self.stats.add(late=1)
            if patience < limit:
                self.breaker.abandon()
            else:
                self._failed("no answer in time")
            return None
        except TierFull as error:
            log.debug("%s tier: %s", self.name, error)
            self.breaker.success()
            return None
        except Exception as error:
            self.stats.add(failures=1)
            self._failed(f"{type(error).__name__}: {error}")
            return None
        self.breaker.success()
        return result

    def _failed(self, why: str) -> None:
        before = self.breaker.state
        self.breaker.failure()
        if before == "closed" and self.breaker.state == "open":
            log.warning("%s tier: %s; KV blocks are recomputed until it answers again", self.name, why)

    async def _end(self, verb: Awaitable[None]) -> None:
        """What must be done even while the circuit is open."""
        try:
            async with asyncio.timeout(self._limits.load):
                await verb
        except Exception as error:
            self.stats.add(failures=1)
            log.debug("%s tier: %s", self.name, error)


def copy(target: memoryview, source: memoryview) -> None:
    """Copies a payload, with the interpreter's lock released. Raises `ValueError` if the sizes differ."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
