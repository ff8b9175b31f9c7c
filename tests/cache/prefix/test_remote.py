"""The Redis tier against a real server, in health and in every kind of trouble (O-58, O-59, O-61, O-62, O-63)."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cache.prefix.blocks import LayoutId
from cache.prefix.codec import Codec
from cache.prefix.remote import RedisTier
from cache.prefix.stack import TierStack
from cache.prefix.tiers import GuardedTier, Limits
from cache.stores.breaker import Breaker
from tests.cache.prefix.helpers import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LAYOUT,
    TENANT,
    RedisServer,
    fetch,
    look,
    make_blocks,
    payload,
)
from tests.waiting import wait_until

MakeStack = Callable[..., TierStack]


@pytest.fixture
def engine(redis_server: RedisServer) -> Iterator[MakeStack]:
    """Makes stacks with Redis alone, each standing for an engine process of its own."""
    stacks: list[TierStack] = []

    def make(*, layout: bytes = LAYOUT, limits: Limits | None = None, breaker: Breaker | None = None, **options):
        tier = RedisTier(redis_server.url, Codec(layout, BLOCK_BYTES), **options)
        remote = GuardedTier(tier, BLOCK_BYTES, limits=limits or Limits(10, 10, 10), breaker=breaker)
        stacks.append(TierStack(remote=remote, block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, load_timeout=20))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close(timeout=0.5)


def store(stack: TierStack, blocks, tenant: bytes = TENANT) -> dict[str, int]:
    """Stores and waits until that is over; returns the counters."""
    before = counts(stack)
    stack.store(blocks, [payload(block) for block in blocks], tenant)
    goal = before["stored"] + before["dropped"] + len(blocks)
    wait_until(lambda: counts(stack)["stored"] + counts(stack)["dropped"] >= goal)
    return counts(stack)


def counts(stack: TierStack) -> dict[str, int]:
    return stack.stats()["redis"]


def test_another_engine_reads_what_one_stored(engine):
    blocks = make_blocks(9)
    store(engine(), blocks)
    assert fetch(engine(), blocks).by_tier == {"redis": 9}
    assert fetch(engine(), make_blocks(9, seed=1)).loaded == 0


def test_every_key_expires_and_names_no_tenant(engine, redis_server):
    store(engine(ttl=60, quota=lambda tenant: 10**9), make_blocks(3), b"secret-tenant")
    keys = redis_server.client.keys("*")
    assert len(keys) == 4
    for key in keys:
        assert 0 < redis_server.client.pttl(key) <= 60_000
        assert b"secret" not in key
    assert all(b"secret" not in redis_server.client.get(key) for key in redis_server.block_keys())


def test_a_block_lives_on_while_it_is_used(engine, redis_server):
    stack, blocks = engine(ttl=60), make_blocks(3)
    store(stack, blocks)
    first, second, _ = keys = redis_server.block_keys()
    redis_server.client.pexpire(first, 29_000)
    redis_server.client.pexpire(second, 31_000)
    fetch(stack, blocks)
    wait_until(lambda: redis_server.client.pttl(first) > 59_000)
    assert redis_server.client.pttl(second) <= 31_000  # more than half its life is left
    redis_server.client.pexpire(keys[2], 1)
    wait_until(lambda: len(redis_server.block_keys()) == 2)


def test_what_another_engine_stored_is_not_sent_again(engine, redis_server):
    blocks = make_blocks(4)
    store(engine(), blocks[:3])
    writer = engine()
    writer.store(blocks, [payload(block) for block in blocks], TENANT)
    wait_until(lambda: counts(writer)["stored"] == 1)
    assert len(redis_server.block_keys()) == 4


def test_a_tenant_stays_within_its_quota_over_all_engines(engine, redis_server):
    now = [1000.0]
    limited = {"quota": {TENANT: 3 * BLOCK_BYTES}.get, "ttl": 60.0, "clock": lambda: now[0]}
    store(engine(**limited), make_blocks(2, seed=1))
    stack = engine(**limited)
    counted = store(stack, make_blocks(2, seed=2))
    assert (counted["stored"], counted["dropped"], counted["failures"]) == (1, 1, 0)
    assert store(stack, make_blocks(2, seed=3), b"other")["stored"] == 3
    now[0] += 61
    assert store(stack, make_blocks(2, seed=4))["stored"] == 5


LAYOUT_A = LayoutId(
    weights=b"w", dtype="float32", layers=4, kv_heads=2, head_size=8, block_size=4, rope={"theta": 1e4, "factor": 1.0}
)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"layers": 5},
        {"kv_heads": 1},
        {"weights": b"v"},
        {"codec_version": 2},
        {"rope": {"theta": 1e4, "factor": 2.0}},
        {"numerics": "int8"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_layout_shares_the_server_but_no_block(engine, change):  # O-59, O-60
    blocks = make_blocks(3)
    store(engine(layout=LAYOUT_A.digest), blocks)
    other = engine(layout=replace(LAYOUT_A, **change).digest)
    assert look(other, blocks).remote == 0
    store(other, blocks)
    assert fetch(engine(layout=LAYOUT_A.digest), blocks).loaded == 3


def test_two_tenants_share_no_block(engine):
    mine, other = make_blocks(3, salt=b"a"), make_blocks(3, salt=b"b")
    stack = engine()
    store(stack, mine, b"a")
    assert fetch(stack, other).loaded == 0
    lookup = stack.lookup(mine, b"b")  # even if the salt were not in the chain
    wait_until(lambda: lookup.done)
    assert lookup.remote == 0


PROGRAM = """
import sys
from tests.cache.prefix.helpers import *
from tests.cache.prefix.test_remote import *
tier = RedisTier(sys.argv[1], Codec(LAYOUT, BLOCK_BYTES))
remote = GuardedTier(tier, BLOCK_BYTES, limits=Limits(5, 5))
stack = TierStack(remote=remote, block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, load_timeout=30)
print(store(stack, make_blocks(5))["stored"] if sys.argv[2] == "store" else fetch(stack, make_blocks(5)).loaded)
stack.close()
"""


def test_processes_with_different_hash_seeds_share(redis_server):  # O-61
    for verb, seed in [("store", "0"), ("fetch", "1"), ("fetch", "random")]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PROGRAM, redis_server.url, verb]
        assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == b"5\n"


@pytest.mark.parametrize("slots", [16, 2])
def test_weak_hashes_never_mix_blocks_up(engine, slots):  # O-58
    stack = engine()
    prompts = [make_blocks(4, seed=seed, hash_function=lambda d: bytes([d[0] & 15])) for seed in range(slots)]
    for blocks in prompts:
        stack.store(blocks, [payload(block) for block in blocks], TENANT)
    for blocks in prompts * 3:
        fetch(stack, blocks)  # proves the bytes of whatever it loads


# --- trouble --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped bit", "garbage of the right length"])
def test_a_damaged_block_is_refused_and_removed_and_can_be_stored_again(engine, redis_server, damage):  # O-62
    blocks = make_blocks(4)
    store(engine(), blocks)
    third = next(key for key in redis_server.block_keys() if key.endswith(blocks[2].hash.hex().encode()))
    record = redis_server.client.get(third)
    bad = record[:500] + bytes([record[500] ^ 1]) + record[501:] if damage == "flipped bit" else os.urandom(len(record))
    redis_server.client.set(third, bad, keepttl=True)
    stack = engine()
    assert look(stack, blocks).remote == 4
    assert fetch(stack, blocks).loaded == 2
    assert counts(stack)["bad"] == 1
    assert look(stack, blocks).remote == 2
    store(stack, blocks[2:3])
    assert fetch(stack, blocks).loaded == 4


def test_a_cut_block_is_not_even_found(engine, redis_server):  # O-62
    blocks = make_blocks(3)
    store(engine(), blocks)
    for key in redis_server.block_keys():
        redis_server.client.set(key, redis_server.client.get(key)[:-1], px=60_000)
    stack = engine()
    assert look(stack, blocks).remote == 0
    store(stack, blocks)
    assert fetch(stack, blocks).loaded == 3


def test_a_key_of_another_type_is_a_miss(engine, redis_server):
    blocks = make_blocks(2)
    store(engine(), blocks)
    key = redis_server.block_keys()[0]
    redis_server.client.delete(key)
    redis_server.client.lpush(key, b"x")
    stack = engine()
    assert fetch(stack, blocks).loaded == 0
    assert counts(stack)["failures"] == 1


def test_evicted_between_lookup_and_load(engine, redis_server):  # O-63
    stack, blocks = engine(), make_blocks(5)
    store(stack, blocks)
    lookup = look(stack, blocks)
    redis_server.client.delete(next(k for k in redis_server.block_keys() if k.endswith(blocks[3].hash.hex().encode())))
    transfer = stack.load(lookup, stack.decide(lookup), [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks])
    assert transfer.wait(20) and transfer.loaded == 3


def test_a_full_server_drops_what_is_new_and_serves_what_it_has(engine, redis_server):
    stack, blocks = engine(), make_blocks(40)
    store(stack, blocks[:3])
    redis_server.client.config_set("maxmemory-policy", "noeviction")
    redis_server.client.config_set("maxmemory", redis_server.client.info("memory")["used_memory"])
    counted = store(stack, blocks[3:])
    assert counted["dropped"] > 0 and counted["failures"] == 0
    assert fetch(stack, blocks).loaded >= 3
    assert stack.remote is not None and stack.remote.breaker.state == "closed"
    redis_server.client.config_set("maxmemory", 0)
    stack.store(blocks, [payload(block) for block in blocks], TENANT)
    wait_until(lambda: len(redis_server.block_keys()) == 40)
    assert fetch(stack, blocks).loaded == 40


def test_a_server_that_evicts_costs_misses_only(engine, redis_server):
    stack = engine()
    redis_server.client.config_set("maxmemory-policy", "allkeys-lru")
    redis_server.client.config_set("maxmemory", redis_server.client.info("memory")["used_memory"] + 40 * BLOCK_BYTES)
    for seed in range(10):
        store(stack, make_blocks(10, seed=seed))
    for seed in range(10):
        fetch(stack, make_blocks(10, seed=seed))
    assert counts(stack)["bad"] == 0


def test_a_frozen_server_delays_nobody_and_is_used_again_when_it_thaws(engine, redis_server):
    now = [0.0]
    breaker = Breaker(failures=2, cooldown=5, clock=lambda: now[0])
    stack, blocks = engine(limits=Limits(lookup=0.3, load=0.3, store=10), breaker=breaker), make_blocks(4)
    store(stack, blocks)
    lookup = look(stack, blocks)
    redis_server.freeze()
    started = time.monotonic()
    transfer = stack.load(lookup, stack.decide(lookup), [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks])
    wait_until(lambda: transfer.done)
    assert transfer.loaded == 0
    for seed in range(1, 4):
        assert look(stack, make_blocks(2, seed=seed)).remote == 0
    assert time.monotonic() - started < 8
    assert counts(stack)["late"] == 2 and counts(stack)["skipped"] >= 2 and breaker.state == "open"
    redis_server.thaw()

    def answers() -> bool:
        now[0] += 6.0
        return look(stack, blocks).remote == 4

    wait_until(answers)
    wait_until(lambda: fetch(stack, blocks).loaded == 4)  # what was given up on is not taken for an answer to this


def test_a_killed_server_is_a_miss_until_it_is_back(engine, redis_server):
    now = [0.0]
    stack, blocks = engine(breaker=Breaker(clock=lambda: now[0])), make_blocks(3)
    store(stack, blocks)
    redis_server.kill()
    for _ in range(8):
        assert fetch(stack, blocks).loaded == 0
        now[0] += 0.01
    assert store(stack, blocks)["dropped"] == 3
    redis_server.start()
    now[0] += 100
    assert fetch(stack, blocks).loaded == 0  # it has forgotten
    store(stack, blocks)
    assert fetch(stack, blocks).loaded == 3


def test_killed_in_the_middle_of_loads(engine, redis_server):
    stack, blocks = engine(breaker=Breaker(failures=10**9)), make_blocks(40)
    store(stack, blocks)
    lookups = [look(stack, blocks) for _ in range(20)]
    into = [[memoryview(bytearray(BLOCK_BYTES)) for _ in blocks] for _ in lookups]
    transfers = [stack.load(lk, stack.decide(lk), buf) for lk, buf in zip(lookups, into, strict=True)]
    redis_server.kill()
    for transfer, filled in zip(transfers, into, strict=True):
        assert transfer.wait(10)
        for position in range(transfer.loaded):
            assert filled[position] == payload(blocks[position])


def test_a_server_that_never_was_is_a_miss(tmp_path):
    tier = RedisTier(f"unix://{tmp_path}/none", Codec(LAYOUT, BLOCK_BYTES))
    stack = TierStack(remote=GuardedTier(tier, BLOCK_BYTES), block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS)
    assert fetch(stack, make_blocks(2)).loaded == 0
    assert store(stack, make_blocks(2))["dropped"] == 2
    stack.close()
