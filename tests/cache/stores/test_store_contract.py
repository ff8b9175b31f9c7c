"""What every shared store does, whatever holds the bytes."""

from __future__ import annotations

import asyncio

import pytest

from cache.stores.base import StoreError
from tests.cache.stores.conftest import Bench

KEY, OTHER = bytes(range(16)), bytes(range(16, 32))


async def test_an_unknown_key_is_a_miss(bench: Bench) -> None:
    assert await bench.store.get(KEY) is None


@pytest.mark.parametrize("value", [b"", b"x", b"\x00\r\n$-1\r\n\xff" * 9, b"v" * 500_000], ids=len)
async def test_what_was_set_is_found_as_it_was(bench: Bench, value: bytes) -> None:
    await bench.store.set(KEY, value, ttl=60)
    assert await bench.store.get(KEY) == value
    assert await bench.store.get(OTHER) is None


async def test_a_later_set_replaces_value_and_expiry(bench: Bench) -> None:
    await bench.store.set(KEY, b"old", ttl=10)
    await bench.store.set(KEY, b"new", ttl=100)
    bench.advance(50)
    assert await bench.store.get(KEY) == b"new"


async def test_an_entry_lives_until_its_expiry_and_not_longer(bench: Bench) -> None:
    await bench.store.set(KEY, b"v", ttl=60)
    bench.advance(59)
    assert await bench.store.get(KEY) == b"v"
    bench.advance(1)
    assert await bench.store.get(KEY) is None


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
async def test_nothing_is_stored_without_a_lifetime(bench: Bench, ttl: float) -> None:
    with pytest.raises(ValueError, match="time to live"):
        await bench.store.set(KEY, b"v", ttl=ttl)
    assert await bench.store.get(KEY) is None


async def test_the_shortest_lifetime_is_still_one(bench: Bench) -> None:
    await bench.store.set(KEY, b"v", ttl=1e-9)
    bench.advance(0.001)
    await asyncio.sleep(0.002)  # for Redis, which keeps its own time
    assert await bench.store.get(KEY) is None


async def test_a_deleted_entry_is_gone(bench: Bench) -> None:
    await bench.store.set(KEY, b"v", ttl=60)
    await bench.store.set(OTHER, b"w", ttl=60)
    await bench.store.delete(KEY)
    await bench.store.delete(b"never there")
    assert await bench.store.get(KEY) is None
    assert await bench.store.get(OTHER) == b"w"


@pytest.mark.parametrize("key", [b"", b"k" * 401], ids=["empty", "long"])
async def test_an_impossible_key_is_refused(bench: Bench, key: bytes) -> None:
    with pytest.raises(StoreError) as refused:
        await bench.store.get(key)
    assert refused.value.kind == "data"


async def test_keys_of_any_bytes_are_kept_apart(bench: Bench) -> None:
    keys = [b"a", b"a\x00", b"A", b"\xff" * 400, b"a\x00b", b"61"]
    for key in keys:
        await bench.store.set(key, b"of " + key, ttl=60)
    assert [await bench.store.get(key) for key in keys] == [b"of " + key for key in keys]


async def test_a_bump_is_at_least_the_time_and_above_all_before_it(bench: Bench) -> None:
    first = await bench.store.bump("model:m1")
    assert first >= bench.clock() * 1000
    again = await bench.store.bump("model:m1")
    other = await bench.store.bump("tag:a")
    bench.advance(3600)
    later = await bench.store.bump("model:m1")
    assert first < again < other < later
    assert later >= bench.clock() * 1000
    bench.clock.advance(-7200)  # a clock set back must not undo a purge
    assert await bench.store.bump("tag:a") > later


async def test_bumps_at_once_are_all_different(bench: Bench) -> None:
    given = await asyncio.gather(*[asyncio.ensure_future(bench.store.bump("tag:a")) for _ in range(50)])
    assert len(set(given)) == 50
    assert await bench.store.generations() == {"tag:a": max(given)}


async def test_generations_tell_the_last_bump_of_each_scope(bench: Bench) -> None:
    assert await bench.store.generations() == {}
    await bench.store.bump("tenant:é:日本")
    expected = {"tenant:é:日本": await bench.store.bump("tenant:é:日本"), "all": await bench.store.bump("all")}
    assert await bench.store.generations() == expected


async def test_generations_older_than_ninety_days_are_dropped(bench: Bench) -> None:
    await bench.store.bump("tag:old")
    bench.advance(89 * 86_400)
    kept = await bench.store.bump("tag:new")
    bench.advance(2 * 86_400)
    assert await bench.store.generations() == {"tag:new": kept}


@pytest.mark.parametrize(
    "scope", ["", "s" * 401, "é" * 201, "\x00latest"], ids=["empty", "long", "long in bytes", "NUL"]
)
async def test_a_scope_that_cannot_be_kept_is_refused_not_ignored(bench: Bench, scope: str) -> None:
    with pytest.raises(ValueError, match="purge scope"):
        await bench.store.bump(scope)


async def test_a_watcher_hears_what_was_bumped_before_and_what_is_bumped_later_once(bench: Bench) -> None:
    heard: list[tuple[str, int]] = []
    before = await bench.store.bump("tag:a")
    watching = asyncio.create_task(bench.store.watch(lambda scope, generation: heard.append((scope, generation))))
    await _until(lambda: heard == [("tag:a", before)])
    later = await bench.store.bump("tag:a")
    other = await bench.store.bump("tag:b")
    await _until(lambda: len(heard) >= 3)
    await asyncio.sleep(0.3)
    assert sorted(heard) == sorted([("tag:a", before), ("tag:a", later), ("tag:b", other)])
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_many_calls_at_once_get_their_own_answers(bench: Bench) -> None:
    keys = [i.to_bytes(16, "big") for i in range(1, 501)]
    await asyncio.gather(*[asyncio.ensure_future(bench.store.set(key, key * 50, ttl=60)) for key in keys])
    found = await asyncio.gather(*[asyncio.ensure_future(bench.store.get(key)) for key in keys])
    assert found == [key * 50 for key in keys]


async def test_a_caller_that_leaves_does_not_shift_the_answers_of_others(bench: Bench) -> None:
    await bench.store.set(KEY, b"mine", ttl=60)
    await bench.store.set(OTHER, b"theirs", ttl=60)
    left = asyncio.ensure_future(bench.store.get(OTHER))
    kept = asyncio.ensure_future(bench.store.get(KEY))
    left.cancel()
    assert await kept == b"mine"
    assert await bench.store.get(OTHER) == b"theirs"


async def test_a_closed_store_says_so(bench: Bench) -> None:
    await bench.store.set(KEY, b"v", ttl=60)
    await bench.store.close()
    with pytest.raises(StoreError) as refused:
        await bench.store.get(KEY)
    assert refused.value.kind == "unavailable"


async def test_what_was_set_before_close_is_there_after_opening_again(bench: Bench) -> None:
    await bench.store.set(KEY, b"v" * 100_000, ttl=60)
    await bench.store.close()
    await bench.store.open()
    assert await bench.store.get(KEY) == b"v" * 100_000


async def _until(condition, seconds: float = 0.9) -> None:
    """Wait for `condition`, less than the second that a purge may take to be heard of."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
