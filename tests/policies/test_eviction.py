"""Specification of `policies.eviction`: what every policy promises, and what sets each of them apart."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.eviction import EvictionPolicy, Lru, S3Fifo, Sieve, make_policy

ALL = ["s3fifo", "sieve", "lru"]
CAPACITY = 20

keys = st.integers(0, 30)
sizes = st.integers(1, CAPACITY + 3)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), keys, sizes),
        st.tuples(st.just("touch"), keys, st.just(0)),
        st.tuples(st.just("remove"), keys, st.just(0)),
    ),
    max_size=200,
)


def apply(policy: EvictionPolicy[int], operation: tuple[str, int, int]) -> list[int]:
    verb, key, size = operation
    if verb == "insert":
        return policy.insert(key, size)
    getattr(policy, verb)(key)
    return []


@pytest.mark.parametrize("name", ALL)
@given(operations)
def test_every_policy_agrees_with_a_plain_account_of_what_is_resident(name: str, steps: list[tuple[str, int, int]]):
    policy: EvictionPolicy[int] = make_policy(name, CAPACITY)
    resident: dict[int, int] = {}
    for step in steps:
        verb, key, size = step
        evicted = apply(policy, step)
        if verb == "insert":
            resident[key] = size
        elif verb == "remove":
            resident.pop(key, None)
        assert len(evicted) == len(set(evicted))
        for gone in evicted:
            del resident[gone]  # only what was resident (or the newcomer) can be evicted
        assert {k for k in range(31) if k in policy} == set(resident)  # no key lost, none kept
        assert len(policy) == len(resident)
        assert policy.used == sum(resident.values()) <= policy.capacity == CAPACITY


@pytest.mark.parametrize("name", ALL)
@given(st.lists(st.tuples(keys, st.integers(1, CAPACITY)), max_size=100))
def test_nothing_is_evicted_while_there_is_room_and_a_fitting_newcomer_always_stays(name: str, inserts):
    policy: EvictionPolicy[int] = make_policy(name, CAPACITY)
    for key, size in inserts:
        policy.remove(key)
        had_room = policy.used + size <= CAPACITY
        evicted = policy.insert(key, size)
        assert key in policy
        assert key not in evicted
        assert not (had_room and evicted)


@given(operations)
def test_lru_equals_the_textbook(steps: list[tuple[str, int, int]]):
    policy: Lru[int] = Lru(CAPACITY)
    model: OrderedDict[int, int] = OrderedDict()  # coldest first
    for step in steps:
        verb, key, size = step
        expected: list[int] = []
        if verb == "insert" and size > CAPACITY:
            model.pop(key, None)
            expected.append(key)
        elif verb == "insert":
            others = sum(model.values()) - model.get(key, 0)
            if key in model:
                model[key] = size
            while others + size > CAPACITY:
                victim, freed = next(iter(model.items()))
                del model[victim]
                expected.append(victim)
                if victim == key:
                    break
                others -= freed
            if key not in expected:
                model[key] = size
        elif verb == "touch" and key in model:
            model.move_to_end(key)
        elif verb == "remove":
            model.pop(key, None)
        assert apply(policy, step) == expected
        assert {k for k in range(31) if k in policy} == set(model)


@given(st.lists(keys, max_size=200))
def test_sieve_equals_its_definition(requests: list[int]):
    """Against a list-based rewrite of the paper's algorithm 1, with unit sizes."""
    capacity = 6
    policy: Sieve[int] = Sieve(capacity)
    queue: list[list] = []  # [key, visited], newest first
    hand = -1
    for key in requests:
        found = next((node for node in queue if node[0] == key), None)
        if found:
            found[1] = True
            policy.touch(key)
            continue
        expected = []
        if len(queue) == capacity:
            at = hand if hand >= 0 else len(queue) - 1
            while queue[at][1]:
                queue[at][1] = False
                at = at - 1 if at > 0 else len(queue) - 1
            expected = [queue.pop(at)[0]]
            hand = at - 1
        queue.insert(0, [key, False])
        hand = hand + 1 if hand >= 0 else hand
        assert policy.insert(key, 1) == expected


def test_sieve_keeps_what_was_visited_and_moves_on_from_where_it_stopped():
    policy: Sieve[str] = Sieve(4)
    for key in "abcd":
        policy.insert(key, 1)
    policy.touch("a")
    policy.touch("c")
    assert policy.insert("e", 1) == ["b"]  # a is spared and loses its mark
    assert policy.insert("f", 1) == ["d"]  # the hand goes on past c, not back to a
    assert policy.insert("g", 1) == ["e"]
    assert all(key in policy for key in "acfg")


@pytest.mark.parametrize("policy", [S3Fifo(100), Sieve(100)], ids=["s3fifo", "sieve"])
def test_a_scan_does_not_flush_what_is_popular(policy: EvictionPolicy[str]):
    for key in range(50):
        policy.insert(f"popular-{key}", 1)
        policy.touch(f"popular-{key}")
        policy.touch(f"popular-{key}")
    for key in range(1000):
        policy.insert(f"scan-{key}", 1)
    assert sum(f"popular-{key}" in policy for key in range(50)) == 50


def test_a_scan_flushes_lru():
    policy: Lru[str] = Lru(100)
    policy.insert("popular", 1)
    policy.touch("popular")
    for key in range(100):
        policy.insert(f"scan-{key}", 1)
    assert "popular" not in policy


def test_s3fifo_lets_back_into_main_what_the_ghost_remembers():
    policy: S3Fifo[str] = S3Fifo(10)
    for key in range(9):
        policy.insert(f"main-{key}", 1)
        policy.touch(f"main-{key}")
        policy.touch(f"main-{key}")
    for key in range(3):
        policy.insert(f"once-{key}", 1)
    assert "once-0" not in policy
    policy.insert("once-0", 1)  # its second time
    for key in range(5):
        policy.insert(f"scan-{key}", 1)
    assert "once-0" in policy


def test_s3fifo_does_not_let_one_hit_ride_forever():
    policy: S3Fifo[str] = S3Fifo(10)
    policy.insert("faded", 1)
    for _ in range(50):
        policy.touch("faded")
    for key in range(100):  # a working set that moves on and is hit each time
        policy.insert(f"new-{key}", 1)
        policy.touch(f"new-{key}")
        policy.touch(f"new-{key}")
    assert "faded" not in policy


@pytest.mark.parametrize("name", ALL)
def test_the_ghost_and_the_queues_are_bounded(name: str):
    policy = make_policy(name, 100)
    for key in range(10_000):
        policy.insert(key, 1)
        if key % 3 == 0:
            policy.touch(key)
        if key % 7 == 0:
            policy.remove(key)
    held = sum(len(value) for value in vars(policy).values() if isinstance(value, dict))
    assert held <= 3 * 100


@pytest.mark.parametrize("name", ALL)
def test_larger_than_the_cache_is_not_admitted_and_flushes_nothing(name: str):
    policy = make_policy(name, 10)
    policy.insert("a", 4)
    assert policy.insert("huge", 11) == ["huge"]
    assert "a" in policy
    assert policy.insert("a", 11) == ["a"]  # nor does its older, smaller self stay
    assert (len(policy), policy.used) == (0, 0)


@pytest.mark.parametrize("name", ALL)
def test_capacity_zero_admits_nothing(name: str):
    policy = make_policy(name, 0)
    assert policy.insert("a", 1) == ["a"]
    assert policy.used == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_byte_are_refused(name: str, size: int):
    with pytest.raises(ValueError, match="at least 1 byte"):
        make_policy(name, 10).insert("a", size)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'mru'; known: s3fifo, sieve, lru"):
        make_policy("mru", 10)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        make_policy("lru", -1)
