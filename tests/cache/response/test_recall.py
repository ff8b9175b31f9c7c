"""Recall and keep over real tiers: what is kept is found, with the life it has left, and nothing else is."""

from dataclasses import replace
from pathlib import Path

import pytest

from cache.response import keep
from cache.response.canonical import Identity
from cache.response.entry import Entry, encode
from cache.response.keep import Keeper
from cache.response.recall import Recall
from cache.response.tags import Generations
from cache.stores.breaker import GuardedStore
from cache.stores.disk import DiskStore
from cache.stores.memory import MemoryStore
from tests.waiting import until

ONE = Identity(b"k" * 16, b"f" * 32)
FORGED = Identity(b"k" * 16, b"g" * 32)


class Hands:
    """A clock that stands still until moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Tiers:
    def __init__(self, path: Path, clock: Hands) -> None:
        self.memory: MemoryStore[Entry] = MemoryStore(1 << 20, clock=clock)
        self.shared = GuardedStore(DiskStore(path, 1 << 24, clock))
        self.generations = Generations()
        self.recall = Recall(self.memory, self.shared, self.generations)
        self.keeper = Keeper(self.memory, self.shared)


def entry(generations: Generations, **changes: float) -> Entry:
    made = Entry(
        fingerprint=ONE.fingerprint,
        born=1000.0,
        expires=1010.0,
        kept_until=1020.0,
        dialect="chat",
        model="m",
        upstream="u",
        generations=generations.stamp(["model:m"]),
        message=b"{}",
    )
    return replace(made, **changes)


@pytest.fixture
async def tiers(tmp_path: Path):
    clock = Hands()
    made = Tiers(tmp_path, clock)
    await made.shared.open()
    yield made, clock
    await made.shared.close()


async def test_what_is_kept_is_found_in_memory_then_on_disk_and_moves_up(tiers: tuple[Tiers, Hands]) -> None:
    made, clock = tiers
    kept = entry(made.generations)
    made.keeper.keep(ONE.key, kept, clock.now)
    await made.keeper.drain()
    found = await made.recall.find(ONE, clock.now)
    assert found == (kept, "memory")
    made.memory.clear()
    found = await made.recall.find(ONE, clock.now)
    assert found == (kept, "disk")
    found = await made.recall.find(ONE, clock.now)
    assert found == (kept, "memory")


async def test_moving_up_does_not_lengthen_a_life(tiers: tuple[Tiers, Hands]) -> None:
    made, clock = tiers
    made.keeper.keep(ONE.key, entry(made.generations), clock.now)
    await made.keeper.drain()
    made.memory.clear()
    clock.now = 1019
    assert await made.recall.find(ONE, clock.now) is not None
    clock.now = 1021
    assert await made.recall.find(ONE, clock.now) is None


async def test_the_same_key_with_another_fingerprint_is_a_miss_on_every_tier(tiers: tuple[Tiers, Hands]) -> None:
    made, clock = tiers
    made.keeper.keep(ONE.key, entry(made.generations), clock.now)
    await made.keeper.drain()
    assert await made.recall.find(FORGED, clock.now) is None
    made.memory.clear()
    assert await made.recall.find(FORGED, clock.now) is None
    assert made.recall.bad_entries == {"other request": 3}, "once in memory, twice on disk"


async def test_a_purge_reaches_what_lies_on_disk(tiers: tuple[Tiers, Hands]) -> None:
    made, clock = tiers
    made.keeper.keep(ONE.key, entry(made.generations), clock.now)
    await made.keeper.drain()
    made.generations.learn("model:m", 1)
    assert await made.recall.find(ONE, clock.now) is None
    made.memory.clear()
    assert await made.recall.find(ONE, clock.now) is None


async def test_damaged_bytes_are_a_miss_and_counted(tiers: tuple[Tiers, Hands]) -> None:
    made, clock = tiers
    stored = bytearray(encode(entry(made.generations)))
    stored[-1] ^= 1
    await made.shared.set(ONE.key, bytes(stored), 100)
    assert await made.recall.find(ONE, clock.now) is None
    assert made.recall.bad_entries == {"checksum": 1}


async def test_nothing_is_kept_without_a_life(tiers: tuple[Tiers, Hands]) -> None:
    made, clock = tiers
    made.keeper.keep(ONE.key, entry(made.generations, kept_until=1000.0), clock.now)
    await made.keeper.drain()
    assert await made.recall.find(ONE, clock.now) is None


async def test_of_many_renewals_others_are_told_now_and_then(
    tiers: tuple[Tiers, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep, "TELL_EVERY", 3600.0)
    made, clock = tiers
    bumps = made.shared.counters["bump"]
    for number in range(10):
        key = bytes([number]) * 16
        made.keeper.keep(key, entry(made.generations), clock.now, renews=True)
        await made.keeper.written(key)
        await until(lambda: bumps["ok"] > 0, "others are told")
    assert bumps == {"ok": 1}
