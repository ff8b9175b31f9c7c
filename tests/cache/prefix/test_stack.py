"""The tiers as the engine sees them: right bytes or fewer blocks, and never late (O-58, O-62, O-63, O-64)."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from cache.prefix.blocks import Block
from cache.prefix.host import HostTier
from cache.prefix.stack import TierStack
from cache.prefix.tiers import GuardedTier, Limits, TierFull
from cache.prefix.transfer import Lookup, Transfer
from cache.stores.breaker import Breaker
from tests.cache.prefix.helpers import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TENANT,
    FaultyTier,
    buffers,
    make_blocks,
    payload,
    wait_for,
)

POISON = b"\xee" * BLOCK_BYTES


class Bench:
    """Makes stacks and closes them."""

    def __init__(self) -> None:
        self.stacks: list[TierStack] = []

    def __call__(
        self,
        tier: FaultyTier | None = None,
        *,
        slots: int = 16,
        limits: Limits | None = None,
        breaker: Breaker | None = None,
        **options,
    ) -> TierStack:
        stack = TierStack(
            host=HostTier(slots * BLOCK_BYTES, BLOCK_BYTES) if slots else None,
            remote=GuardedTier(tier, BLOCK_BYTES, limits=limits, breaker=breaker) if tier else None,
            block_bytes=BLOCK_BYTES,
            block_tokens=BLOCK_TOKENS,
            **{"load_timeout": 20.0, **options},
        )
        self.stacks.append(stack)
        return stack


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for stack in made.stacks:
        stack.close()
        if stack.host:
            stack.host.check_integrity()


def store(stack: TierStack, blocks: Sequence[Block], **options) -> int:
    return stack.store(blocks, [payload(block) for block in blocks], TENANT, **options)


def look(stack: TierStack, blocks: Sequence[Block]) -> Lookup:
    lookup = stack.lookup(blocks, TENANT)
    wait_for(lambda: lookup.done)
    return lookup


def fetch(stack: TierStack, blocks: Sequence[Block]) -> Transfer:
    """Looks up, loads, and proves every filled buffer right and every other one untouched."""
    lookup = look(stack, blocks)
    decision = stack.decide(lookup)
    into = buffers(decision.blocks)
    transfer = stack.load(lookup, decision, into)
    wait_for(lambda: transfer.done)
    check(transfer, into)
    return transfer


def check(transfer: Transfer, into: Sequence[memoryview]) -> None:
    for position, buffer in enumerate(into):
        right = payload(transfer.blocks[position]) if position < transfer.loaded else POISON
        assert buffer == right, f"buffer {position} of {transfer.loaded} loaded"


def settled(stack: TierStack, stored: int) -> None:
    assert stack.remote is not None
    wait_for(lambda: stack.stats()["remote"]["stored"] + stack.stats()["remote"]["dropped"] >= stored)


async def hang(_: int) -> None:
    await asyncio.sleep(3600)


def stumble(*calls: int) -> Callable:
    async def hook(call: int) -> None:
        if call in calls or not calls:
            raise ConnectionError("injected")

    return hook


# --- the plain way --------------------------------------------------------------------------------------------------


def test_host_memory_gives_back_what_the_device_gave(bench):
    stack, blocks = bench(), make_blocks(5)
    assert store(stack, blocks[:4]) == 4
    assert fetch(stack, blocks).by_tier == {"host": 4}
    assert (stack.missing(blocks), stack.decisions) == ([4], {"unmeasured": 1})


def test_without_any_tier_nothing_is_held(bench):
    stack, blocks = bench(slots=0), make_blocks(3)
    assert (store(stack, blocks), fetch(stack, blocks).loaded, stack.stats()) == (0, 0, {})


def test_the_remote_tier_alone_keeps_and_gives_back(bench):
    stack, blocks = bench(FaultyTier(), slots=0), make_blocks(5)
    assert store(stack, blocks) == 5
    settled(stack, 5)
    assert fetch(stack, blocks).by_tier == {"remote": 5}


def test_a_new_engine_finds_what_another_stored_remotely(bench):
    tier, blocks = FaultyTier(), make_blocks(9)
    settled_stack = bench(tier, write_through_uses=1)
    store(settled_stack, blocks)
    settled(settled_stack, 9)
    stack = bench(FaultyTier(tier.records))
    assert fetch(stack, blocks).by_tier == {"remote": 9}
    assert fetch(stack, blocks).by_tier == {"host": 9}


def test_remote_blocks_move_into_host_memory_while_the_request_waits(bench):
    tier, blocks = FaultyTier(), make_blocks(4)
    store(first := bench(tier, write_through_uses=1), blocks)
    settled(first, 4)
    stack = bench(FaultyTier(tier.records))
    look(stack, blocks)
    wait_for(lambda: stack.host.lookup(blocks) == 4)


def test_an_abandoned_lookup_stops_fetching_ahead(bench):
    tier, blocks = FaultyTier(), make_blocks(4)
    store(first := bench(tier, write_through_uses=1), blocks)
    settled(first, 4)
    late = FaultyTier(tier.records)
    gate = threading.Event()

    async def wait(_: int) -> None:
        await asyncio.to_thread(gate.wait, 5)

    late.on_lookup = wait
    stack = bench(late, limits=Limits(lookup=5))
    stack.lookup(blocks, TENANT).abandon()
    gate.set()
    stack.close()
    assert late.calls["load"] == 0


def test_two_loads_of_one_prompt_fetch_it_once(bench):
    tier, blocks = FaultyTier(), make_blocks(6)
    store(first := bench(tier, write_through_uses=1), blocks)
    settled(first, 6)
    slow = FaultyTier(tier.records)

    async def linger(_: int) -> None:
        await asyncio.sleep(0.05)

    slow.on_load = linger
    stack = bench(slow)
    lookups = [look(stack, blocks) for _ in range(3)]
    into = [buffers(6) for _ in lookups]
    transfers = [stack.load(lk, stack.decide(lk), buf) for lk, buf in zip(lookups, into, strict=True)]
    for transfer, filled in zip(transfers, into, strict=True):
        assert transfer.wait(20) and transfer.loaded == 6
        check(transfer, filled)
    assert slow.calls["load"] == 1


def test_loads_that_overlap_in_part_do_not_disturb_each_other(bench):
    tier, blocks = FaultyTier(), make_blocks(8)
    store(first := bench(tier, write_through_uses=1), blocks)
    settled(first, 8)
    slow = FaultyTier(tier.records)

    async def linger(call: int) -> None:
        await asyncio.sleep(0.05 / call)

    slow.on_load = linger
    stack = bench(slow)
    lookups = [stack.lookup(blocks[a:b], TENANT) for a, b in [(3, 8), (0, 6), (5, 8), (0, 8)]]
    wait_for(lambda: all(lookup.done for lookup in lookups))
    into = [buffers(len(lookup.blocks)) for lookup in lookups]
    transfers = [stack.load(lk, stack.decide(lk), buf) for lk, buf in zip(lookups, into, strict=True)]
    for transfer, filled in zip(transfers, into, strict=True):
        assert transfer.wait(20) and transfer.loaded == len(filled)
        check(transfer, filled)
    assert not stack._mover._arriving


def test_done_is_announced_to_the_engine(bench):
    stack, blocks, told = bench(FaultyTier()), make_blocks(2), []
    store(stack, blocks)
    lookup = stack.lookup(make_blocks(2, seed=1), TENANT, on_done=lambda: told.append("lookup"))
    wait_for(lambda: told == ["lookup"])
    assert lookup.done
    lookup = look(stack, blocks)
    stack.load(lookup, stack.decide(lookup), buffers(2), on_done=lambda: told.append("load"))
    wait_for(lambda: told == ["lookup", "load"])


# --- what is stored remotely, and when ------------------------------------------------------------------------------


def test_a_block_used_twice_is_written_through_and_one_used_once_is_not(bench):
    tier = FaultyTier()
    stack, once, twice = bench(tier), make_blocks(2, seed=1), make_blocks(3, seed=2)
    store(stack, once)
    store(stack, twice, uses=2)
    settled(stack, 3)
    assert set(tier.records) == {block.hash for block in twice}
    stack.touch(once[:1], TENANT)
    settled(stack, 4)
    assert once[0].hash in tier.records and once[1].hash not in tier.records


def test_a_block_loaded_from_host_memory_counts_as_used(bench):
    tier, blocks = FaultyTier(), make_blocks(3)
    stack = bench(tier)
    store(stack, blocks)
    fetch(stack, blocks[:2])
    settled(stack, 2)
    assert set(tier.records) == {block.hash for block in blocks[:2]}


def test_a_block_used_once_is_written_back_when_its_room_is_needed(bench):
    tier, old, new = FaultyTier(), make_blocks(4, seed=1), make_blocks(4, seed=2)
    stack = bench(tier, slots=4)
    store(stack, old)
    store(stack, new)
    settled(stack, 4)
    assert fetch(stack, old).by_tier == {"remote": 4}


def test_what_is_stored_already_is_not_stored_again(bench):
    tier, old = FaultyTier(), make_blocks(3, seed=1)
    stack = bench(tier, slots=3, write_through_uses=1)
    store(stack, old)
    settled(stack, 3)
    stack.touch(old, TENANT)
    store(stack, make_blocks(3, seed=2))  # evicts the old ones
    settled(stack, 6)
    assert tier.calls["store"] == 2 and stack.stats()["remote"]["stored"] == 6


def test_what_waits_to_be_stored_is_bounded(bench):
    tier, release = FaultyTier(), threading.Event()

    async def wait(_: int) -> None:
        await asyncio.to_thread(release.wait, 5)

    tier.on_store = wait
    stack = bench(tier, slots=0, backlog_bytes=3 * BLOCK_BYTES)
    assert store(stack, make_blocks(9)) == 3
    assert stack.stats()["remote"]["dropped"] == 6
    release.set()
    settled(stack, 9)
    assert store(stack, make_blocks(2, seed=1)) == 2


def test_close_stores_what_still_waits(bench):
    tier, blocks = FaultyTier(), make_blocks(4)

    async def linger(_: int) -> None:
        await asyncio.sleep(0.02)

    tier.on_store = linger
    stack = bench(tier, slots=0)
    store(stack, blocks)
    stack.close()
    assert len(tier.records) == 4 and tier.calls["close"] == 1
    assert (store(stack, make_blocks(1, seed=1)), fetch(stack, blocks).loaded) == (0, 0)


def test_close_ends_in_time_though_the_remote_tier_hangs(bench):
    tier = FaultyTier()
    tier.on_store = tier.on_lookup = hang
    stack = bench(tier, write_through_uses=1)
    store(stack, make_blocks(3))
    lookup = stack.lookup(make_blocks(3, seed=1), TENANT)
    started = time.monotonic()
    stack.close(timeout=0.1)
    assert time.monotonic() - started < 2 and lookup.done and not stack._mover._thread.is_alive()


# --- faults: right bytes or fewer blocks ----------------------------------------------------------------------------


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
    assert transfer.wait(20) and time.monotonic() - started < 1
    assert transfer.loaded == 0
    release.set()
    wait_for(lambda: stack.host.lookup(blocks) == 3)  # late, but not in vain
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
            wait_for(lambda lookup=lookup: lookup.done)
        decision = stack.decide(lookup)
        into = buffers(decision.blocks)
        running.append((stack.load(lookup, decision, into), into))
        if len(running) > rng.randint(0, 3):
            transfer, into = running.pop(rng.randrange(len(running)))
            count = transfer.abandon()
            check(transfer, into)
            over.append((transfer, into, count))
    for transfer, into in running:
        wait_for(lambda transfer=transfer: transfer.done)
        check(transfer, into)
    stack.close()
    for transfer, into, count in over:
        assert transfer.loaded == count
        check(transfer, into)
    assert tier.open_leases == 0
    stack.host.check_integrity()
    stack.host.clear()
    assert stack.host.used_bytes == 0


# --- never slower ---------------------------------------------------------------------------------------------------


def test_a_tier_slower_than_computing_is_not_used(bench):
    tier, blocks = FaultyTier(), make_blocks(4)
    store(first := bench(tier, slots=0), blocks)
    settled(first, 4)

    async def crawl(_: int) -> None:
        await asyncio.sleep(0.05)

    tier.on_load = crawl
    stack = bench(tier, slots=0)
    assert fetch(stack, blocks).loaded == 4  # never measured: tried
    stack.observe_prefill(1000, 0.1)  # computing 4 blocks takes 1.6 ms
    decision = stack.decide(look(stack, blocks))
    assert (decision.blocks, decision.reason, decision.refused) == (0, "slower", (("remote", 4),))
    assert stack.stats()["remote"]["refused"] == 4


def test_a_load_waits_no_longer_than_computing_would_take(bench):
    tier, blocks = FaultyTier(), make_blocks(4)
    store(first := bench(tier, slots=0), blocks)
    settled(first, 4)
    tier.on_load = hang
    stack = bench(tier, slots=0)
    stack.observe_prefill(16, 0.2)
    started = time.monotonic()
    assert fetch(stack, blocks).loaded == 0
    assert 0.1 < time.monotonic() - started < 1.0


def test_a_load_ends_on_a_prefill_chunk(bench):
    stack, blocks = bench(step=4), make_blocks(10)
    store(stack, blocks)
    assert stack.decide(look(stack, blocks)).blocks == 8
    assert stack.decide(look(stack, blocks[3:])).blocks == 5
