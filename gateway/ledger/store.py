"""The ledger's file: one SQLite database in WAL mode that all workers add to. Everything here blocks, and runs on the
ledger's own threads.

A file that cannot be read is set aside and a new one begun; one that was moved or removed under us is begun anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gateway.ledger import schema
from gateway.ledger.book import Group, Pages, reports_of
from gateway.ledger.query import extent
from gateway.ledger.rows import SAVED
from gateway.ledger.schema import HOUR, SPANS

T = TypeVar("T")

log = logging.getLogger(__name__)

ROWS_KEPT = 200_000
HITS_KEPT = 50_000
"""Rows kept at most, and how many of them may be hits."""
WORKER_GONE = 15.0
"""Seconds after its last word that a worker counts as gone."""
_BUSY = 2.0  # seconds to wait for another worker's transaction
_WAL_BYTES = 16 << 20
_SAVED = ", ".join(f"'{outcome}'" for outcome in sorted(SAVED))


class Store:
    """``path`` None: in memory, for this process alone. Each of the two connections belongs to one thread at a time."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._groups: dict[Group, int] = {}
        self._reading = threading.Lock()
        self._suspect = False  # a question met damage; the thread that writes will see to it

    def add(self, pages: Pages, worker: str, now: float, vitals: str) -> None:
        """Adds pages, and what this worker says of itself, in one transaction; raises `sqlite3.Error`, OSError."""
        if self._suspect or (self._writer is not None and self._file != self._identity()):
            bad = self._file
            self.close()
            if self._suspect:
                self._replace(bad)
            self._suspect = False
        try:
            connection = self._writing()
            with _transaction(connection):
                self._add(connection, pages)
                connection.execute(schema.SET_WORKER, (worker, now, vitals))
        except sqlite3.DatabaseError as error:
            self._groups.clear()
            bad, code = self._file, _code(error)
            if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL):
                self.close()  # whatever is wrong, only opening the file anew can tell
            if _is_corrupt(error):
                self._replace(bad)
            raise

    def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """The answer to a question, all of it as of one moment; raises `sqlite3.Error`."""
        with self._reading:
            connection = self._writing() if self.path is None else self._reader
            if connection is None:
                if self._writer is None:
                    raise sqlite3.OperationalError("the ledger is not open")
                connection = sqlite3.connect(str(self.path), _BUSY, isolation_level=None, check_same_thread=False)
                connection.execute("PRAGMA query_only = ON")
                self._reader = connection
            connection.execute("BEGIN")
            try:
                return question(connection)
            except sqlite3.DatabaseError as error:
                self._suspect = _is_corrupt(error)
                raise
            finally:
                connection.execute("ROLLBACK")

    def prune(self, before: float, max_bytes: int, now: float) -> None:
        """Forgets what ended before ``before``, and the oldest beyond ``max_bytes`` (bytes)."""
        connection = self._writing()
        with _transaction(connection):
            _forget(connection, before)
            newest = connection.execute("SELECT max(id) FROM rows").fetchone()[0] or 0
            connection.execute("DELETE FROM rows WHERE id <= ?", (newest - ROWS_KEPT,))
            connection.execute(
                f"DELETE FROM rows WHERE id <= (SELECT id FROM rows WHERE outcome IN ({_SAVED}) "
                f"ORDER BY id DESC LIMIT 1 OFFSET ?) AND outcome IN ({_SAVED})",
                (HITS_KEPT,),
            )
            connection.execute("DELETE FROM workers WHERE seen < ? OR seen > ?", (now - HOUR, now + HOUR))
        while size(connection) > max_bytes and extent(connection) is not None:
            with _transaction(connection):
                _forget_oldest(connection)
        connection.execute("PRAGMA incremental_vacuum").fetchall()

    def leave(self, worker: str) -> None:
        """This worker says no more."""
        if self._writer is not None:
            with _transaction(self._writer):
                self._writer.execute("DELETE FROM workers WHERE worker = ?", (worker,))

    def close(self) -> None:
        with self._reading:
            self._close()

    def _close(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = self._file = None
        self._groups.clear()

    def _writing(self) -> sqlite3.Connection:
        if self._writer is None:
            self._writer = self._open() if self.path is not None else _connected(":memory:")
        return self._writer

    def _open(self) -> sqlite3.Connection:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(self.path.with_name(self.path.name + ".lock")):
            try:
                connection = self._opened()
            except sqlite3.DatabaseError as error:
                if not _is_corrupt(error):
                    raise
                self._set_aside()
                connection = self._opened()
            self._file = self._identity()
        return connection

    def _opened(self) -> sqlite3.Connection:
        assert self.path is not None
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # rows name tenants: for the operator's eyes
        return _connected(str(self.path))

    def _replace(self, bad: tuple[int, int] | None) -> None:
        """Sets a file aside that turned out corrupt, unless another worker has done so."""
        if self.path is not None:
            with _only_one(self.path.with_name(self.path.name + ".lock")):
                if self._identity() == bad:
                    self._set_aside()

    def _set_aside(self) -> None:
        assert self.path is not None
        aside = next(name for n in range(10_000) if not (name := Path(f"{self.path}.aside-{n}")).exists())
        for suffix in ("", "-wal", "-shm"):
            file = Path(f"{self.path}{suffix}")
            if file.exists():
                file.rename(f"{aside}{suffix}")
        log.error("the ledger %s cannot be read; it was set aside as %s, and a new one is begun", self.path, aside.name)

    def _identity(self) -> tuple[int, int] | None:
        """Which file is at the path now."""
        try:
            found = self.path.stat() if self.path is not None else None
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if found is not None else None

    def _add(self, connection: sqlite3.Connection, pages: Pages) -> None:
        for minute, groups in pages.minutes.items():
            for group, count in groups.items():
                number = self._number(connection, group)
                for span in SPANS:
                    connection.execute(schema.ADD_ROLLUP, (span, minute // span * span, number, *count))
                connection.execute(schema.ADD_TOTAL, (number, *count))
        for (minute, group, reason), times in pages.reasons.items():
            number = self._number(connection, group)
            for span in SPANS:
                connection.execute(schema.ADD_REASON, (span, minute // span * span, number, reason, times))
        connection.executemany(schema.ADD_ROW, reports_of(pages.rows))

    def _number(self, connection: sqlite3.Connection, group: Group) -> int:
        number = self._groups.get(group)
        if number is None:
            connection.execute(schema.ADD_GROUP, group)
            number = self._groups[group] = connection.execute(schema.FIND_GROUP, group).fetchone()[0]
        return number


def size(connection: sqlite3.Connection) -> int:
    """Bytes in use."""
    pages, free, page = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * page


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, schema.VERSION):
            raise sqlite3.DatabaseError(f"its form is version {version}")
        connection.executescript(schema.CREATE)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _code(error: sqlite3.DatabaseError) -> int | None:
    """SQLite's primary result code; None for what we raise ourselves (a file of another version)."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    return _code(error) in (None, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Of all workers, only one opens the file or sets it aside at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget(connection: sqlite3.Connection, before: float) -> None:
    for table in ("rollups", "reasons"):
        for span in SPANS:
            last = int(before // span) * span
            connection.execute(f"DELETE FROM {table} WHERE span = ? AND bucket < ?", (span, last))
    connection.execute("DELETE FROM rows WHERE ended < ?", (before,))


def _forget_oldest(connection: sqlite3.Connection) -> None:
    """A tenth: of the rows while there are many, then of the days."""
    first, last = connection.execute("SELECT min(id), max(id) FROM rows").fetchone()
    if first is not None and last - first > 1000:
        connection.execute("DELETE FROM rows WHERE id < ?", (first + (last - first) // 10,))
        return
    kept = extent(connection)
    if kept is not None:
        _forget(connection, kept[0] + max(HOUR, (kept[1] - kept[0]) // 10))
