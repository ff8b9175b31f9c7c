"""Host memory: bounded, never torn, never evicted under a reader, tails before heads."""

import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from cache.prefix.blocks import Block
from cache.prefix.host import HostTier
from cache.prefix.tiers import copy
from tests.cache.prefix.helpers import BLOCK_BYTES, TENANT, make_blocks, payload


def host_of(slots: int, **options) -> HostTier:
    return HostTier(slots * BLOCK_BYTES, BLOCK_BYTES, **options)


def put(host: HostTier, blocks: Sequence[Block], tenant: bytes = TENANT, **options) -> list[Block]:
    """Stores the blocks' payloads; returns what was evicted for them."""
    lease = host.prepare_store(blocks, tenant, **options)
    for block, view in zip(lease.blocks, lease.views, strict=True):
        copy(view, payload(block))
    host.complete_store(lease)
    host.check_integrity()
    return [entry.block for entry, _ in lease.evicted]


def get(host: HostTier, blocks: Sequence[Block]) -> int:
    """Loads leading blocks, proves their bytes, returns how many."""
    lease = host.prepare_load(blocks)
    assert list(map(bytes, lease.views)) == [payload(block) for block in lease.blocks]
    assert lease.blocks == list(blocks[: len(lease.blocks)])
    host.complete_load(lease)
    host.check_integrity()
    return len(lease.blocks)


def test_what_was_stored_is_found_and_read_back():
    host, blocks = host_of(4), make_blocks(4)
    assert put(host, blocks[:3]) == []
    assert (host.lookup(blocks), get(host, blocks)) == (3, 3)
    assert host.used_bytes == host.tenant_bytes(TENANT) == 3 * BLOCK_BYTES


def test_a_block_is_not_found_before_it_is_complete():
    host, blocks = host_of(4), make_blocks(2)
    lease = host.prepare_store(blocks, TENANT)
    assert host.lookup(blocks) == 0
    copy(lease.views[0], payload(blocks[0]))
    host.complete_store(lease, 1)
    assert (host.lookup(blocks), host.used_bytes) == (1, BLOCK_BYTES)
    host.check_integrity()


def test_only_leading_blocks_count():
    host, blocks = host_of(4), make_blocks(4)
    put(host, [blocks[0], blocks[1], blocks[3]])
    assert (host.lookup(blocks), get(host, blocks)) == (2, 2)


@pytest.mark.parametrize("seed", range(5))
def test_tails_are_evicted_before_their_heads(seed):
    rng, host, chains = random.Random(seed), host_of(12), [make_blocks(4, seed=seed) for seed in range(5)]
    for blocks in rng.choices(chains, k=30):
        put(host, blocks)
        host.touch(rng.choice(chains))
        assert host.used_bytes == sum(host.lookup(other) for other in chains) * BLOCK_BYTES, "a head is gone"


def test_a_block_stored_alone_does_not_displace_its_own_chain():
    host, blocks = host_of(3), make_blocks(5)
    for block in blocks:
        put(host, [block])
    assert host.lookup(blocks) == 3


def test_a_chain_longer_than_the_tier_keeps_its_beginning():
    host, blocks = host_of(4), make_blocks(9)
    put(host, blocks)
    assert host.lookup(blocks) == 4
    put(host, blocks[4:])
    assert host.lookup(blocks) == 4


def test_evicted_bytes_are_intact_until_the_newcomer_is_written():
    host, old, new = host_of(2), make_blocks(2, seed=1), make_blocks(2, seed=2)
    put(host, old)
    lease = host.prepare_store(new, TENANT)
    assert [(entry.block, bytes(view)) for entry, view in lease.evicted] == [(b, payload(b)) for b in reversed(old)]
    assert host.lookup(old) == 0


def test_a_block_that_is_read_is_never_evicted():
    host, blocks = host_of(2), make_blocks(2)
    put(host, blocks)
    first, second = host.prepare_load(blocks), host.prepare_load(blocks[:1])
    assert put(host, make_blocks(2, seed=1)) == []
    host.complete_load(first)
    assert put(host, make_blocks(2, seed=1)) == [blocks[1]]
    assert bytes(second.views[0]) == payload(blocks[0])
    host.complete_load(second)
    assert get(host, blocks) == 1


def test_a_tenant_at_its_quota_displaces_only_itself():
    host = host_of(8, quota={b"small": 2 * BLOCK_BYTES}.get)
    other, mine, more = make_blocks(4, seed=1), make_blocks(2, seed=2), make_blocks(2, seed=3)
    put(host, other, b"other")
    put(host, mine, b"small")
    assert put(host, more, b"small") == [mine[1], mine[0]]
    assert host.tenant_bytes(b"small") == 2 * BLOCK_BYTES
    assert (host.lookup(other), host.lookup(more)) == (4, 2)
    lease = host.prepare_load(more)
    assert put(host, mine, b"small") == [] and host.lookup(mine) == 0
    host.complete_load(lease)


def test_a_quota_below_one_block_keeps_nothing():
    host = host_of(4, quota=lambda tenant: 1)
    put(host, make_blocks(2))
    assert host.used_bytes == 0


def test_two_blocks_with_one_hash_never_stand_for_each_other():  # O-58
    one, other = (make_blocks(1, seed=s, hash_function=lambda digest: b"same") for s in (1, 2))
    host = host_of(4)
    put(host, one)
    assert (host.lookup(other), get(host, other)) == (0, 0)
    assert host.collisions > 0
    assert put(host, other) == one  # the newcomer takes the name over
    assert (get(host, one), get(host, other)) == (0, 1)


def test_uses_are_counted_until_the_next_tier_has_the_block():
    host, blocks = host_of(4), make_blocks(3)
    put(host, blocks)
    host.touch(blocks[:2])
    put(host, blocks[1:])
    assert host.unsettled(blocks, 2, now=1.0) == blocks
    assert host.unsettled(blocks, 3, now=1.0) == [blocks[1]]
    host.settle(blocks, until=5.0)
    assert host.unsettled(blocks, 1, now=4.9) == []
    assert host.unsettled(blocks, 1, now=5.0) == blocks


def test_the_buffer_is_one_piece_that_can_be_pinned():
    pinned: list[np.ndarray] = []
    host_of(3, pin=pinned.append)
    assert pinned[0].shape == (3, BLOCK_BYTES) and pinned[0].flags.c_contiguous


def test_a_tier_below_one_block_is_refused():
    with pytest.raises(ValueError, match="cannot hold one block"):
        HostTier(BLOCK_BYTES - 1, BLOCK_BYTES)


def test_clear_forgets_all_but_what_is_in_transfer():
    host, blocks = host_of(4), make_blocks(3)
    put(host, blocks)
    lease = host.prepare_load(blocks[:1])
    host.clear()
    host.check_integrity()
    assert host.lookup(blocks) == 1
    host.complete_load(lease)


@pytest.mark.parametrize("seed", range(5))
def test_against_a_model(seed):
    """Random stores, loads, leases and faults: bytes are always right and the books always balance (O-65)."""
    rng = random.Random(seed)
    host = host_of(8, quota={b"b": 3 * BLOCK_BYTES}.get)
    chains = [make_blocks(rng.randint(1, 6), seed=s, hash_function=lambda d: d[:1]) for s in range(6)]
    loads, stores = [], []
    for _ in range(600):
        blocks, tenant = rng.choice(chains), rng.choice([b"a", b"b"])
        match rng.randrange(6):
            case 0:
                get(host, blocks)
            case 1:
                put(host, blocks, tenant)
            case 2:
                lease = host.prepare_load(blocks)
                loads.append((lease, [bytes(view) for view in lease.views]))
            case 3:
                stores.append(host.prepare_store(blocks, tenant))
            case 4 if loads:
                lease, before = loads.pop(rng.randrange(len(loads)))
                assert list(map(bytes, lease.views)) == before == [payload(block) for block in lease.blocks]
                host.complete_load(lease)
            case 5 if stores:
                lease = stores.pop(rng.randrange(len(stores)))
                written = rng.randint(0, len(lease.views))
                for block, view in zip(lease.blocks[:written], lease.views, strict=False):
                    copy(view, payload(block))
                host.complete_store(lease, written)
        host.check_integrity()
        assert host.tenant_bytes(b"b") <= 3 * BLOCK_BYTES
        assert host.used_bytes <= host.capacity_bytes
    for lease, _ in loads:
        host.complete_load(lease)
    for lease in stores:
        host.complete_store(lease, 0)
    host.clear()
    assert host.used_bytes == 0
    host.check_integrity()


def test_threads_do_not_tear_blocks():
    host = host_of(6)
    chains = [make_blocks(4, seed=seed) for seed in range(4)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                blocks = rng.choice(chains)
                put(host, blocks) if rng.random() < 0.5 else get(host, blocks)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
