"""A bad file or an unusable disk costs misses: never a crash, a wrong answer or a held-up request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from cache.stores.base import StoreError
from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.disk import suspect
from cache.stores.environment import kind_of
from cache.stores.table import Table
from tests.cache.stores.disk_bench import KEY, MIB, OTHER, child, data, finish, opened
from tests.waiting import SOON


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


async def test_a_file_that_crashed_a_process_is_begun_anew_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.set(KEY, b"v", 600)
    suspect(tmp_path)
    async with opened(tmp_path) as store:
        assert await store.get(KEY) is None
        await store.set(KEY, b"w", 600)
    async with opened(tmp_path) as store:
        assert await store.get(KEY) == b"w"
    suspect(tmp_path / "nowhere")


async def test_a_file_that_another_process_replaced_is_followed(tmp_path: Path) -> None:
    heard: list[str] = []
    async with opened(tmp_path) as store:
        watching = asyncio.create_task(store.watch(lambda scope, _: heard.append(scope)))
        (tmp_path / "entries").rename(tmp_path / "gone")
        bumper = child("t = Table(pathlib.Path(sys.argv[1]), 16 << 20); t.open(); t.bump(b'tag:x')", tmp_path)
        await asyncio.to_thread(finish, bumper)
        async with asyncio.timeout(SOON):
            while heard != ["tag:x"]:
                await asyncio.sleep(0.01)
        watching.cancel()
    async with opened(tmp_path) as store:
        (tmp_path / "gone").rename(tmp_path / "gone2")
        (tmp_path / "entries").rename(tmp_path / "gone")
        generation = await store.bump("tag:y")
        finish(child("t = Table(pathlib.Path(sys.argv[1]), 16 << 20); t.open(); assert t.latest() > 0", tmp_path))
        assert generation > 0


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
    assert kind_of(error) == kind
