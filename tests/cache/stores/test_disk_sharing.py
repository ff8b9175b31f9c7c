"""Several processes on one disk store: they share entries and purges, whatever becomes of one of them."""

from __future__ import annotations

import asyncio
import random
import subprocess
from pathlib import Path

import pytest

from cache.stores import disk
from cache.stores.breaker import Breaker, GuardedStore
from tests.cache.stores.disk_bench import KEY, MIB, OTHER, child, finish, opened
from tests.services import freeze
from tests.waiting import SOON

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
        async with asyncio.timeout(SOON):
            while ("model:m1", int(generation)) not in heard:
                await asyncio.sleep(0.01)
        assert await store.get(KEY) == b"v"
        watching.cancel()


KILLED = """
table = Table(pathlib.Path(sys.argv[1]), 4 << 20)
table.open()
for i in range(1_000_000):
    if i == 50:
        print("well under way", flush=True)
    key = b"%016d" % (i % 500)
    table.write([Write(key, key * (1 + i % 300), 1 << 60), Write(b"%016d" % (i * 7 % 500), None)])
"""


async def test_a_process_killed_while_writing_harms_nothing(tmp_path: Path) -> None:
    chosen = random.Random(1)
    for _ in range(5):
        writer = child(KILLED, tmp_path)
        assert writer.stdout is not None
        writer.stdout.readline()
        await asyncio.sleep(chosen.uniform(0, 0.1))
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
with table._env.writer() as txn:
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
        freeze(holder.pid)
        assert await guard.bump("all") is None
        assert await guard.get(KEY) == b"v"
        assert await guard.set(OTHER, b"w", 60) is True
        holder.kill()
        holder.communicate()
        assert await store.bump("all") > 0, "the lock of a dead process is free"


FROZEN_OPENING = """
import fcntl
lock = (pathlib.Path(sys.argv[1]) / "open.lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("holding", flush=True)
time.sleep(600)
"""


async def test_a_process_frozen_while_opening_does_not_stop_another_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "PATIENCE", 0.1)
    holder = child(FROZEN_OPENING, tmp_path)
    assert holder.stdout is not None
    await asyncio.to_thread(holder.stdout.readline)
    async with opened(tmp_path) as store:
        assert "did not answer" in caplog.text
        guard = GuardedStore(store, Breaker(deadline=0.05))
        assert await guard.get(KEY) is None
        holder.kill()
        holder.communicate()
        async with asyncio.timeout(5):
            while not await guard.delete(OTHER):
                await asyncio.sleep(0.01)
        await guard.set(KEY, b"v", 60)
        assert await guard.get(KEY) == b"v"
