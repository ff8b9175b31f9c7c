"""The disk store: bounded, shared by processes, never in the event loop's way, and not to be killed by a bad file."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import lmdb
import pytest

from cache.stores import disk, table
from cache.stores.base import StoreError
from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.disk import DiskStore
from cache.stores.table import FILL, Table, Write
from tests.cache.stores.conftest import NOW, FakeClock

MIB = 1 << 20
KEY, OTHER = b"k" * 16, b"o" * 16
FOREVER = int(NOW * 2000)


@asynccontextmanager
async def opened(
    path: Path, max_bytes: int = 16 * MIB, clock: Callable[[], float] = time.time
) -> AsyncIterator[DiskStore]:
    store = DiskStore(path, max_bytes, clock)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def data(path: Path) -> Path:
    return path / "entries" / "data.mdb"


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that runs `script` with the stores imported."""
    prelude = "import asyncio, os, sys, time, pathlib\nfrom cache.stores.disk import DiskStore\nfrom cache.stores.table import Table, Write\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


# Bounds


@pytest.mark.parametrize(
    ("max_bytes", "largest"), [(MIB, 200), (MIB, 60_000), (5 * MIB, 3_000), (16 * MIB, 60_000), (16 * MIB, 900_000)]
)
def test_the_file_never_grows_past_its_bound_and_the_oldest_make_room(
    tmp_path: Path, max_bytes: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table.lmdb, "open", partial(lmdb.open, sync=False))  # thousands of commits, none to survive
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
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["entries", "open.lock"]


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    store = Table(tmp_path / "cache", MIB)
    store.open()
    modes = {
        p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "cache", *(tmp_path / "cache" / "entries").iterdir())
    }
    assert modes == {"cache": 0o700, "data.mdb": 0o600, "lock.mdb": 0o600}
    store.close()


# Off the event loop


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
    monkeypatch.setattr(disk, "CLOSING", 0.1)
    async with opened(tmp_path, 16 * MIB) as store:
        guard = GuardedStore(store, Breaker(deadline=0.02, failures=3))
        started = time.perf_counter()
        taken = [await guard.set(b"%d" % i, bytes(500_000), 60) for i in range(20)]
        assert taken == [True] * 8 + [False] * 12, "a quarter of the store may wait to be written"
        assert guard.breaker.state == "open"
        assert await store.get(b"0") == bytes(500_000), "what waits to be written is served from memory"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.get(b"never set"), 0.05)
        await store.close()
        assert time.perf_counter() - started < 1
        release.set()


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


# Several processes

SHARE = """
async def main():
    store = DiskStore(sys.argv[1], 16 << 20)
    await store.open()
    number = int(sys.argv[2])
    print("ready", flush=True)
    sys.stdin.readline()
    generations = []
    for i in range(200):
        await store.set(b"%d-%d" % (number, i), b"%d-%d" % (number, i) * 50, 600)
        generations.append(await store.bump("tag:shared"))
        for other in range(3):
            value = await store.get(b"%d-%d" % (other, i))
            assert value in (None, b"%d-%d" % (other, i) * 50)
    await store.close()
    print(*generations)
asyncio.run(main())
"""


async def test_processes_share_entries_and_never_give_out_a_generation_twice(tmp_path: Path) -> None:
    children = [child(SHARE, tmp_path, number) for number in range(3)]
    for process in children:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outputs = [await asyncio.to_thread(finish, process) for process in _go(children)]
    given = [list(map(int, output.split())) for output in outputs]
    assert all(generations == sorted(generations) for generations in given)
    assert len(set().union(*given)) == 600
    async with opened(tmp_path) as store:
        for number in range(3):
            for i in (0, 199):
                assert await store.get(b"%d-%d" % (number, i)) == b"%d-%d" % (number, i) * 50
        assert await store.generations() == {"tag:shared": max(map(max, given))}


def _go(children: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for process in children:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return children


async def test_a_bump_is_heard_in_another_process_within_a_second(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    async with opened(tmp_path) as store:
        watching = asyncio.create_task(store.watch(lambda scope, generation: heard.append((scope, generation))))
        bumper = child(
            """
async def main():
    store = DiskStore(sys.argv[1], 16 << 20)
    await store.open()
    await store.set(b"k" * 16, b"v", 60)
    print(await store.bump("model:m1"), time.time(), flush=True)
    await store.close()
asyncio.run(main())
""",
            tmp_path,
        )
        generation, _ = (await asyncio.to_thread(finish, bumper)).split()
        async with asyncio.timeout(1):
            while ("model:m1", int(generation)) not in heard:
                await asyncio.sleep(0.01)
        assert await store.get(KEY) == b"v"
        watching.cancel()


KILLED = """
table = Table(pathlib.Path(sys.argv[1]), 4 << 20)
table.open()
print("ready", flush=True)
for i in range(1_000_000):
    key = b"%016d" % (i % 500)
    table.write([Write(key, key * (1 + i % 300), 1 << 60), Write(b"%016d" % (i * 7 % 500), None)])
"""


async def test_a_process_killed_while_writing_harms_nothing(tmp_path: Path) -> None:
    chosen = random.Random(1)
    for _ in range(5):
        writer = child(KILLED, tmp_path)
        assert writer.stdout is not None
        writer.stdout.readline()
        await asyncio.sleep(chosen.uniform(0.05, 0.2))
        writer.kill()
        writer.communicate()
        async with opened(tmp_path, 4 * MIB) as store:
            keys = [b"%016d" % i for i in range(500)]
            found = [(key, value) for key, value in zip(keys, await asyncio.gather(*map(store.get, keys)), strict=True)]
            assert all(value is None or value == key * (len(value) // 16) for key, value in found)
            assert any(value for _, value in found)
            await store.set(OTHER, b"v", 60)
            await store.delete(KEY)
            assert await store.get(OTHER) == b"v"
        assert not (tmp_path / "entries.damaged").exists()


HOLDING = """
table = Table(pathlib.Path(sys.argv[1]), 16 << 20)
table.open()
with table._env.begin(write=True) as txn:
    print("holding", flush=True)
    time.sleep(600)
"""


async def test_a_process_frozen_while_writing_stops_writes_and_no_hit(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        guard = GuardedStore(store, Breaker(deadline=0.05, slow_deadline=0.1))
        await store.set(KEY, b"v", 60)
        await store.delete(OTHER)
        holder = child(HOLDING, tmp_path)
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        os.kill(holder.pid, signal.SIGSTOP)
        assert await guard.bump("all") is None
        assert await guard.get(KEY) == b"v"
        assert await guard.set(OTHER, b"w", 60) is True
        holder.kill()
        holder.communicate()
        assert await store.bump("all") > 0, "the lock of a dead process is free"


# Bad files


def garbage(file: Path) -> None:
    file.write_bytes(b"this is not a database " * 1_000)


def short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5_000])


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeroed(file: Path) -> None:
    with file.open("r+b") as target:
        target.seek(8192)
        target.write(bytes(file.stat().st_size - 8192))


def other_build(file: Path) -> None:
    with file.open("r+b") as target:
        for meta in (16, 4096 + 16):
            target.seek(meta + 4)
            target.write(b"\x41")


def other_format(file: Path) -> None:
    with lmdb.open(str(file.parent), max_dbs=5) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"99", db=env.open_db(b"meta", txn=txn))


@pytest.mark.parametrize("damage", [garbage, short, half, zeroed, other_build, other_format])
async def test_a_damaged_file_is_set_aside_and_a_new_one_begun(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keys = [b"%016d" % i for i in range(300)]
    async with opened(tmp_path) as store:
        for key in keys:
            await store.set(key, key * 10, 600)
    for _ in range(2):  # the second time, there is one set aside already
        damage(data(tmp_path))
        async with opened(tmp_path) as store:
            guard = GuardedStore(store, Breaker(deadline=1))
            for key in keys:
                assert await guard.get(key) in (None, key * 10)
            async with asyncio.timeout(5):
                while not (await guard.set(KEY, b"v", 600) and await guard.delete(OTHER)):
                    await asyncio.sleep(0.01)
            assert await guard.get(KEY) == b"v"
            assert await guard.bump("all")
        assert (tmp_path / "entries.damaged").exists()
    assert sum("set aside" in record.message for record in caplog.records) == 2


async def test_a_flipped_bit_in_a_value_is_an_error_and_never_an_answer(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.set(KEY, b"A" * 5_000, 600)
        await store.set(OTHER, b"B" * 5_000, 600)
    content = bytearray(data(tmp_path).read_bytes())
    content[content.index(b"AAAA") + 1_000] ^= 1
    data(tmp_path).write_bytes(content)
    async with opened(tmp_path) as store:
        with pytest.raises(StoreError) as refused:
            await store.get(KEY)
        assert refused.value.kind == "data"
        assert await store.get(OTHER) == b"B" * 5_000
        await store.set(KEY, b"C", 600)
        await store.delete(OTHER)
        assert await store.get(KEY) == b"C"


async def test_damage_met_in_use_is_set_aside_without_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for i in range(300):
            await store.set(b"%016d" % i, b"v" * 100, 600)
        await store.delete(OTHER)
        zeroed(data(tmp_path))
        with pytest.raises(StoreError):
            await store.get(b"%016d" % 7)
        async with asyncio.timeout(5):
            while not (tmp_path / "entries.damaged").exists():
                await asyncio.sleep(0.01)
        await store.set(KEY, b"v", 600)
        await store.delete(OTHER)
        assert await store.get(KEY) == b"v"


async def test_a_file_that_another_process_replaced_is_followed(tmp_path: Path) -> None:
    heard: list[str] = []
    async with opened(tmp_path) as store:
        watching = asyncio.create_task(store.watch(lambda scope, _: heard.append(scope)))
        (tmp_path / "entries").rename(tmp_path / "gone")
        bumper = child("t = Table(pathlib.Path(sys.argv[1]), 16 << 20); t.open(); t.bump(b'tag:x')", tmp_path)
        await asyncio.to_thread(finish, bumper)
        async with asyncio.timeout(1):
            while heard != ["tag:x"]:
                await asyncio.sleep(0.01)
        watching.cancel()
    async with opened(tmp_path) as store:
        (tmp_path / "gone").rename(tmp_path / "gone2")
        (tmp_path / "entries").rename(tmp_path / "gone")
        generation = await store.bump("tag:y")
        finish(child("t = Table(pathlib.Path(sys.argv[1]), 16 << 20); t.open(); assert t.latest() > 0", tmp_path))
        assert generation > 0


# A disk that cannot be used


async def test_a_folder_that_cannot_be_made_costs_misses_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    async with opened(tmp_path / "file" / "cache") as store:
        assert "disk cache is not in use" in caplog.text
        guard = GuardedStore(store, Breaker(failures=10**6))
        await guard.set(KEY, b"v", 60)
        assert await guard.delete(OTHER) is False
        assert await guard.get(KEY) is None
        assert await guard.set(KEY, b"v", 60) is False
        assert await guard.bump("all") is None
        (tmp_path / "file").unlink()
        async with asyncio.timeout(5):
            while not (await guard.set(KEY, b"v", 60) and await guard.delete(OTHER)):
                await asyncio.sleep(0.01)
        assert await guard.get(KEY) == b"v"


READ_ONLY = """
import concurrent.futures.thread
async def main():
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write everywhere
    store = DiskStore(sys.argv[1], 16 << 20)
    await store.open()
    for call in (lambda: store.get(b"k"), lambda: store.delete(b"k"), lambda: store.bump("all")):
        try:
            print("done", await call())
        except Exception as error:
            print(type(error).__name__, error)
    await store.close()
asyncio.run(main())
"""


def test_a_folder_that_may_not_be_written_is_said_and_harms_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o555)
    lines = finish(child(READ_ONLY, folder)).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("StoreError") and "Permission denied" in line for line in lines)


NO_ROOM = """
import resource, signal
async def main():
    store = DiskStore(sys.argv[1], 16 << 20)
    await store.open()
    await store.set(b"k" * 16, b"v", 600)
    await store.delete(b"other")
    limit = os.stat(sys.argv[1] + "/entries/data.mdb").st_size + 100_000
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    kinds = []
    for i in range(30):
        try:
            await store.set(b"%016d" % i, bytes(50_000), 600)
            await store.delete(b"other")
        except Exception as error:
            kinds.append(getattr(error, "kind", repr(error)))
    assert kinds and set(kinds) == {"full"}, kinds
    assert await store.get(b"k" * 16) == b"v"
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    await store.close()
asyncio.run(main())
"""


def test_a_disk_without_room_refuses_writes_and_serves_hits(tmp_path: Path) -> None:
    finish(child(NO_ROOM, tmp_path))
    store = Table(tmp_path, 16 * MIB)
    store.open()
    assert store.read([KEY]) == [b"v"]
    store.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (lmdb.MapFullError("MDB_MAP_FULL"), "full"),
        (lmdb.Error("mdb_env_open: No space left on device"), "full"),
        (lmdb.Error("mdb_txn_commit: Input/output error"), "full"),
        (lmdb.ReadonlyError("Permission denied"), "readonly"),
        (OSError(30, "Read-only file system"), "readonly"),
        (PermissionError(13, "Permission denied"), "readonly"),
        (lmdb.BadValsizeError("MDB_BAD_VALSIZE"), "data"),
        (OSError(24, "Too many open files"), "unavailable"),
    ],
)
def test_errors_fall_into_few_classes(error: Exception, kind: str) -> None:
    assert table._kind(error) == kind
