"""The remote tier in LMCache: its multiprocess server on this machine, reached by RPC, bytes moved in shared memory.

LMCache stores chunks of tokens and names them by all token ids before. Here a chunk is one block, and what is put in it
is a codec record, opaque to the server, in a "model" named after the layout: so its blocks are proven on the way back
like any other tier's. The server may keep a second level (Redis, disk, …) of its own, and serve vLLM beside us.

Needs the extra `warmgate[lmcache]` (one exact version, for its RPC has no promise of stability; in the environment of
`make`, requirements-lmcache.txt instead) and a server such as

    lmcache server --host 127.0.0.1 --port 5555 --chunk-size BLOCK_SIZE --supported-transfer-mode engine_driven
        --shm-name warmgate --l1-size-gb 4 --eviction-policy LRU
        --l2-adapter '{"type": "resp", "host": "127.0.0.1", "port": 6379}' --l2-prefetch-policy retain

A shared memory name is required: without one LMCache pickles what it moves. Bind the server to loopback.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import os
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from cache.prefix.blocks import Block
from cache.prefix.codec import BadBlock, Codec, tenant_tag
from cache.prefix.tiers import Lease, Limits

log = logging.getLogger(__name__)

LMCACHE_VERSION = "0.5.6"
REGISTER_EVERY = 10.0  # seconds; the server forgets who is silent, or restarts
HOLD = 30.0  # seconds a lookup's blocks stay locked for the load that follows; the server's own limit is 300
RELEASE_TIMEOUT = 5.0  # seconds
SHARED_MEMORY = Path("/dev/shm")


class LMCacheUnavailable(Exception):
    """LMCache cannot be used as it is installed or as its server is set up; the message says what to change."""


@dataclass(slots=True)
class _Found:
    """A lookup whose first `hit` blocks are locked on the server."""

    key: Any
    hit: int
    expires: float


class LMCacheTier:
    """See `tiers.Tier`. Call it through `GuardedTier`, which adds time limits and the circuit.

    Args:
        url: `lmcache://host:port` of the server, which must run on this machine.
        block_tokens: of the engine; the server's chunk size must equal it.

    Raises `LMCacheUnavailable` if the package is missing or of another version.
    """

    name = "lmcache"
    ttl = 3600.0  # LMCache has none; blocks are offered again from time to time, as it may have evicted them
    limits = Limits(lookup=2.0, load=2.0, store=10.0)  # its lookup already brings blocks up from the second level
    window_bytes = 2**30  # each lookup starts at the first block of the prompt, so the fewer the better

    def __init__(
        self, url: str, codec: Codec, block_tokens: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lm = _import()
        self._url = url.replace("lmcache://", "tcp://", 1)
        self._codec = codec
        self._block_tokens = block_tokens
        self._clock = clock
        longest = Block(b"", bytes(32), bytes(32), 1, bytes(4 * block_tokens))
        self._slot_bytes = codec.record_bytes(longest, b"")
        self._model = f"warmgate-{codec.layout.hex()[:32]}"
        self._instance = uuid.uuid4().int >> 65
        self._context: Any = None
        self._client: Any = None
        self._memory: mmap.mmap | None = None
        self._inode = 0
        self._registered = float("-inf")
        self._found: dict[tuple[bytes, bytes], _Found] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def lookup(self, blocks: Sequence[Block], tenant: bytes) -> int:
        await self._connect()
        found = await self._look_up(blocks, tenant)
        count = found.hit - blocks[0].index
        if count <= 0:
            self._release(found, found.hit, found.hit)
            return 0
        self._expire()
        before = self._found.pop(place := (tenant, blocks[0].digest), None)
        if before is not None:
            self._release(before, before.hit, before.hit)
        self._found[place] = found
        return count

    async def prepare_load(self, blocks: Sequence[Block], tenant: bytes) -> Lease:
        await self._connect()
        found = self._found.pop((tenant, blocks[0].digest), None) or await self._look_up(blocks, tenant)
        first, stop = blocks[0].index, min(found.hit, blocks[-1].index + 1)
        if stop <= first:
            self._release(found, found.hit, found.hit)
            return Lease()
        size = self._block_tokens
        tokens = found.key.token_ids[: stop * size]
        key = replace(found.key, token_ids=tokens, worker_id=0, start=first * size, end=stop * size)
        try:
            answer = await _result(self._client.prepare_retrieve(key, self._instance))
        except asyncio.CancelledError:
            self._release(found, first, stop)
            raise
        lease = Lease(handle=(found, key, first, stop) if answer.success else None)
        if not answer.success:
            self._release(found, first, stop)
            return lease
        for block, slot in zip(blocks, answer.context["slots"], strict=False):
            try:
                view = self._slot(slot)[: self._codec.record_bytes(block, tenant)]
                lease.views.append(self._codec.decode(view, block, tenant))
            except BadBlock as error:
                lease.bad = error.reason
                break
            lease.blocks.append(block)
        return lease

    async def complete_load(self, lease: Lease) -> None:
        lease.views.clear()
        if lease.handle is None:
            return
        found, key, first, stop = lease.handle
        await _result(self._client.commit_retrieve(key, self._instance))
        self._release(found, first, stop)

    async def prepare_store(self, blocks: Sequence[Block], tenant: bytes) -> Lease:
        await self._connect()
        lease = Lease(handle=[])
        cuts = [0, *(i for i in range(1, len(blocks)) if blocks[i].parent != blocks[i - 1].digest), len(blocks)]
        for run in [blocks[a:b] for a, b in pairwise(cuts)]:
            key = self._key(run[-1], tenant, run[0].index)
            context = (await _result(self._client.prepare_store(key, self._instance))).context
            records = []
            for slot, position in zip(context["slots"], context["chunk_indices"], strict=True):
                record = self._slot(slot)[: self._codec.record_bytes(run[position], tenant)]
                lease.blocks.append(run[position])
                lease.views.append(self._codec.begin(record, run[position], tenant))
                records.append(record)
            if records:
                lease.handle.append((key, records))
            else:
                await _result(self._client.end_session(key.request_id))
        return lease

    async def complete_store(self, lease: Lease, ok: bool) -> None:
        lease.views.clear()
        for key, records in lease.handle:
            for record in records if ok else []:  # without its checksum a record is never read
                self._codec.seal(record)
            if not await _result(self._client.commit_store(key, self._instance, b"")):
                raise ConnectionError("LMCache did not take the blocks")
            await _result(self._client.end_session(key.request_id))

    async def touch(self, blocks: Sequence[Block], tenant: bytes) -> None:
        """LMCache counts its own retrievals."""

    async def close(self) -> None:
        if self._client is None:
            return
        client, self._client, self._memory = self._client, None, None
        try:
            for found in self._found.values():
                await self._unlock(client, found, found.hit, found.hit)
            await asyncio.gather(*self._releases)
            await _result(client.unregister_kv_cache_engine_driven_context(self._instance))
        finally:
            client.close()
            self._context.destroy(linger=0)

    # --- the server -----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Registers with the server, anew if it may have forgotten us, and maps its shared memory."""
        now = self._clock()
        if (
            self._memory is not None
            and now - self._registered < REGISTER_EVERY
            and self._inode == self._current_inode()
        ):
            return
        if self._client is None:
            self._context = self._lm.zmq.Context()
            self._client = self._lm.RequestClientFactory.create(self._url, context=self._context)
        chunk = await _result(self._client.get_chunk_size())
        if chunk != self._block_tokens:
            raise LMCacheUnavailable(
                f"LMCache's chunk size is {chunk}, the engine's block size {self._block_tokens}: they must be equal "
                "(lmcache server --chunk-size)"
            )
        payload = self._lm.RegisterEngineDrivenContextPayload(
            instance_id=self._instance,
            model_name=self._model,
            world_size=1,
            block_size=self._block_tokens,
            num_layers=1,
            hidden_dim_size=-(-self._slot_bytes // self._block_tokens),
            dtype_str="uint8",
            use_mla=True,  # one plane instead of two: the record
            num_physical_slots=self._block_tokens,
        )
        answer = await _result(self._client.register_kv_cache_engine_driven_context(payload))
        if not answer.shm_name:
            raise LMCacheUnavailable("LMCache's server has no shared memory: start it with --shm-name")
        self._map(answer.shm_name, answer.pool_size)
        self._registered = now

    def _map(self, name: str, size: int) -> None:
        self._path = SHARED_MEMORY / name.lstrip("/")
        inode = self._current_inode()
        if self._memory is None or inode != self._inode:
            self._found.clear()  # locks of a server that is gone
            with self._path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
            self._inode = inode

    def _current_inode(self) -> int:
        try:
            return self._path.stat().st_ino
        except OSError:
            raise LMCacheUnavailable(f"LMCache's shared memory {self._path} is not on this machine") from None

    def _slot(self, slot: dict[str, Any]) -> memoryview:
        assert self._memory is not None
        return memoryview(self._memory)[slot["offset"] : slot["offset"] + slot["length"]]

    async def _look_up(self, blocks: Sequence[Block], tenant: bytes) -> _Found:
        """Asks which leading blocks of the whole prompt are there, and has them locked."""
        key = self._key(blocks[-1], tenant, 0, worker=None)
        try:
            await _result(self._client.lookup(key, 1))
            hit = None
            while hit is None:
                hit = await _result(self._client.query_prefetch_status(key.request_id))
                if hit is None:
                    await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self._release(_Found(key, blocks[-1].index + 1, 0.0), 0, 0)
            raise
        return _Found(key, hit, self._clock() + HOLD)

    def _release(self, found: _Found, first: int, stop: int) -> None:
        """Has the blocks of a lookup unlocked, but for those from `first` to `stop`, which a retrieval unlocks."""
        task = asyncio.get_running_loop().create_task(self._unlock(self._client, found, first, stop))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _unlock(self, client: Any, found: _Found, first: int, stop: int) -> None:
        size = self._block_tokens
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                for a, b in [(0, first), (stop, found.hit)]:
                    if a < b:
                        await _result(client.free_lookup_locks(replace(found.key, start=a * size, end=b * size), 1))
                await _result(client.end_session(found.key.request_id))  # not before: it forgets what was locked
        except Exception as error:
            log.debug("LMCache did not unlock a lookup, which it will do by itself in time: %r", error)

    def _expire(self) -> None:
        now = self._clock()
        for place, found in list(self._found.items()):
            if found.expires <= now:
                del self._found[place]
                self._release(found, found.hit, found.hit)

    def _key(self, last: Block, tenant: bytes, first: int, worker: int | None = 0) -> Any:
        """Names the blocks from index `first` to `last`; what is not in the token ids goes into the salt."""
        lineage = last.lineage()
        tokens = b"".join(block.tokens for block in lineage)
        salt = hashlib.sha256(tenant_tag(tenant) + lineage[0].extra).hexdigest()[:32]
        return self._lm.IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=struct.unpack(f"<{len(tokens) // 4}I", tokens),
            start=first * self._block_tokens,
            end=(last.index + 1) * self._block_tokens,
            request_id=uuid.uuid4().hex,
            cache_salt=salt,
            num_kv_readers=1,
        )


async def _result(future: Any) -> Any:
    """Waits for one of LMCache's futures without a thread."""
    pause = 0.0001
    while not future.query():
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.005)
    return future.result(0)


@dataclass(frozen=True)
class _LMCache:
    """What is used of the package."""

    zmq: Any
    RequestClientFactory: Any
    IPCCacheServerKey: Any
    RegisterEngineDrivenContextPayload: Any


def _import() -> _LMCache:
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    try:
        import zmq
        from lmcache.v1.multiprocess.custom_types import (  # pyright: ignore[reportMissingImports]
            IPCCacheServerKey,
            RegisterEngineDrivenContextPayload,
        )
        from lmcache.v1.multiprocess.transport.factory import (  # pyright: ignore[reportMissingImports]
            RequestClientFactory,
        )
    except ImportError as error:
        raise LMCacheUnavailable(f"LMCache is not installed: pip install 'warmgate[lmcache]' ({error})") from None
    if (version := metadata.version("lmcache")) != LMCACHE_VERSION:
        raise LMCacheUnavailable(f"LMCache {LMCACHE_VERSION} is needed, {version} is installed")
    return _LMCache(zmq, RequestClientFactory, IPCCacheServerKey, RegisterEngineDrivenContextPayload)
