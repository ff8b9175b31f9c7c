"""The remote tier in Redis: one key per block, always with an expiry.

    {prefix}:kv{version}:{layout}:{tenant}:{block hash}  ->  codec record
    {prefix}:kvq{version}:{layout}:{tenant}              ->  sorted set: block hashes by expiry, if there is a quota

One block per key, not a run of several: blocks of the sizes that matter (0.4 to 4 MB) read at 2.3 GB/s singly and at
1.6 GB/s in runs of eight, whose values outgrow the processor's caches; a key costs 6 microseconds. And a run would have
to be aligned, gathered again on eviction, and cut where two prompts part. `SET` makes key and bytes visible at once, so
the key space itself is the index, and it never shows a block before its bytes.

Quota: all records of a layout are of one size but for a few bytes, so the unexpired members of a tenant's sorted set
times that size are its bytes, for all engines together and over restarts. It counts what Redis evicted by itself until
that would have expired.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from cache.prefix.blocks import Block
from cache.prefix.codec import VERSION, BadBlock, Codec, tenant_tag
from cache.prefix.tiers import Lease, Limits, TierFull

LOOKUP_WINDOW = 256  # keys asked for in one round trip; a lookup stops at the first window with a gap


@dataclass(slots=True)
class _Stored:
    """What Redis says about one block's key."""

    complete: bool
    expires_ms: int


class RedisTier:
    """See `tiers.Tier`. Call it through `GuardedTier`, which adds time limits and the circuit.

    Args:
        url: as redis-py takes it: `redis://host:port/db`, `rediss://…`, `unix:///path?db=n`.
        ttl: seconds a block is kept after its last use.
        quota: bytes of payload a tenant may keep in this layout, None for no limit.
        clock: wall clock in seconds, the same for all engines within a fraction of `ttl`.
    """

    name = "redis"
    limits = Limits(lookup=0.25, load=1.0, store=5.0)
    window_bytes = 4 * 2**20  # small enough to stop in time, large enough to make a round trip cheap

    def __init__(
        self,
        url: str,
        codec: Codec,
        *,
        prefix: str = "wg",
        ttl: float = 86400.0,
        quota: Callable[[bytes], int | None] = lambda tenant: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ttl = ttl
        self._ttl_ms = max(1, int(ttl * 1000))
        self._codec = codec
        self._space = f"{prefix}:kv{VERSION}:{codec.layout.hex()[:32]}"
        self._members = f"{prefix}:kvq{VERSION}:{codec.layout.hex()[:32]}"
        self._quota = quota
        self._clock = clock
        # No retries: a late block is worth nothing, and the circuit decides when to try again.
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_read_size=2**20)

    async def lookup(self, blocks: Sequence[Block], tenant: bytes) -> int:
        found = 0
        for start in range(0, len(blocks), LOOKUP_WINDOW):
            window = blocks[start : start + LOOKUP_WINDOW]
            pipe = self._redis.pipeline(transaction=False)
            for key in self._keys(window, tenant):
                pipe.strlen(key)
            for block, length in zip(window, await pipe.execute(), strict=True):
                if length != self._codec.record_bytes(block, tenant):
                    return found
                found += 1
        return found

    async def prepare_load(self, blocks: Sequence[Block], tenant: bytes) -> Lease:
        lease = Lease()
        keys = self._keys(blocks, tenant)
        for block, key, record in zip(blocks, keys, await self._redis.mget(keys), strict=True):
            if not isinstance(record, bytes):
                break
            try:
                payload = self._codec.decode(record, block, tenant)
            except BadBlock as error:
                lease.bad = error.reason
                await self._redis.unlink(key)  # or it would be found again, and stand in the way of a sound one
                break
            lease.blocks.append(block)
            lease.views.append(payload)
        return lease

    async def complete_load(self, lease: Lease) -> None:
        lease.views.clear()

    async def prepare_store(self, blocks: Sequence[Block], tenant: bytes) -> Lease:
        stored = await self._renew(blocks, tenant)
        missing = [block for block, state in zip(blocks, stored, strict=True) if not state.complete]
        room = await self._room(tenant) if missing else 0
        lease = Lease(missing[:room], dropped=len(missing[room:]), handle=([], tenant))
        for block in lease.blocks:
            record, payload = self._codec.allocate(block, tenant)
            lease.views.append(payload)
            lease.handle[0].append(record)
        return lease

    async def complete_store(self, lease: Lease, ok: bool) -> None:
        records, tenant = lease.handle
        if not ok or not records:
            return
        pipe = self._redis.pipeline(transaction=False)
        self._enrol(pipe, lease.blocks, tenant)
        for key, record in zip(self._keys(lease.blocks, tenant), records, strict=True):
            self._codec.seal(record)
            pipe.set(key, memoryview(record), px=self._ttl_ms)
        for answer in await pipe.execute(raise_on_error=False):
            if isinstance(answer, OutOfMemoryError):
                raise TierFull("Redis is out of memory")
            if isinstance(answer, RedisError):
                raise answer

    async def touch(self, blocks: Sequence[Block], tenant: bytes) -> None:
        await self._renew(blocks, tenant)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _renew(self, blocks: Sequence[Block], tenant: bytes) -> list[_Stored]:
        """What is stored of the blocks; what of it has spent half its life gets a full one again."""
        keys = self._keys(blocks, tenant)
        pipe = self._redis.pipeline(transaction=False)
        for key in keys:
            pipe.strlen(key)
            pipe.pttl(key)
        answers = await pipe.execute()
        stored = [
            _Stored(length == self._codec.record_bytes(block, tenant), expires)
            for block, length, expires in zip(blocks, answers[::2], answers[1::2], strict=True)
        ]
        old = [i for i, state in enumerate(stored) if state.complete and state.expires_ms < self._ttl_ms // 2]
        if old:
            pipe = self._redis.pipeline(transaction=False)
            self._enrol(pipe, [blocks[i] for i in old], tenant)
            for i in old:
                pipe.pexpire(keys[i], self._ttl_ms)
            await pipe.execute()
        return stored

    async def _room(self, tenant: bytes) -> int:
        """Blocks that the tenant's quota still allows."""
        limit = self._quota(tenant)
        if limit is None:
            return sys.maxsize
        members = self._member_key(tenant)
        pipe = self._redis.pipeline(transaction=False)
        pipe.zremrangebyscore(members, "-inf", self._clock() * 1000)
        pipe.zcard(members)
        _, count = await pipe.execute()
        return max(0, limit // self._codec.payload_bytes - count)

    def _enrol(self, pipe: Pipeline, blocks: Sequence[Block], tenant: bytes) -> None:
        """Counts blocks that are about to get a full life."""
        if self._quota(tenant) is None:
            return
        members = self._member_key(tenant)
        expiry = self._clock() * 1000 + self._ttl_ms
        pipe.zadd(members, {block.hash: expiry for block in blocks})
        pipe.pexpire(members, self._ttl_ms)

    def _member_key(self, tenant: bytes) -> str:
        return f"{self._members}:{tenant_tag(tenant).hex()}"

    def _keys(self, blocks: Sequence[Block], tenant: bytes) -> list[str]:
        space = f"{self._space}:{tenant_tag(tenant).hex()}:"
        return [space + block.hash.hex() for block in blocks]
