"""The tiers as the engine sees them: right bytes or fewer blocks, and never late (O-58, O-62, O-63, O-64)."""

import asyncio
import threading
import time

from cache.prefix.tiers import Limits
from tests.cache.prefix.helpers import (
    BLOCK_BYTES,
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
)
from tests.waiting import wait_until

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
    wait_until(lambda: stack.host.lookup(blocks) == 4)


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
    wait_until(lambda: all(lookup.done for lookup in lookups))
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
    wait_until(lambda: told == ["lookup"])
    assert lookup.done
    lookup = look(stack, blocks)
    stack.load(lookup, stack.decide(lookup), buffers(2), on_done=lambda: told.append("load"))
    wait_until(lambda: told == ["lookup", "load"])


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
    assert time.monotonic() - started < 10 and lookup.done and not stack._mover._thread.is_alive()


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
    stack = bench(tier, slots=0, limits=Limits(load=20), load_timeout=20)
    stack.observe_prefill(16, 0.2)
    started = time.monotonic()
    assert fetch(stack, blocks).loaded == 0
    assert 0.1 < time.monotonic() - started < 10


def test_a_load_ends_on_a_prefill_chunk(bench):
    stack, blocks = bench(step=4), make_blocks(10)
    store(stack, blocks)
    assert stack.decide(look(stack, blocks)).blocks == 8
    assert stack.decide(look(stack, blocks[3:])).blocks == 5
