"""The store of one machine: an LMDB table behind two threads, so that the event loop never waits for a disk.

Writes are taken into memory, seen at once by this process, and committed together soon after (other processes see them
then). Lookups that are in line together share one transaction and one wake-up of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cache.stores.base import StoreError, check_key, check_scope, check_ttl
from cache.stores.environment import SUSPECT
from cache.stores.lane import Lane, Outcome, attempt
from cache.stores.table import Table, Write

log = logging.getLogger(__name__)
T = TypeVar("T")

LINGER = 0.02  # seconds a commit waits for more writes
SWEEP_EVERY = 30.0  # seconds between sweeps when nothing is written
POLL = 0.25  # seconds between looks for the bumps of other processes
MAX_PENDING = 64 << 20  # bytes accepted and not yet committed
PATIENCE = 5.0  # seconds that opening and closing wait for the disk


def suspect(path: str | Path) -> None:
    """Have the next opening begin anew: a process that used the file died of SIGSEGV, SIGBUS or SIGABRT.

    A file damaged inside a page can do that to whoever reads it; begun anew, it does so once.
    """
    with contextlib.suppress(OSError):
        (Path(path).expanduser() / SUSPECT).touch()


class _Lookup(NamedTuple):
    key: bytes
    future: Future[bytes | None]


class _Job(NamedTuple):
    run: Callable[[], Any]
    future: Future[Any] | None  # None: nobody waits for the result


class DiskStore:
    """See `base.SharedStore`. `path`: a folder; `max_bytes` (≥ 1 MiB) bounds the file in it.

    `set` is done when the value is in line to be written; that a commit failed is what the next `set` raises.
    `delete` and `bump` are done when they are on disk.
    """

    name = "disk"
    timeout = math.inf

    def __init__(self, path: str | Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._table = Table(Path(path), max_bytes, clock)
        self._clock = clock
        self._max_pending = min(MAX_PENDING, max_bytes // 4)
        self._pending: dict[bytes, Write] = {}
        self._pending_bytes = 0
        self._failure: StoreError | None = None  # of the last commit
        self._loop: AbstractEventLoop | None = None
        self._reads: Lane[_Lookup | _Job] | None = None
        self._writes: Lane[Write | _Job] | None = None

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reads = Lane("disk cache reads", self._work_reads)
        self._writes = Lane(
            "disk cache writes", self._work_writes,
            linger=LINGER, urgent=lambda item: isinstance(item, _Job), idle=SWEEP_EVERY,
        )  # fmt: skip
        opening = self._in(self._writes, self._ready)
        await asyncio.wait([opening], timeout=PATIENCE)
        problem = opening.exception() if opening.done() else f"the disk did not answer within {PATIENCE:g} s"
        if problem is not None:
            log.warning("the disk cache is not in use: %s", problem)

    async def close(self) -> None:
        lanes = [lane for lane in (self._reads, self._writes) if lane is not None]
        self._reads = self._writes = None
        end = time.monotonic() + PATIENCE
        for lane in lanes:
            lane.end()
        ended = [await asyncio.to_thread(lane.join, max(0.0, end - time.monotonic())) for lane in lanes]
        if all(ended):
            self._table.close()
        else:
            log.warning("the disk cache did not finish writing within %g s", PATIENCE)

    def get(self, key: bytes) -> Future[bytes | None]:
        reads, _, loop = self._opened()
        future = loop.create_future()
        write = self._pending.get(check_key(key))
        if write is None:
            reads.put(_Lookup(key, future))
        else:
            future.set_result(write.value if write.expires > self._clock() * 1000 else None)
        return future

    def set(self, key: bytes, value: bytes, ttl: float) -> Future[None]:
        expires = int(self._clock() * 1000) + check_ttl(ttl)
        _, writes, loop = self._opened()
        if len(value) > self._table.max_value:
            raise StoreError("full", f"{len(value)} bytes are more than a sixteenth of the disk cache")
        if self._pending_bytes + len(value) > self._max_pending:
            raise StoreError("busy", "the disk is too slow for what is to be written")
        self._put(writes, Write(check_key(key), value, expires))
        future = loop.create_future()
        if self._failure is None:
            future.set_result(None)
        else:
            future.set_exception(self._failure.copy())
        return future

    def delete(self, key: bytes) -> Future[None]:
        _, writes, _ = self._opened()
        self._put(writes, Write(check_key(key), None))
        return self._in(writes, self._committed)

    def bump(self, scope: str) -> Future[int]:
        raw = check_scope(scope)
        return self._in(self._opened()[1], lambda: self._bump(raw))

    def generations(self) -> Future[dict[str, int]]:
        return self._in(self._opened()[0], self._table.generations)

    async def watch(self, on_bump: Callable[[str, int], None]) -> None:
        told: dict[str, int] = {}
        latest = -1
        while True:
            try:
                now = await self._in(self._opened()[0], self._table.latest)
                if now != latest:
                    for scope, generation in (await self.generations()).items():
                        if generation > told.get(scope, 0):
                            told[scope] = generation
                            on_bump(scope, generation)
                    latest = now
            except StoreError as error:
                log.debug("cannot look for purges: %s", error)
            await asyncio.sleep(POLL)

    def _opened(self) -> tuple[Lane[_Lookup | _Job], Lane[Write | _Job], AbstractEventLoop]:
        if self._reads is None or self._writes is None or self._loop is None:
            raise StoreError("unavailable", "the disk cache is closed")
        return self._reads, self._writes, self._loop

    def _in(self, lane: Lane[Any], run: Callable[[], T]) -> Future[T]:
        future = asyncio.get_running_loop().create_future()
        lane.put(_Job(run, future))
        return future

    def _put(self, writes: Lane[Write | _Job], write: Write) -> None:
        self._pending[write.key] = write
        self._pending_bytes += len(write.value or b"")
        writes.put(write)

    def _written(self, writes: list[Write]) -> None:
        """After a commit or its failure: the file, not memory, now says what is stored."""
        for write in writes:
            self._pending_bytes -= len(write.value or b"")
            if self._pending.get(write.key) is write:
                del self._pending[write.key]

    # The rest runs in the two threads.

    def _work_reads(self, batch: list[_Lookup | _Job]) -> list[Outcome]:
        lookups = [item for item in batch if isinstance(item, _Lookup)]
        found = attempt(lambda: self._table.read([lookup.key for lookup in lookups])) if lookups else []
        if isinstance(found, StoreError):
            found = [found.copy() for _ in lookups]
        outcomes = _run_jobs(batch)
        outcomes += [(lookup.future, value) for lookup, value in zip(lookups, found, strict=True)]
        if self._writes is not None and not self._table.usable:
            self._writes.put(_Job(self._ready, None))  # only the writing thread may open the file
        return outcomes

    def _work_writes(self, batch: list[Write | _Job]) -> list[Outcome]:
        attempt(self._ready)  # if it fails, what follows fails and says so
        jobs = [item for item in batch if isinstance(item, _Job)]
        writes = [item for item in batch if isinstance(item, Write)]
        if writes:
            self._commit(writes)
        elif not jobs:
            attempt(lambda: self._table.write([]))  # sweeps
        return _run_jobs(jobs)

    def _bump(self, scope: bytes) -> int:
        try:
            return self._table.bump(scope)
        except StoreError:
            if self._table.usable:
                raise
            self._ready()
            return self._table.bump(scope)

    def _ready(self) -> None:
        if not self._table.usable:
            self._table.open()

    def _commit(self, writes: list[Write]) -> None:
        self._failure = attempt(lambda: self._table.write(writes))
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._written, writes)

    def _committed(self) -> None:
        if self._failure is not None:
            raise self._failure.copy()


def _run_jobs(batch: Sequence[Any]) -> list[Outcome]:
    done = [(item.future, attempt(item.run)) for item in batch if isinstance(item, _Job)]
    return [(future, result) for future, result in done if future is not None]
