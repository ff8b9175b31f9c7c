"""The I/O thread: moves blocks between host memory, the remote tier and the engine's buffers.

One thread with one event loop, so that every call to a remote tier can be given up on time. Loads run beside each
other; stores wait in one queue behind each other, so that they never crowd out a load.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from cache.prefix.blocks import Block
from cache.prefix.host import HostLease, HostTier
from cache.prefix.tiers import GuardedTier, copy
from cache.prefix.transfer import Lookup, Transfer

log = logging.getLogger(__name__)

WINDOW_BYTES = 4 * 2**20  # copied or stored between two looks at what else is to be done
RETRY_AFTER = 30.0  # seconds until a block that the remote tier did not take is offered again


@dataclass(slots=True, eq=False)
class StoreJob:
    """Blocks on their way to the remote tier: to be read from host memory, or copies made when they left it."""

    blocks: list[Block]
    tenant: bytes
    copies: list[memoryview] | None = None


class Mover:
    """Starts its thread at once and ends it on `close`. Its plain methods may be called from any thread.

    Args:
        worth: how many leading blocks of a finished lookup are worth fetching before they are asked for.
        uses: prompts that must have used a block before it is written through; 1: all blocks are.
        backlog_bytes: copies that may wait to be stored; more are dropped.
    """

    def __init__(
        self,
        host: HostTier | None,
        remote: GuardedTier | None,
        *,
        block_bytes: int,
        worth: Callable[[Lookup], int],
        uses: int,
        backlog_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._remote = remote
        self._worth = worth
        self._uses = uses
        self._clock = clock
        self._block_bytes = block_bytes
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._pull_window = max(1, remote.tier.window_bytes // block_bytes) if remote else 0
        self._backlog_bytes = backlog_bytes
        self._waiting_bytes = 0  # of copies
        self._queued: set[bytes] = set()  # digests that wait to be read from host memory
        self._lock = threading.Lock()
        self._arriving: dict[bytes, asyncio.Event] = {}  # by digest: being fetched from the remote tier
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._loop = uvloop.new_event_loop()
        self._jobs: asyncio.Queue[StoreJob | None] = asyncio.Queue()
        self._main = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name="kv-tiers", daemon=True)
        self._thread.start()

    def look_up(self, lookup: Lookup) -> None:
        """Asks the remote tier, then fetches into host memory what is worth it."""
        if self._remote is None or lookup.host == len(lookup.blocks) or not self._begin(lambda: self._look_up(lookup)):
            lookup.finish()

    def load(self, transfer: Transfer) -> None:
        """Fills the transfer's buffers from the tiers that its decision allows."""
        if not self._begin(lambda: self._load(transfer)):
            transfer.finish()

    def write_through(self, blocks: Sequence[Block], tenant: bytes) -> None:
        """Stores those of the blocks in host memory that have been used often enough and are not stored yet."""
        if self._host is None or self._remote is None:
            return
        due = self._host.unsettled(blocks, self._uses, self._clock())
        with self._lock:
            due = [block for block in due if block.digest not in self._queued]
            self._queued.update(block.digest for block in due)
        for start in range(0, len(due), self._window):
            self._enqueue(StoreJob(due[start : start + self._window], tenant))

    def write_back(self, blocks: Sequence[Block], payloads: Sequence[memoryview], tenant: bytes) -> int:
        """Stores copies of blocks that are about to be overwritten; returns how many leading ones are on their way."""
        if self._remote is None:
            return 0
        with self._lock:
            room = 0 if self._closing else self._backlog_bytes - self._waiting_bytes
            count = min(len(blocks), room // self._block_bytes)
            self._waiting_bytes += count * self._block_bytes
        for start in range(0, count, self._window):
            part = slice(start, min(start + self._window, count))
            copies = [memoryview(bytes(payload)) for payload in payloads[part]]
            self._enqueue(StoreJob(list(blocks[part]), tenant, copies))
        self._remote.stats.add(dropped=len(blocks) - count)
        return count

    def make_room(self, lease: HostLease) -> None:
        """Writes back what a store into host memory displaces; to be called before the lease's views are written."""
        for entry, view in lease.evicted:
            if entry.settled_until <= self._clock():
                self.write_back([entry.block], [view], entry.tenant)

    def close(self, timeout: float) -> None:
        """Stores what still waits, for `timeout` seconds at most, and ends the thread."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._loop.call_soon_threadsafe(self._jobs.put_nowait, None)
        self._thread.join(timeout)
        try:
            self._loop.call_soon_threadsafe(self._main.cancel)
        except RuntimeError:  # it has ended in time
            return
        self._thread.join(timeout)

    # --- on the I/O thread ---------------------------------------------------------------------------------------

    async def _look_up(self, lookup: Lookup) -> None:
        assert self._remote is not None
        try:
            lookup.remote = await self._remote.lookup(lookup.blocks[lookup.host :], lookup.tenant)
        finally:
            lookup.finish()
        if self._host is not None and lookup.remote:
            await self._prefetch(lookup, self._host, self._worth(lookup))

    async def _prefetch(self, lookup: Lookup, host: HostTier, stop: int) -> None:
        at = lookup.host
        while at < stop and not lookup.abandoned:
            window = lookup.blocks[at : min(at + self._pull_window, stop)]
            if not host.lookup(window[:1]):
                arriving = self._arriving.get(window[0].digest)
                if arriving is not None:
                    await arriving.wait()
                elif await self._pull(window, lookup.tenant, float("inf")) < len(window):
                    break
            got = host.lookup(window)
            if not got:  # no room
                break
            at += got

    async def _load(self, transfer: Transfer) -> None:
        tenant = transfer.tenant
        remote = (
            self._remote if self._remote and any(t == self._remote.name for t, _ in transfer.decision.fetch) else None
        )
        try:
            while not transfer.done and (at := transfer.loaded) < len(transfer.blocks):
                if self._from_host(transfer.blocks[at : at + self._window], transfer):
                    await asyncio.sleep(0)
                    continue
                if remote is None:
                    break
                window = transfer.blocks[at : at + self._pull_window]
                arriving = self._arriving.get(window[0].digest)
                if arriving is not None:
                    try:
                        async with asyncio.timeout(transfer.deadline - self._clock()):
                            await arriving.wait()
                    except TimeoutError:
                        break
                elif await self._pull(window, tenant, transfer.deadline, transfer) < len(window):
                    break
        finally:
            transfer.finish()
        loaded = transfer.blocks[: transfer.loaded]
        if self._host is not None:
            self._host.touch(loaded)
            self.write_through(loaded, tenant)
        if remote is not None and loaded:
            await remote.touch(loaded, tenant)

    def _from_host(self, window: Sequence[Block], transfer: Transfer) -> bool:
        """Fills buffers from host memory; whether it held the first block of the window."""
        if self._host is None:
            return False
        lease = self._host.prepare_load(window)
        started, copied = self._clock(), 0
        try:
            for view in lease.views:
                copied += transfer.deposit(view)
        finally:
            self._host.complete_load(lease)
        size, now = copied * self._host.block_bytes, self._clock()
        self._host.cost.observe(size, now - started, now)
        self._host.stats.add(loaded=copied, loaded_bytes=size)
        return bool(lease.blocks)

    async def _pull(
        self, window: Sequence[Block], tenant: bytes, deadline: float, transfer: Transfer | None = None
    ) -> int:
        """Fetches blocks from the remote tier into host memory and the transfer; returns how many came."""
        assert self._remote is not None
        arrival = asyncio.Event()
        mine = [block.digest for block in window if block.digest not in self._arriving]
        self._arriving.update(dict.fromkeys(mine, arrival))

        def take(blocks: list[Block], payloads: list[memoryview]) -> None:
            if transfer is not None:
                for payload in payloads:
                    transfer.deposit(payload)
            if self._host is not None:
                self._keep(self._host, blocks, payloads, tenant)

        try:
            count = await self._remote.load(window, tenant, take, deadline)
        finally:
            for digest in mine:
                del self._arriving[digest]
            arrival.set()
        if self._host is not None:
            self._host.settle(window[:count], self._clock() + self._remote.tier.ttl / 2)
        return count

    def _keep(self, host: HostTier, blocks: list[Block], payloads: list[memoryview], tenant: bytes) -> None:
        lease = host.prepare_store(blocks, tenant, uses=0)
        self.make_room(lease)
        payload_of = dict(zip((block.digest for block in blocks), payloads, strict=True))
        for block, view in zip(lease.blocks, lease.views, strict=True):
            copy(view, payload_of[block.digest])
        host.complete_store(lease)

    async def _store_jobs(self) -> None:
        while (job := await self._jobs.get()) is not None:
            try:
                if job.copies is not None:
                    await self._store(job.blocks, job.tenant, job.copies)
                else:
                    await self._store_from_host(job)
            except Exception:
                log.exception("a KV block could not be stored")
            finally:
                with self._lock:
                    self._queued.difference_update(block.digest for block in job.blocks)
                    self._waiting_bytes -= len(job.copies or ()) * self._block_bytes

    async def _store_from_host(self, job: StoreJob) -> None:
        assert self._host is not None
        left = job.blocks
        while left:
            lease = self._host.prepare_load(left)
            try:
                await self._store(lease.blocks, job.tenant, lease.views)
            finally:
                self._host.complete_load(lease)
            left = left[len(lease.blocks) or 1 :]  # one that was evicted meanwhile has been written back

    async def _store(self, blocks: Sequence[Block], tenant: bytes, payloads: Sequence[memoryview]) -> None:
        assert self._remote is not None
        if not blocks:
            return
        stored = await self._remote.store(blocks, tenant, payloads)
        if self._host is not None:
            self._host.settle(blocks, self._clock() + (self._remote.tier.ttl / 2 if stored else RETRY_AFTER))

    def _enqueue(self, job: StoreJob) -> None:
        with self._lock:
            if not self._closing:
                self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Starts a coroutine on the loop; False if the loop has ended or is about to."""

        def start() -> None:
            task = self._loop.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        with self._lock:
            if self._closing:
                return False
            self._loop.call_soon_threadsafe(start)
            return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a KV transfer failed", exc_info=error)

    async def _run(self) -> None:
        try:
            await self._store_jobs()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._remote is not None:
                await self._remote.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()
