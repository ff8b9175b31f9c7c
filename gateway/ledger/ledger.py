"""The ledger: what happened to every request and every upstream call, counted exactly, seen alike by all workers.

Each worker counts in memory and adds to one shared file once a second, off the event loop. A file that cannot be
written stops the ledger, never the serving: counts wait in memory, within bounds, and ``problem`` says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from gateway import config
from gateway.clock import Clock
from gateway.ledger.book import Book, Pages
from gateway.ledger.counters import COST_PICO
from gateway.ledger.query import FOREVER, Scope, sums
from gateway.ledger.rows import Call, Row
from gateway.ledger.store import Store
from gateway.ledger.tally import Tally
from policies.pricing import PriceTable
from policies.slo import Slo

T = TypeVar("T")

log = logging.getLogger(__name__)

FLUSH_EVERY = 1.0
"""Seconds between two writes."""
PRUNE_EVERY = 60.0
HOLD_OFF = 600.0
"""Seconds after the start, and after a jump of the wall clock, in which nothing is forgotten for its age: a clock that
is wrong for a moment must not cost a month of history."""
JUMP = 300.0
"""Seconds that the wall clock may gain or lose on the monotonic one without counting as a jump."""
IN_MEMORY = (86_400.0, 64 << 20)
"""Seconds and bytes that are kept where there is no file."""
_LOG_EVERY = 60.0


class LedgerClosed(Exception):
    """The ledger cannot be read now; the message says why."""


class Follower(Protocol):
    """Who wants to hear of every request that has ended: `Row`, or what a hit of the short path shares with others, its
    begin (unix seconds), latency (seconds) and id.
    """

    def row(self, row: Row) -> None: ...
    def hit(self, like: Row, at: float, latency: float, request_id: str) -> None: ...


class Reporter(Protocol):
    """Who is told of the rows that are kept for a look, at once, and of all that was counted, once it is written."""

    def kept(self, row: Row) -> None: ...
    def counted(self, pages: Pages) -> None: ...


class Ledger:
    """`open` before use, `close` at the end; `run` writes in the background. ``settings`` None: in memory only."""

    def __init__(self, settings: config.Ledger | None, clock: Clock) -> None:
        self._keep, self._max_bytes = (settings.keep, settings.max_bytes) if settings is not None else IN_MEMORY
        self._clock = clock
        self._book = Book()
        self.record: Callable[[Row], None] = self._book.record
        self.tally: Callable[[Row], Tally] = self._book.tally
        self.hit: Callable[[Tally, float, float, str], None] = self._book.hit
        self.spent: Callable[[Call], int | None] = self._book.spent
        self.worker = f"{os.getpid()}-{secrets.token_hex(2)}"
        self.problem = ""
        self._reporter: Reporter | None = None
        self._vitals: Callable[[], str] = lambda: "{}"
        self._store = Store(settings.path if settings is not None else None)
        self._writing = ThreadPoolExecutor(1, "ledger")
        self._reading = self._writing if settings is None else ThreadPoolExecutor(1, "ledger-reading")
        self._flushing = asyncio.Lock()
        self._flushes: set[asyncio.Future[None]] = set()
        self._anchor = (clock.time(), clock.monotonic())
        self._hold_until = clock.monotonic() + HOLD_OFF
        self._prune_at = clock.monotonic() + PRUNE_EVERY
        self._logged_at = -_LOG_EVERY

    @property
    def shared(self) -> bool:
        """Whether all workers see the same numbers."""
        return self._store.path is not None

    @property
    def dropped(self) -> int:
        """Requests whose counters were given up because nothing could be written."""
        return self._book.dropped

    def apply(self, prices: PriceTable, slos: Mapping[str, Slo]) -> None:
        """Takes prices and service levels (by the model's name sent upstream) into use."""
        self._book.apply(prices, slos)

    def follow(self, follower: Follower | None) -> None:
        """Tells ``follower`` of each request as well; None: nobody, and at no cost."""
        book = self._book
        if follower is None:
            self.record, self.hit = book.record, book.hit
            return

        def record(row: Row) -> None:
            book.record(row)
            follower.row(row)

        def hit(tally: Tally, at: float, latency: float, request_id: str) -> None:
            book.hit(tally, at, latency, request_id)
            follower.hit(tally.row, at, latency, request_id)

        self.record, self.hit = record, hit

    def report_to(self, reporter: Reporter | None) -> None:
        """Tells ``reporter`` from now on; None: nobody."""
        self._reporter = reporter
        self._book.kept = reporter.kept if reporter is not None else None

    def watch(self, vitals: Callable[[], str]) -> None:
        """``vitals`` gives what this worker says of itself, as JSON, with every write."""
        self._vitals = vitals

    async def run(self) -> None:
        """Writes once a second, and forgets what is too old, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_EVERY)
            await self.flush()
            await self.prune()

    async def flush(self) -> None:
        """Writes what has been counted so far. Never raises: what cannot be written now is kept for the next time.

        It goes on when its caller is cancelled, so that no page is lost between memory and file.
        """
        flush = asyncio.ensure_future(self._flush())
        self._flushes.add(flush)
        flush.add_done_callback(self._flushes.discard)
        await asyncio.shield(flush)

    async def _flush(self) -> None:
        async with self._flushing:
            pages = self._book.tear_off()
            try:
                vitals, now = self._vitals(), self._clock.time()
                await self._on(self._writing, lambda: self._store.add(pages, self.worker, now, vitals))
            except Exception as error:
                if isinstance(error, OSError) or type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError):
                    self._failed(error, pages)
                else:  # a count that can never be written must not stand in the way of all later ones
                    log.exception("the ledger gives up what it could not write")
                    self._book.give_up(pages)
            else:
                if self.problem:
                    log.warning("the ledger writes again")
                self.problem = ""
                if self._reporter is not None:
                    self._reporter.counted(pages)

    async def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """The answer to a question (`gateway.ledger.query`), with all that this worker has counted; raises
        `LedgerClosed`.
        """
        await self.flush()
        try:
            return await self._on(self._reading, lambda: self._store.read(question))
        except (sqlite3.Error, OSError) as error:
            raise LedgerClosed(f"The ledger cannot be read: {error}.") from None

    async def spent_since(self, moment: float) -> dict[str, int]:
        """What the upstream calls of each tenant have cost, in pico-dollars, as far as known; empty where it cannot be
        read.
        """
        try:
            found = await self.read(lambda connection: sums(connection, Scope(int(moment), FOREVER), ("tenant",)))
        except LedgerClosed:
            return {}
        return {str(line.key[0]): line.counts[COST_PICO] for line in found}

    async def close(self) -> None:
        """Writes what is left."""
        await self.flush()
        try:
            await self._on(self._writing, lambda: self._store.leave(self.worker))
        except (sqlite3.Error, OSError):
            pass  # it will be missed soon enough
        await self._on(self._writing, self._store.close)
        for executor in (self._writing, self._reading):
            executor.shutdown()

    async def prune(self) -> None:
        """Forgets what is too old or too much, once a minute at most."""
        wall, now = self._clock.time(), self._clock.monotonic()
        if abs((wall - self._anchor[0]) - (now - self._anchor[1])) > JUMP:
            self._anchor, self._hold_until = (wall, now), now + HOLD_OFF
            log.warning("the wall clock jumped; the ledger forgets nothing for its age in the next %d s", HOLD_OFF)
        if self.problem or now < self._prune_at:
            return
        self._prune_at = now + PRUNE_EVERY
        before = wall - self._keep if now >= self._hold_until else 0.0
        try:
            await self._on(self._writing, lambda: self._store.prune(before, self._max_bytes, wall))
        except (sqlite3.Error, OSError) as error:
            self._failed(error, Pages())

    def _failed(self, error: Exception, pages: Pages) -> None:
        self._book.put_back(pages)
        self.problem = str(error)
        now = self._clock.monotonic()
        if now - self._logged_at >= _LOG_EVERY:
            self._logged_at = now
            log.error("the ledger cannot be written to %s: %s; serving goes on", self._store.path, error)

    @staticmethod
    async def _on(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
