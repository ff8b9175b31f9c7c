"""The disk store's file: an LMDB table of entries that expire, bounded in bytes, shared by processes. All calls block.

LMDB (H. Chu, "MDB: A Memory-Mapped Database and Backend for OpenLDAP", 2011): one writer at a time over all processes,
readers never wait, a killed process harms nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import lmdb
import xxhash

from cache.stores.base import GENERATIONS_KEPT, Kind, StoreError

log = logging.getLogger(__name__)

FORMAT = b"1"
FILL = 0.75  # of the file may be live; the rest is what copy-on-write and readers of old pages need
SWEEP = 256  # expired entries removed with each write

_HEAD = struct.Struct(">QQQ")  # expiry (unix ms), place in the order of arrival, checksum of key and value
_U64 = struct.Struct(">Q")
_CORRUPT = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError, lmdb.PanicError)


class Damaged(StoreError):
    """The file cannot be trusted any more; `Table.reopen` begins anew."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


class Write(NamedTuple):
    """`value` None deletes. `expires`: unix ms."""

    key: bytes
    value: bytes | None
    expires: int = 0


class Table:
    """One environment in `path/entries`. `max_bytes` bounds its file; the oldest entries make room.

    One thread may write, open and close while another reads.
    """

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        if max_bytes < 1 << 20:
            raise ValueError(f"the disk cache needs at least 1 MiB, got {max_bytes} bytes")
        self._home = path.expanduser()
        self._path = self._home / "entries"
        self._data = self._path / "data.mdb"
        self._inode = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._env: lmdb.Environment | None = None
        self._reading = threading.Lock()  # never close the file under a reader: it is mapped memory

    @property
    def is_open(self) -> bool:
        return self._env is not None

    def open(self) -> None:
        """Open or create the file; one that is damaged or of another format is set aside. StoreError if impossible."""
        with _errors():
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _alone(self._home / "open.lock"):
                try:
                    self._open()
                except _CORRUPT as error:
                    self._set_aside(error)
                    self._open()

    def close(self) -> None:
        with self._reading:
            if self._env is not None:
                self._env.close()
                self._env = None

    def reopen(self) -> None:
        """After damage was met: begin anew, unless another process already has."""
        self.close()
        with _errors(), _alone(self._home / "open.lock"):
            if self._data.exists() and self._data.stat().st_ino == self._inode:
                self._set_aside("damage met while in use")
        self.open()

    def read(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The values of `keys`, None where there is none, it expired or is damaged."""
        now = self._now()
        with self._reading, _errors(), self._opened().begin() as txn:
            return [_checked(key, txn.get(key, db=self._entries), now) for key in keys]

    def write(self, writes: Iterable[Write]) -> None:
        """All of `writes` in one transaction, then room is made."""
        with _errors(), self._opened().begin(write=True) as txn:
            for write in writes:
                self._remove(txn, write.key)
                if write.value is not None:
                    self._put(txn, write.key, write.value, write.expires)
            self._sweep(txn)
            self._evict(txn)

    def sweep(self) -> None:
        """Remove some expired entries."""
        self.write(())

    def bump(self, scope: bytes) -> int:
        with _errors(), self._opened().begin(write=True) as txn:
            generation = max(self._latest(txn) + 1, self._now())
            txn.put(b"latest", _U64.pack(generation), db=self._meta)
            txn.put(scope, _U64.pack(generation), db=self._generations)
            for old, value in txn.cursor(db=self._generations):
                if _U64.unpack(value)[0] < self._now() - GENERATIONS_KEPT:
                    txn.delete(old, db=self._generations)
        return generation

    def latest(self) -> int:
        """The greatest generation given out, 0 if none was."""
        with self._reading, _errors(), self._opened().begin() as txn:
            return self._latest(txn)

    def generations(self) -> dict[str, int]:
        oldest = self._now() - GENERATIONS_KEPT
        with self._reading, _errors(), self._opened().begin() as txn:
            found = ((scope, _U64.unpack(value)[0]) for scope, value in txn.cursor(db=self._generations))
            return {scope.decode(): generation for scope, generation in found if generation >= oldest}

    def used(self) -> int:
        """Bytes of the pages that hold entries and their order."""
        with self._reading, _errors(), self._opened().begin() as txn:
            return self._used(txn)

    def _open(self) -> None:
        self._path.mkdir(exist_ok=True, mode=0o700)
        env = lmdb.open(
            str(self._path), map_size=self._max_bytes, max_dbs=5, max_readers=1024, mode=0o600,
            metasync=False,  # a crash of the machine may undo the last commit, never tear one
            readahead=False,
        )  # fmt: skip
        try:
            env.reader_check()
            # A file cut short would kill the process on access (SIGBUS); with zero pages instead LMDB sees the damage.
            size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
            if self._data.stat().st_size < size:
                os.truncate(self._data, size)
            self._meta = env.open_db(b"meta")
            self._entries = env.open_db(b"entries")  # key -> head, value
            self._age = env.open_db(b"age")  # place in the order of arrival -> key
            self._expiry = env.open_db(b"expiry")  # expiry, key -> nothing
            self._generations = env.open_db(b"generations")  # scope -> generation
            with env.begin(write=True) as txn:
                if txn.get(b"format", default=FORMAT, db=self._meta) != FORMAT:
                    raise lmdb.VersionMismatchError("written by another version")
                txn.put(b"format", FORMAT, db=self._meta)
        except BaseException:
            env.close()
            raise
        self._inode = self._data.stat().st_ino
        self._env = env

    def _set_aside(self, reason: object) -> None:
        aside = self._home / "entries.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        self._path.rename(aside)
        log.warning(
            "the disk cache in %s cannot be used (%s); set aside as %s, beginning anew", self._path, reason, aside.name
        )

    def _opened(self) -> lmdb.Environment:
        if self._env is None:
            raise StoreError("unavailable", f"{self._path} is not open")
        return self._env

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _latest(self, txn: lmdb.Transaction) -> int:
        return _U64.unpack(txn.get(b"latest", default=bytes(8), db=self._meta))[0]

    def _put(self, txn: lmdb.Transaction, key: bytes, value: bytes, expires: int) -> None:
        with txn.cursor(db=self._age) as ages:
            place = _U64.unpack(ages.key())[0] + 1 if ages.last() else 0
        head = _HEAD.pack(expires, place, _checksum(key, value))
        txn.put(key, head + value, db=self._entries)
        txn.put(_U64.pack(place), key, db=self._age, append=True)
        txn.put(_U64.pack(expires) + key, b"", db=self._expiry)

    def _remove(self, txn: lmdb.Transaction, key: bytes) -> None:
        record = txn.pop(key, db=self._entries)
        if record is not None:
            expires, place, _ = _HEAD.unpack_from(record)
            txn.delete(_U64.pack(place), db=self._age)
            txn.delete(_U64.pack(expires) + key, db=self._expiry)

    def _sweep(self, txn: lmdb.Transaction) -> None:
        now = self._now()
        for _ in range(SWEEP):
            with txn.cursor(db=self._expiry) as cursor:
                if not cursor.first() or _U64.unpack_from(cursor.key())[0] > now:
                    return
                key = bytes(cursor.key()[_U64.size :])
            self._remove(txn, key)

    def _evict(self, txn: lmdb.Transaction) -> None:
        while self._used(txn) > self._max_bytes * FILL:
            with txn.cursor(db=self._age) as cursor:
                if not cursor.first():
                    return
                key = bytes(cursor.value())
            self._remove(txn, key)

    def _used(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(db) for db in (self._entries, self._age, self._expiry)]
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)


def _checksum(key: bytes, value: bytes) -> int:
    return xxhash.xxh3_64_intdigest(value, seed=xxhash.xxh3_64_intdigest(key))


def _checked(key: bytes, record: bytes | None, now: int) -> bytes | None:
    if record is None or len(record) < _HEAD.size:
        return None
    expires, _, checksum = _HEAD.unpack_from(record)
    if expires <= now:
        return None
    value = record[_HEAD.size :]
    return value if checksum == _checksum(key, value) else None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; a killed one holds nothing."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """LMDB's and the system's errors as StoreError."""
    try:
        yield
    except _CORRUPT as error:
        raise Damaged(str(error)) from error
    except (lmdb.Error, OSError) as error:
        raise StoreError(_kind(error), str(error)) from error


def _kind(error: lmdb.Error | OSError) -> Kind:
    if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError, lmdb.ReadersFullError)):
        return "full"
    if isinstance(error, lmdb.ReadonlyError):
        return "readonly"
    if isinstance(error, lmdb.BadValsizeError):
        return "data"
    text = str(error)
    if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)):
        return "full"
    if any(os.strerror(code) in text for code in (errno.EROFS, errno.EACCES, errno.EPERM)):
        return "readonly"
    return "unavailable"
