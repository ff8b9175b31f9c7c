"""The disk store keeps to its bytes, expires, evicts, and never holds the event loop up."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from functools import partial
from pathlib import Path

import lmdb
import pytest

from cache.stores import disk, environment
from cache.stores.base import StoreError
from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.disk import DiskStore
from cache.stores.table import FILL, Table, Write
from tests.cache.stores.conftest import NOW, FakeClock
from tests.cache.stores.disk_bench import KEY, MIB, OTHER, data, opened

FOREVER = int(NOW * 2000)


@pytest.mark.parametrize(
    ("max_bytes", "largest"), [(MIB, 200), (MIB, 60_000), (5 * MIB, 3_000), (16 * MIB, 60_000), (16 * MIB, 900_000)]
)
def test_the_file_never_grows_past_its_bound_and_the_oldest_make_room(
    tmp_path: Path, max_bytes: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        environment.lmdb, "open", partial(lmdb.open, sync=False)
    )  # thousands of commits, none to survive
    chosen = random.Random(largest * max_bytes)
    store = Table(tmp_path, max_bytes)
    store.open()
    written: list[bytes] = []
    total = 0
    while total < 1.5 * max_bytes:
        batch = [
            Write(chosen.randbytes(16), chosen.randbytes(chosen.randint(1, largest)), FOREVER)
            for _ in range(chosen.randint(1, max(1, max_bytes // 4 // largest)))
        ]
        store.write(batch)
        written += [write.key for write in batch]
        total += sum(len(write.value or b"") for write in batch)
        assert store.used() <= max_bytes * FILL
    assert data(tmp_path).stat().st_size <= max_bytes
    found = [value is not None for value in store.read(written)]
    assert found == sorted(found), "what is left is what came last"
    assert store.used() > max_bytes * 0.6, "and no more than needed was removed"
    store.close()


def test_overwriting_and_deleting_leave_nothing_behind(tmp_path: Path) -> None:
    store = Table(tmp_path, 4 * MIB)
    store.open()
    for i in range(0, 3_000, 10):
        store.write([Write(b"k%d" % (i % 7), bytes(1_000 + i), FOREVER), Write(b"k%d" % (i % 5), None)])
    store.write([Write(b"k%d" % i, None) for i in range(7)])
    assert store.used() == 0
    store.close()


def test_expired_entries_are_swept_though_nobody_asks_for_them(tmp_path: Path, clock: FakeClock) -> None:
    store = Table(tmp_path, 4 * MIB, clock)
    store.open()
    expires = int(clock() * 1000) + 60_000
    store.write([Write(b"%04d" % i, b"v", expires + i) for i in range(600)])
    store.write([Write(KEY, b"lives", FOREVER)])
    clock.advance(100)
    store.write([])
    assert store.read([KEY]) == [b"lives"]
    store.write([Write(KEY, None)])
    assert store.used() == 0
    store.close()


async def test_an_idle_store_sweeps_by_itself(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SWEEP_EVERY", 0.02)
    async with opened(tmp_path, clock=clock) as store:
        await store.set(KEY, b"v", 60)
        await store.delete(OTHER)
        clock.advance(61)
        async with asyncio.timeout(2):
            while store._table.used():
                await asyncio.sleep(0.02)


async def test_a_value_out_of_proportion_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, MIB) as store:
        with pytest.raises(StoreError) as refused:
            await store.set(KEY, bytes(MIB // 10), 60)
        assert refused.value.kind == "full"
        assert await store.get(KEY) is None


def test_less_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 MiB"):
        DiskStore(tmp_path, MIB - 1)


async def test_a_file_larger_than_now_allowed_is_begun_anew(tmp_path: Path) -> None:
    async with opened(tmp_path, 32 * MIB) as store:
        for i in range(20):
            await store.set(b"%d" % i, random.randbytes(MIB), 60)
            await store.delete(OTHER)
    async with opened(tmp_path, 4 * MIB) as store:
        assert data(tmp_path).stat().st_size <= 4 * MIB
        await store.set(KEY, b"v", 60)
        await store.delete(OTHER)
        assert await store.get(KEY) == b"v"
    assert not (tmp_path / "entries.damaged").exists(), "there is no point in keeping it"


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    store = Table(tmp_path / "cache", MIB)
    store.open()
    modes = {
        p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "cache", *(tmp_path / "cache" / "entries").iterdir())
    }
    assert modes == {"cache": 0o700, "data.mdb": 0o600, "lock.mdb": 0o600}
    store.close()


async def test_writes_made_together_are_committed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = Table.write
    monkeypatch.setattr(Table, "write", lambda self, writes: (sizes.append(len(writes)), write(self, writes))[1])
    async with opened(tmp_path) as store:
        await asyncio.gather(*[store.set(b"%d" % i, b"v", 60) for i in range(1_000)])
        await store.delete(OTHER)
        assert sum(sizes) == 1_001
        assert len(sizes) <= 3


async def test_lookups_made_together_share_a_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    read = Table.read
    monkeypatch.setattr(Table, "read", lambda self, keys: (threads.append(threading.get_ident()), read(self, keys))[1])
    async with opened(tmp_path) as store:
        await asyncio.gather(*[store.get(b"%d" % i) for i in range(1_000)])
    assert len(threads) < 100
    assert threading.get_ident() not in threads


async def test_a_disk_that_hangs_holds_up_neither_the_loop_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    for name in ("read", "write"):
        real = getattr(Table, name)
        monkeypatch.setattr(Table, name, lambda self, items, real=real: (release.wait(10), real(self, items))[1])
    monkeypatch.setattr(disk, "PATIENCE", 0.1)
    async with opened(tmp_path, 16 * MIB) as store:
        guard = GuardedStore(store, Breaker(deadline=0.02, failures=3))
        clock = asyncio.get_running_loop().time
        started = clock()
        taken = [await guard.set(b"%d" % i, bytes(500_000), 60) for i in range(20)]
        assert taken == [True] * 8 + [False] * 12, "a quarter of the store may wait to be written"
        assert guard.breaker.state == "open"
        assert await store.get(b"0") == bytes(500_000), "what waits to be written is served from memory"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.get(b"never set"), 0.05)
        await store.close()
        assert clock() - started < 1
        release.set()


async def test_the_commit_of_an_old_value_does_not_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: queue.SimpleQueue[None] = queue.SimpleQueue()
    allowed = threading.Semaphore(0)
    write = Table.write

    def slowly(self: Table, writes: list[Write]) -> None:
        entered.put(None)
        allowed.acquire()
        write(self, writes)

    monkeypatch.setattr(Table, "write", slowly)
    async with opened(tmp_path) as store:
        await store.set(KEY, b"old", 60)
        await asyncio.to_thread(entered.get)
        await store.set(KEY, b"new", 60)
        allowed.release()
        await asyncio.to_thread(entered.get)  # the old value is on disk, the new one about to be
        await asyncio.sleep(0)
        assert await store.get(KEY) == b"new"
        allowed.release(10)
    async with opened(tmp_path) as store:
        assert await store.get(KEY) == b"new"


async def test_a_commit_that_fails_is_told_to_the_next_write_and_forgotten_by_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Table, writes: list[Write]) -> None:
        raise StoreError("full", "MDB_MAP_FULL")

    async with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Table, "write", full)
            await store.set(KEY, b"v", 60)
            with pytest.raises(StoreError):
                await store.delete(OTHER)
            assert await store.get(KEY) is None
            with pytest.raises(StoreError) as told:
                await store.set(KEY, b"w", 60)
            assert told.value.kind == "full"
        await store.delete(OTHER)
        await store.set(KEY, b"v", 60)
        assert await store.get(KEY) == b"v"
