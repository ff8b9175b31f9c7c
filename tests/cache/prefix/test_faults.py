"""Whatever a remote tier does: right bytes or fewer blocks, in time, and nothing left behind (O-58, O-62 … O-64)."""

import asyncio
import random
import threading
import time

import pytest

from cache.prefix.tiers import Limits, TierFull
from cache.prefix.transfer import Transfer
from cache.stores.breaker import Breaker
from tests.cache.prefix.helpers import (
    TENANT,
    FaultyTier,
    buffers,
    check,
    fetch,
    hang,
    look,
    make_blocks,
    settled,
    store,
    stumble,
)
from tests.waiting import wait_until


def flip(record: bytes) -> bytes:
    return record[:-100] + bytes([record[-100] ^ 4]) + record[-99:]


@pytest.mark.parametrize(
    "spoil",
    [
        flip,
        lambda record: record[: len(record) // 2],
        lambda record: None,
        lambda record: b"",
        lambda record: record * 2,
    ],
    ids=["flipped bit", "half written", "success but dropped", "empty", "twice"],
)
def test_a_store_that_went_wrong_is_never_believed(bench, spoil):  # O-62
    tier, blocks = FaultyTier(), make_blocks(5)
    tier.on_record = lambda record: spoil(record) if len(tier.records) == 2 else record
    stack = bench(tier, write_through_uses=1)
    for block in blocks:
        store(stack, [block])
    settled(stack, 5)
    reader = bench(FaultyTier(tier.records))
    assert fetch(reader, blocks).loaded == 2
    assert (reader.stats()["remote"]["bad"] > 0) == (len(tier.records) > 2 and blocks[2].hash in tier.records)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_kth_write_fails(bench, k):  # O-62
    tier, blocks = FaultyTier(), make_blocks(4)
    tier.on_store = stumble(k)
    stack = bench(tier, slots=0)
    for block in blocks:
        store(stack, [block])
    settled(stack, 4)
    assert (stack.stats()["remote"]["failures"], tier.open_leases) == (1, 0)
    assert fetch(bench(FaultyTier(tier.records)), blocks).loaded == k - 1


def test_a_full_tier_drops_and_goes_on_serving(bench):
    tier, blocks = FaultyTier(), make_blocks(8)
    store(first := bench(tier, slots=0), blocks[:4])
    settled(first, 4)

    async def full(_: int) -> None:
        raise TierFull("full")

    tier.on_store = full
    stack = bench(tier, slots=0)
    store(stack, blocks[4:])
    settled(stack, 4)
    counts = stack.stats()["remote"]
    assert (counts["dropped"], counts["failures"], stack.remote.breaker.state) == (4, 0, "closed")
    assert fetch(stack, blocks).loaded == 4


def test_only_the_middle_block_is_missing(bench):  # O-63
    tier, blocks = FaultyTier(), make_blocks(5)
    store(first := bench(tier, slots=0), blocks)
    settled(first, 5)
    stack = bench(FaultyTier(tier.records), slots=0)
    lookup = look(stack, blocks)
    assert lookup.remote == 5
    del tier.records[blocks[2].hash]
    into = buffers(5)
    transfer = stack.load(lookup, stack.decide(lookup), into)
    assert transfer.wait(20) and transfer.loaded == 2
    check(transfer, into)


def test_evicted_between_lookup_and_load(bench):  # O-63
    stack, blocks = bench(), make_blocks(4)
    store(stack, blocks)
    lookup = look(stack, blocks)
    stack.host.clear()
    into = buffers(4)
    transfer = stack.load(lookup, stack.decide(lookup), into)
    assert transfer.wait(20) and transfer.loaded == 0
    check(transfer, into)


@pytest.mark.parametrize("fault", [hang, stumble()], ids=["hangs", "fails"])
def test_a_lookup_that_fails_or_hangs_is_a_miss(bench, fault):
    tier, blocks = FaultyTier(), make_blocks(3)
    tier.on_lookup = fault
    stack = bench(tier, limits=Limits(lookup=0.05))
    store(stack, blocks[:1])
    assert fetch(stack, blocks).by_tier == {"host": 1}


@pytest.mark.parametrize("slots", [0, 16])
@pytest.mark.parametrize("fault", [hang, stumble()], ids=["hangs", "fails"])
def test_a_load_that_fails_or_hangs_yields_what_came_before(bench, fault, slots):  # O-63
    tier, blocks = FaultyTier(), make_blocks(5)
    store(first := bench(tier, slots=0), blocks)
    settled(first, 5)
    tier.on_load = fault
    stack = bench(tier, slots=slots, limits=Limits(load=0.05))
    if slots:
        store(stack, blocks[:2])
    assert fetch(stack, blocks).loaded == (2 if slots else 0)
    assert tier.open_leases == 0


def test_a_load_ends_at_its_deadline_and_what_comes_late_is_not_written(bench):  # O-63, O-64
    tier, blocks, release = FaultyTier(), make_blocks(3), threading.Event()
    store(first := bench(tier, slots=0), blocks)
    settled(first, 3)

    async def wait(_: int) -> None:
        await asyncio.to_thread(release.wait, 5)

    tier.on_load = wait
    stack = bench(tier, limits=Limits(load=5), load_timeout=0.05)
    lookup = look(stack, blocks)
    into = buffers(3)
    transfer = stack.load(lookup, stack.decide(lookup), into)
    started = time.monotonic()
    assert transfer.wait(20) and time.monotonic() - started < 4
    assert transfer.loaded == 0
    release.set()
    wait_until(lambda: stack.host.lookup(blocks) == 3)  # late, but not in vain
    check(transfer, into)


def test_after_repeated_failures_the_tier_is_left_alone_and_comes_back(bench):
    tier, now = FaultyTier(), [0.0]
    tier.on_lookup = stumble(1, 2, 3)
    stack = bench(tier, breaker=Breaker(failures=3, cooldown=10, clock=lambda: now[0]))
    for seed in range(5):
        assert fetch(stack, make_blocks(1, seed=seed)).loaded == 0
    assert (tier.calls["lookup"], stack.stats()["remote"]["skipped"]) == (3, 2)
    now[0] = 11.0
    fetch(stack, make_blocks(1))
    assert (tier.calls["lookup"], stack.remote.breaker.state) == (4, "closed")


def test_weak_hashes_never_mix_blocks_up(bench):  # O-58
    tier, rng = FaultyTier(), random.Random(7)
    stack = bench(tier, slots=6, write_through_uses=1)
    prompts = [make_blocks(rng.randint(1, 5), seed=s, hash_function=lambda d: bytes([d[0] & 15])) for s in range(40)]
    loaded = 0
    for _ in range(200):
        blocks = rng.choice(prompts)
        store(stack, blocks)
        loaded += fetch(stack, rng.choice([blocks, rng.choice(prompts)])).loaded
    assert loaded > 0 and stack.host.collisions > 0


def test_aborts_at_any_moment_leave_nothing_behind(bench):  # O-64
    """500 rounds: loads are abandoned before, during and after; buffers freed then are never written to again."""
    rng, tier = random.Random(3), FaultyTier()
    prompts = [make_blocks(rng.randint(1, 6), seed=seed) for seed in range(8)]

    async def dawdle(_: int) -> None:
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.004)
        if rng.random() < 0.05:
            raise ConnectionError("injected")

    tier.on_load = tier.on_store = dawdle
    stack = bench(tier, slots=7, breaker=Breaker(failures=10**9))
    over: list[tuple[Transfer, list[memoryview], int]] = []
    running: list[tuple[Transfer, list[memoryview]]] = []
    for _ in range(500):
        blocks = rng.choice(prompts)
        if rng.random() < 0.3:
            store(stack, blocks, uses=rng.choice([1, 2]))
        lookup = stack.lookup(blocks, TENANT)
        if rng.random() < 0.7:
            wait_until(lambda lookup=lookup: lookup.done)
        decision = stack.decide(lookup)
        into = buffers(decision.blocks)
        running.append((stack.load(lookup, decision, into), into))
        if len(running) > rng.randint(0, 3):
            transfer, into = running.pop(rng.randrange(len(running)))
            count = transfer.abandon()
            check(transfer, into)
            over.append((transfer, into, count))
    for transfer, into in running:
        wait_until(lambda transfer=transfer: transfer.done)
        check(transfer, into)
    stack.close()
    for transfer, into, count in over:
        assert transfer.loaded == count
        check(transfer, into)
    assert tier.open_leases == 0
    stack.host.check_integrity()
    stack.host.clear()
    assert stack.host.used_bytes == 0
