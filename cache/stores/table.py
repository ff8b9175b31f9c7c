"""The disk store's tables: entries that expire, bounded in bytes, and the generations of purges. All calls block."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import xxhash

from cache.stores.base import GENERATIONS_KEPT, StoreError
from cache.stores.environment import Environment

FORMAT = b"1"
FILL = 0.7  # of the file may be live; the rest is for pages written anew while readers still need the old
PAGES_PER_STEP = 64  # pages of the file for each entry that one transaction may write or remove

_HEAD = struct.Struct(">QQQ")  # expiry (unix ms), place in the order of arrival, checksum of key and value
_U64 = struct.Struct(">Q")
_LATEST = b"\x00latest"  # the greatest generation; no scope begins with NUL


class Write(NamedTuple):
    """`value` None deletes. `expires`: unix ms."""

    key: bytes
    value: bytes | None
    expires: int = 0


class Table:
    """Tables in a file of at most `max_bytes` in the folder `path`; the oldest entries make room.

    One thread may write, open and close while another reads. StoreError if something fails; while `usable` is false,
    `open` may help.
    """

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        if max_bytes < 1 << 20:
            raise ValueError(f"the disk cache needs at least 1 MiB, got {max_bytes} bytes")
        # entries: key -> head, value; age: place -> key; expiry: expiry, key -> nothing; generations: scope -> sealed
        self._env = Environment(path, max_bytes, ("entries", "age", "expiry", "generations"), FORMAT)
        self._max_bytes = max_bytes
        self._step = max(1, max_bytes // mmap.PAGESIZE // PAGES_PER_STEP)
        self.max_value = max_bytes // 16
        self._clock = clock

    @property
    def usable(self) -> bool:
        return self._env.usable

    def open(self) -> None:
        self._env.open()

    def close(self) -> None:
        self._env.close()

    def read(self, keys: Iterable[bytes]) -> list[bytes | StoreError | None]:
        """The values of `keys`, None where there is none or it expired, StoreError where it is damaged."""
        now = self._now()
        with self._env.reader() as txn:
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

    def bump(self, scope: bytes) -> int:
        self._env.check_place()  # a purge must be told where all listen
        with self._env.writer() as txn:
            generation = max(self._latest(txn) + 1, self._now())
            for name in (_LATEST, scope):
                txn.put(name, _seal(name, generation), db=self._env.db["generations"])
            oldest = self._now() - GENERATIONS_KEPT
            rows = [(bytes(name), sealed) for name, sealed in txn.cursor(db=self._env.db["generations"])]
            for name, sealed in rows:
                if _unseal(name, sealed) < oldest:
                    txn.delete(name, db=self._env.db["generations"])
        return generation

    def latest(self) -> int:
        """The greatest generation given out, 0 if none was."""
        self._env.check_place()
        with self._env.reader() as txn:
            return self._latest(txn)

    def generations(self) -> dict[str, int]:
        oldest = self._now() - GENERATIONS_KEPT
        with self._env.reader() as txn:
            found = {bytes(name): _unseal(name, sealed) for name, sealed in txn.cursor(db=self._env.db["generations"])}
            return {name.decode(): value for name, value in found.items() if name != _LATEST and value >= oldest}

    def used(self) -> int:
        """Bytes of the pages that hold entries and their order."""
        with self._env.reader() as txn:
            return self._used(txn)

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _latest(self, txn: lmdb.Transaction) -> int:
        sealed = txn.get(_LATEST, db=self._env.db["generations"])
        return 0 if sealed is None else _unseal(_LATEST, sealed)

    def _checked(self, txn: lmdb.Transaction, key: bytes, now: int) -> bytes | StoreError | None:
        record = txn.get(key, db=self._env.db["entries"])
        if record is None:
            return None
        expires, _, checksum = _HEAD.unpack_from(record)
        if expires <= now:
            return None
        value = bytes(record[_HEAD.size :])
        return value if checksum == _checksum(key, value) else StoreError("data", "a value on disk is damaged")

    def _transact(self, writes: Sequence[Write]) -> None:
        more = True
        while more:
            with self._env.writer() as txn:
                for write in writes:
                    self._remove(txn, write.key)
                    if write.value is not None:
                        self._put(txn, write.key, write.value, write.expires)
                more = self._sweep(txn) or self._evict(txn)
            writes = ()

    def _put(self, txn: lmdb.Transaction, key: bytes, value: bytes, expires: int) -> None:
        db = self._env.db
        with txn.cursor(db=db["age"]) as ages:
            place = _U64.unpack(ages.key())[0] + 1 if ages.last() else 0
        head = _HEAD.pack(expires, place, _checksum(key, value))
        txn.put(key, head + value, db=db["entries"])
        txn.put(_U64.pack(place), key, db=db["age"], append=True)
        txn.put(_U64.pack(expires) + key, b"", db=db["expiry"])

    def _remove(self, txn: lmdb.Transaction, key: bytes) -> None:
        record = txn.pop(key, db=self._env.db["entries"])
        if record is not None:
            expires, place, _ = _HEAD.unpack_from(record)
            txn.delete(_U64.pack(place), db=self._env.db["age"])
            txn.delete(_U64.pack(expires) + key, db=self._env.db["expiry"])

    def _sweep(self, txn: lmdb.Transaction) -> bool:
        """Remove a step of expired entries; whether there may be more."""
        now = self._now()
        for _ in range(self._step):
            row = _first(txn, self._env.db["expiry"])
            if row is None or _U64.unpack_from(row[0])[0] > now:
                return False
            txn.delete(row[0], db=self._env.db["expiry"])
            self._remove(txn, row[0][_U64.size :])
        return True

    def _evict(self, txn: lmdb.Transaction) -> bool:
        """Remove a step of the oldest entries if there are too many bytes; whether there may be more."""
        for _ in range(self._step):
            row = _first(txn, self._env.db["age"]) if self._used(txn) > self._max_bytes * FILL else None
            if row is None:
                return False
            txn.delete(row[0], db=self._env.db["age"])
            self._remove(txn, row[1])
        return True

    def _used(self, txn: lmdb.Transaction) -> int:
        stats = [txn.stat(self._env.db[name]) for name in ("entries", "age", "expiry")]
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
