"""Specification of `policies.prefix_eviction`: leaves first, and among leaves the one least likely to be used again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prefix_eviction import PrefixEviction

keys = st.integers(0, 15)
operations = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "pin", "unpin", "remove", "evict", "admits", "refuse"]), keys, keys),
    max_size=300,
)


def prompt(cache: PrefixEviction[str], *chain: str) -> None:
    """A prompt of these blocks goes through a cache that is as large as its policy was told (a pool: no refusals)."""
    held = 0
    while held < len(chain) and chain[held] in cache:
        cache.touch(chain[held])
        cache.pin(chain[held])
        held += 1
    for at in range(held, len(chain)):
        if len(cache) == cache.capacity:
            cache.evict()
        cache.insert(chain[at], chain[at - 1] if at else None, pinned=True)
    for key in reversed(chain):
        cache.unpin(key)


def chain(name: str, length: int) -> list[str]:
    return [f"{name}{at}" for at in range(length)]


@given(operations)
def test_only_unpinned_leaves_are_evicted_and_there_is_always_one(steps: list[tuple[str, int, int]]):
    cache: PrefixEviction[int] = PrefixEviction(4)
    parents: dict[int, int | None] = {}  # of those that are resident
    pinned: set[int] = set()
    for verb, key, other in steps:
        if verb == "insert":
            parent = other if other < key else None
            cache.insert(key, parent, pinned=other % 2 == 0)
            if key not in parents:
                parents[key] = parent
                pinned |= {key} if other % 2 == 0 else set()
        elif verb == "evict":
            victim = cache.evict()
            if victim is None:
                assert parents.keys() <= pinned
                continue
            assert victim in parents
            assert victim not in pinned
            assert {k for k, p in parents.items() if p == victim} <= pinned
            del parents[victim]
        else:
            getattr(cache, verb)(key)
            if verb == "pin" and key in parents:
                pinned.add(key)
            elif verb == "unpin":
                pinned.discard(key)
            elif verb == "remove":
                parents.pop(key, None)
        pinned &= parents.keys()
        assert {k for k in range(16) if k in cache} == parents.keys()
        assert len(cache) == len(parents)


def test_without_experience_the_least_recently_used_chain_goes_first_tail_before_head():
    cache: PrefixEviction[str] = PrefixEviction(1000)
    for name in "ab":
        prompt(cache, *chain(name, 100))
    assert [cache.evict() for _ in range(100)] == chain("a", 100)[::-1]


def test_a_shared_head_outlives_all_its_branches():
    cache: PrefixEviction[str] = PrefixEviction(10)
    prompt(cache, "head", "left")
    prompt(cache, "head", "right")
    assert {cache.evict(), cache.evict()} == {"left", "right"}
    assert cache.evict() == "head"
    assert cache.evict() is None


def test_what_comes_back_outlives_a_flood_of_what_does_not():
    cache: PrefixEviction[str] = PrefixEviction(200)
    regular = chain("regular", 50)
    hits = 0
    for round_ in range(200):
        if round_ % 4 == 0:
            hits += regular[-1] in cache
            prompt(cache, *regular)
        prompt(cache, *chain(f"once{round_}-", 60))  # 240 blocks between two uses: more than the cache holds
    assert hits > 40  # least recently used would have none


def test_conversations_outlive_prompts_asked_once():
    """Half of the prompts begin a conversation of five turns, half never come back; the cache cannot hold both."""
    rng = random.Random(1)
    cache: PrefixEviction[str] = PrefixEviction(300)
    talks: list[tuple[str, int]] = []
    reused = wanted = 0
    for serial in range(3000):
        if serial % 2:
            prompt(cache, *chain(f"once{serial}-", 12))
            continue
        name, turn = talks.pop(rng.randrange(len(talks))) if len(talks) > 9 else (f"talk{serial}-", 0)
        blocks = chain(name, 4 + 3 * turn)
        reused += sum(key in cache for key in blocks[: len(blocks) - 3]) if turn else 0
        wanted += len(blocks) - 3 if turn else 0
        prompt(cache, *blocks)
        if turn < 4:
            talks.append((name, turn + 1))
    assert reused / wanted > 0.8


def test_a_returning_block_counts_its_uses_from_before_it_was_evicted():
    cache: PrefixEviction[str] = PrefixEviction(64)
    found = []
    for serial in range(1000):
        prompt(cache, *chain(f"once{serial}-", 4))
        if serial % 25 == 0:  # comes back after 100 other blocks: too late for a cache of 64, but still remembered
            found.append("again" in cache)
            prompt(cache, "again")
    assert not any(found[:2])
    assert all(found[-10:])


def test_a_refused_block_is_remembered():
    cache: PrefixEviction[str] = PrefixEviction(64)
    for serial in range(500):
        prompt(cache, *chain(f"once{serial}-", 4))
        if serial % 25 == 0:
            prompt(cache, "again")
    cache.refuse("asked twice")
    assert "asked twice" not in cache
    assert cache.admits("asked twice")


def test_an_empty_cache_has_nothing_to_give_up_for_a_newcomer():
    cache: PrefixEviction[str] = PrefixEviction(64)
    assert not cache.admits("a")
    cache.insert("a", None, pinned=True)
    assert not cache.admits("b")
    assert cache.evict() is None


def test_a_tail_may_be_kept_without_its_head():
    cache: PrefixEviction[str] = PrefixEviction(64)
    cache.insert("tail", "head that is on another tier")
    assert cache.evict() == "tail"


def test_a_head_that_comes_after_its_tail_outlives_it():
    cache: PrefixEviction[str] = PrefixEviction(64)
    cache.insert("tail", "head")
    cache.insert("head", None)
    cache.touch("tail")
    assert [cache.evict(), cache.evict()] == ["tail", "head"]


def test_removing_a_head_leaves_its_tail_evictable():
    cache: PrefixEviction[str] = PrefixEviction(64)
    prompt(cache, "a", "b", "c")
    cache.remove("a")
    prompt(cache, "a", "x")  # the same head, come anew
    assert {cache.evict() for _ in range(4)} == {"a", "b", "c", "x"}
    assert cache.evict() is None


def test_pins_do_not_count_and_outlast_touches():
    cache: PrefixEviction[str] = PrefixEviction(64)
    cache.insert("a", None, pinned=True)
    cache.pin("a")
    cache.touch("a")
    assert cache.evict() is None
    cache.unpin("a")
    assert cache.evict() == "a"


def test_unknown_keys_are_ignored():
    cache: PrefixEviction[str] = PrefixEviction(64)
    for verb in (cache.touch, cache.pin, cache.unpin, cache.remove):
        verb("nobody")
    assert len(cache) == 0


def test_what_is_remembered_is_bounded_by_the_capacity():
    """A long life with stragglers of every age: neither the memory of keys nor the groups pile up."""
    rng = random.Random(2)
    capacity = 64
    cache: PrefixEviction[str] = PrefixEviction(capacity)
    for serial in range(10_000):
        prompt(cache, f"hot{rng.randrange(8)}", f"{rng.randrange(200)}", f"new{serial}")
    state = vars(cache)
    assert len(state["_ghosts"]) <= 4 * capacity
    assert len(state["_queue"]) <= 10 * capacity
    assert sum(map(len, state["_due"].values())) <= 10 * capacity


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_of_no_blocks_is_refused(capacity: int):
    with pytest.raises(ValueError, match="at least 1 block"):
        PrefixEviction(capacity)
