"""An LMDB file that processes share, that begins anew when it cannot be trusted, and whose errors are StoreErrors.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from cache.stores.base import Kind, StoreError

log = logging.getLogger(__name__)

SUSPECT = "suspect"  # a file of this name in the folder has the next opening begin anew

_DAMAGED = (
    lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError, lmdb.PanicError,
    lmdb.BadTxnError, lmdb.BadDbiError, lmdb.IncompatibleError, lmdb.PageFullError, lmdb.CursorFullError,
    lmdb.ProblemError, struct.error, UnicodeDecodeError,
)  # fmt: skip


class Environment:
    """The file `home/entries/data.mdb` of at most `max_bytes`, with the databases `names` in it (handles in `db`).

    One thread may write, open and close while another reads. StoreError if something fails; while `usable` is false,
    `open` may help.
    """

    def __init__(self, home: Path, max_bytes: int, names: Sequence[str], format: bytes) -> None:
        self._home = home.expanduser()
        self._path = self._home / "entries"
        self._data = self._path / "data.mdb"
        self._max_bytes = max_bytes
        self._names = names
        self._format = format
        self._env: lmdb.Environment | None = None
        self._inode = 0
        self._closed_because = "it was not opened"
        self._damaged = self._replaced = False
        self._reading = threading.Lock()  # never close the file under a reader: it is mapped memory
        self.db: dict[str, Any] = {}

    @property
    def usable(self) -> bool:
        return self._env is not None and not self._damaged and not self._replaced

    def open(self) -> None:
        """Open or create the file. One that is damaged or of another format is set aside, one too large removed."""
        self.close()
        try:
            with self._errors():
                self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
                with _alone(self._home / "open.lock"):
                    self._open_trusted()
        except StoreError as error:
            self._closed_because = str(error)
            raise

    def close(self) -> None:
        with self._reading:
            if self._env is not None:
                self._env.close()
                self._env = None

    @contextlib.contextmanager
    def reader(self) -> Iterator[lmdb.Transaction]:
        with self._reading, self._errors(), self._opened().begin() as txn:
            yield txn

    @contextlib.contextmanager
    def writer(self) -> Iterator[lmdb.Transaction]:
        """All or nothing of what is done with the transaction."""
        with self._errors(), self._opened().begin(write=True) as txn:
            yield txn

    def check_place(self) -> None:
        """StoreError if another process put a new file in the place of ours."""
        with self._errors():
            if self._inode_now() != self._inode:
                self._replaced = True
                raise StoreError("unavailable", f"{self._path} was replaced")

    def _open_trusted(self) -> None:
        suspected = self._home / SUSPECT
        if suspected.exists():
            suspected.unlink()
            self._set_aside("a process that used it crashed")
        elif self._damaged and self._inode_now() == self._inode:
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

    def _open(self) -> None:
        self._path.mkdir(exist_ok=True, mode=0o700)
        env = lmdb.open(
            str(self._path), map_size=self._max_bytes, max_dbs=len(self._names) + 1, max_readers=1024, mode=0o600,
            metasync=False,  # a crash of the machine may undo the last commit, never tear one
            readahead=False,
        )  # fmt: skip
        try:
            env.reader_check()
            # A file cut short would kill the process on access (SIGBUS); with zero pages instead LMDB sees the damage.
            size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
            if self._data.stat().st_size < size:
                os.truncate(self._data, size)
            meta = env.open_db(b"meta")
            self.db = {name: env.open_db(name.encode()) for name in self._names}
            with env.begin(write=True) as txn:
                if txn.get(b"format", default=self._format, db=meta) != self._format:
                    raise lmdb.VersionMismatchError("it has another format")
                txn.put(b"format", self._format, db=meta)
        except BaseException:
            env.close()
            raise
        self._inode = self._inode_now()
        self._env = env

    def _set_aside(self, reason: object) -> None:
        if not self._path.exists():
            return
        aside = self._home / "entries.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        self._path.rename(aside)
        log.warning("the disk cache in %s (%s) was set aside as %s, beginning anew", self._path, reason, aside.name)

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

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """LMDB's and the system's errors as StoreError; those that need `open` are noted."""
        try:
            yield
        except (lmdb.Error, OSError, *_DAMAGED) as error:
            self._damaged = self._damaged or _is_damage(error)
            self._replaced = self._replaced or isinstance(error, lmdb.MapResizedError)  # by itself, made larger
            raise StoreError(kind_of(error), str(error)) from error


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; a killed one holds nothing."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_damage(error: Exception) -> bool:
    return isinstance(error, _DAMAGED) or (isinstance(error, lmdb.Error) and "data format" in str(error))


def kind_of(error: Exception) -> Kind:
    """What the breaker counts for an error of LMDB or the system."""
    if isinstance(error, (lmdb.MapFullError, lmdb.TxnFullError, lmdb.ReadersFullError)):
        return "full"
    if isinstance(error, lmdb.ReadonlyError):
        return "readonly"
    if isinstance(error, lmdb.BadValsizeError):
        return "data"
    text = str(error)  # LMDB keeps the system's words, not its number
    if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)):
        return "full"
    if any(os.strerror(code) in text for code in (errno.EROFS, errno.EACCES, errno.EPERM)):
        return "readonly"
    return "unavailable"
