"""The disk store's file: an LMDB table of entries that expire, bounded in bytes, shared by processes. All calls block.

LMDB (H. Chu, "MDB: A Memory-Mapped Database and Backend for OpenLDAP", 2011): one writer at a time over all processes,
readers never wait, a killed process harms nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import xxhash

from cache.stores.base import GENERATIONS_KEPT, Kind, StoreError

log = logging.getLogger(__name__)

FORMAT = b"1"
FILL = 0.7  # of the file may be live; the rest is for pages written anew while readers still need the old
PAGES_PER_STEP = 64  # pages of the file for each entry that one transaction may write or remove

_HEAD = struct.Struct(">QQQ")  # expiry (unix ms), place in the order of arrival, checksum of key and value
_U64 = struct.Struct(">Q")
_DAMAGED = (
    lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError, lmdb.PanicError,
    lmdb.BadTxnError, lmdb.BadDbiError, lmdb.IncompatibleError, lmdb.PageFullError, lmdb.CursorFullError,
    lmdb.ProblemError, struct.error, UnicodeDecodeError,
)  # fmt: skip


class Write(NamedTuple):
    """`value` None deletes. `expires`: unix ms."""

    key: bytes
    value: bytes | None
    expires: int = 0


class Table:
    """One environment in `path/entries`. `max_bytes` bounds its file; the oldest entries make room.

    One thread may write, open and close while another reads. StoreError if something fails; when `usable` is false,
    `open` may help.
    """

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        if max_bytes < 1 << 20:
            raise ValueError(f"the disk cache needs at least 1 MiB, got {max_bytes} bytes")
        self._home = path.expanduser()
        self._path = self._home / "entries"
        self._data = self._path / "data.mdb"
        self._max_bytes = max_bytes
        self._step = max(1, max_bytes // mmap.PAGESIZE // PAGES_PER_STEP)
        self.max_value = max_bytes // 16
        self._clock = clock
        self._env: lmdb.Environment | None = None
        self._inode = 0
        self._closed_because = "it was not opened"
        self._damaged = self._replaced = False
        self._reading = threading.Lock()  # never close the file under a reader: it is mapped memory

    @property
    def usable(self) -> bool:
        return self._env is not None and not self._damaged and not self._replaced

    def open(self) -> None:
        """Open or create the file. One that is damaged or of another format is set aside, one too large removed."""
        self.close()
        try:
            self._open_alone()
        except StoreError as error:
            self._closed_because = str(error)
            raise

    def _open_alone(self) -> None:
        with self._errors():
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _alone(self._home / "open.lock"):
                if self._damaged and self._inode_now() == self._inode:
                    self._set_aside("damage met while in use")
                elif self._inode_now() and self._data.stat().st_size > self._max_bytes:
                    log.info("the disk cache in %s is larger than now allowed, beginning anew", self._path)
                    shutil.rmtree(self._path)
                self._damaged = self._replaced = False
                try:
                    self._open()
                except Exception as error:
                    if not _is_damage(error):
                        raise
                    self._set_aside(error)
                    self._open()

    def close(self) -> None:
        with self._reading:
            if self._env is not None:
                self._env.close()
                self._env = None

    def read(self, keys: Iterable[bytes]) -> list[bytes | StoreError | None]:
        """The values of `keys`, None where there is none or it expired, StoreError where it is damaged."""
        now = self._now()
        with self._reader() as txn:
            return [self._checked(txn, key, now) for key in keys]

    def write(self, writes: Sequence[Write]) -> None:
        """All of `writes`, in transactions that touch a small part of the file each; then room is made."""
        part: list[Write] = []
        size = 0
        for write in writes:
            length = len(write.value or b"")
            if len(part) >= self._step or size + length > self.max_value:
                self._transact(part)
                part, size = [], 0
            part.append(write)
            size += length
        self._transact(part)

    def _transact(self, writes: Sequence[Write]) -> None:
        more = True
        while more:
            with self._errors(), self._opened().begin(write=True) as txn:
                for write in writes:
                    self._remove(txn, write.key)
                    if write.value is not None:
                        self._put(txn, write.key, write.value, write.expires)
                more = self._sweep(txn) or self._evict(txn)
            writes = ()

    def bump(self, scope: bytes) -> int:
        self._check_place()
        with self._errors(), self._opened().begin(write=True) as txn:
            generation = max(self._latest(txn) + 1, self._now())
            txn.put(b"latest", _seal(b"latest", generation), db=self._meta)
            txn.put(scope, _seal(scope, generation), db=self._generations)
            for old, value in txn.cursor(db=self._generations):
                if _unseal(old, value) < self._now() - GENERATIONS_KEPT:
                    txn.delete(old, db=self._generations)
        return generation

    def latest(self) -> int:
        """The greatest generation given out, 0 if none was."""
        self._check_place()
        with self._reader() as txn:
            return self._latest(txn)

    def generations(self) -> dict[str, int]:
        oldest = self._now() - GENERATIONS_KEPT
        with self._reader() as txn:
            found = [(scope, _unseal(scope, value)) for scope, value in txn.cursor(db=self._generations)]
            return {bytes(scope).decode(): generation for scope, generation in found if generation >= oldest}

    def used(self) -> int:
        """Bytes of the pages that hold entries and their order."""
        with self._reader() as txn:
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
                    raise lmdb.VersionMismatchError("it has another format")
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

    @contextlib.contextmanager
    def _reader(self) -> Iterator[lmdb.Transaction]:
        with self._reading, self._errors(), self._opened().begin() as txn:
            yield txn

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """LMDB's and the system's errors as StoreError; those that need `open` are noted."""
        try:
            yield
        except (lmdb.Error, OSError, *_DAMAGED) as error:
            self._damaged = self._damaged or _is_damage(error)
            self._replaced = self._replaced or isinstance(error, lmdb.MapResizedError)  # by itself, made larger
            raise StoreError(_kind(error), str(error)) from error

    def _check_place(self) -> None:
        """Notice a file that another process put in the place of ours: purges must be told where all listen."""
        with self._errors():
            if self._inode_now() != self._inode:
                self._replaced = True
                raise StoreError("unavailable", f"{self._path} was replaced")

    def _inode_now(self) -> int:
        """Which file is in the place now, 0 if there is none."""
        try:
            return self._data.stat().st_ino
        except FileNotFoundError:
            return 0

    def _opened(self) -> lmdb.Environment:
        if self._env is None:
            raise StoreError("unavailable", f"the disk cache is not open: {self._closed_because}")
        return self._env

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _latest(self, txn: lmdb.Transaction) -> int:
        sealed = txn.get(b"latest", db=self._meta)
        return 0 if sealed is None else _unseal(b"latest", sealed)

    def _checked(self, txn: lmdb.Transaction, key: bytes, now: int) -> bytes | StoreError | None:
        record = txn.get(key, db=self._entries)
        if record is None:
            return None
        expires, _, checksum = _HEAD.unpack_from(record)
        if expires <= now:
            return None
        value = bytes(record[_HEAD.size :])
        return value if checksum == _checksum(key, value) else StoreError("data", "a value on disk is damaged")

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

    def _sweep(self, txn: lmdb.Transaction) -> bool:
        """Remove a step of expired entries; whether there may be more."""
        now = self._now()
        for _ in range(self._step):
            row = _first(txn, self._expiry)
            if row is None or _U64.unpack_from(row[0])[0] > now:
                return False
            txn.delete(row[0], db=self._expiry)
            self._remove(txn, row[0][_U64.size :])
        return True

    def _evict(self, txn: lmdb.Transaction) -> bool:
        """Remove a step of the oldest entries if there are too many bytes; whether there may be more."""
        for _ in range(self._step):
            row = _first(txn, self._age) if self._used(txn) > self._max_bytes * FILL else None
            if row is None:
                return False
            txn.delete(row[0], db=self._age)
            self._remove(txn, row[1])
        return True

    def _used(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(db) for db in (self._entries, self._age, self._expiry)]
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)


def _checksum(key: bytes, value: bytes) -> int:
    return xxhash.xxh3_64_intdigest(value, seed=xxhash.xxh3_64_intdigest(key))


def _seal(name: bytes, generation: int) -> bytes:
    value = _U64.pack(generation)
    return value + _U64.pack(_checksum(name, value))


def _unseal(name: Any, sealed: Any) -> int:
    """A generation that changed on its own could bring a purged answer back: all that it guards must go."""
    if sealed[_U64.size :] != _U64.pack(_checksum(name, sealed[: _U64.size])):
        raise lmdb.CorruptedError("a generation is damaged")
    return _U64.unpack_from(sealed)[0]


def _first(txn: lmdb.Transaction, db: Any) -> tuple[bytes, bytes] | None:
    with txn.cursor(db=db) as cursor:
        return (bytes(cursor.key()), bytes(cursor.value())) if cursor.first() else None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; a killed one holds nothing."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_damage(error: Exception) -> bool:
    return isinstance(error, _DAMAGED) or (isinstance(error, lmdb.Error) and "data format" in str(error))


def _kind(error: Exception) -> Kind:
    if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError, lmdb.ReadersFullError)):
        return "full"
    if isinstance(error, lmdb.ReadonlyError):
        return "readonly"
    if isinstance(error, lmdb.BadValsizeError):
        return "data"
    text = str(error)
    if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)):
        return "full"
    if any(os.strerror(code) in text for code in (errno.EROFS, errno.EACCES, errno.EPERM)):
        return "readonly"
    return "unavailable"
