"""The in-process store: never more bytes than allowed, never a value past its expiry."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.stores.memory import OVERHEAD, MemoryStore
from tests.cache.stores.conftest import NOW, FakeClock

POLICIES = ["s3fifo", "sieve", "lru"]


def test_a_value_is_found_until_it_expires(clock: FakeClock) -> None:
    store: MemoryStore[str] = MemoryStore(10_000, clock=clock)
    store.set(b"k", "v", size=1, expires=NOW + 10)
    clock.advance(9.999)
    assert store.get(b"k") == "v"
    clock.advance(0.001)
    assert store.get(b"k") is None
    assert len(store) == store.bytes == 0


def test_a_value_that_has_expired_already_is_not_kept_and_ends_the_one_before(clock: FakeClock) -> None:
    store: MemoryStore[str] = MemoryStore(10_000, clock=clock)
    store.set(b"k", "old", size=1, expires=NOW + 10)
    store.set(b"k", "new", size=1, expires=NOW)
    assert store.get(b"k") is None
    assert len(store) == 0


def test_sizes_keys_and_bookkeeping_are_counted(clock: FakeClock) -> None:
    store: MemoryStore[str] = MemoryStore(10_000, clock=clock)
    store.set(b"key", "v", size=100, expires=NOW + 10)
    assert store.bytes == 100 + 3 + OVERHEAD
    store.set(b"key", "v", size=50, expires=NOW + 10)
    assert store.bytes == 50 + 3 + OVERHEAD
    store.delete(b"key")
    store.delete(b"key")
    assert store.bytes == len(store) == 0


def test_a_value_larger_than_the_store_is_not_kept(clock: FakeClock) -> None:
    store: MemoryStore[str] = MemoryStore(10_000, clock=clock)
    store.set(b"small", "v", size=1, expires=NOW + 10)
    store.set(b"large", "v", size=10_001, expires=NOW + 10)
    assert store.get(b"large") is None
    assert store.get(b"small") == "v"


@pytest.mark.parametrize("eviction", POLICIES)
def test_evictions_are_counted(clock: FakeClock, eviction: str) -> None:
    store: MemoryStore[int] = MemoryStore(10 * (OVERHEAD + 10), eviction, clock)
    for i in range(25):
        store.set(b"%02d" % i, i, size=8, expires=NOW + 10)
    assert len(store) == 10
    assert store.evictions == 15


def test_clear_forgets_everything(clock: FakeClock) -> None:
    store: MemoryStore[str] = MemoryStore(10_000, clock=clock)
    store.set(b"k", "v", size=1, expires=NOW + 10)
    store.clear()
    assert store.get(b"k") is None
    assert store.bytes == len(store) == 0
    store.set(b"k", "v", size=1, expires=NOW + 10)
    assert store.get(b"k") == "v"


_KEYS = st.integers(0, 12).map(lambda i: b"k%d" % i)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), _KEYS, st.integers(0, 3000), st.floats(-5, 60)),
        st.tuples(st.just("get"), _KEYS),
        st.tuples(st.just("delete"), _KEYS),
        st.tuples(st.just("advance"), st.floats(0, 30)),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@given(eviction=st.sampled_from(POLICIES), capacity=st.integers(0, 12_000), steps=_STEPS)
@settings(max_examples=150)
def test_any_history_keeps_within_the_bytes_and_never_lies(eviction: str, capacity: int, steps: list[tuple]) -> None:
    """A model that never evicts says what a hit must be; the store may miss, but only ever gives that."""
    clock = FakeClock()
    store: MemoryStore[int] = MemoryStore(capacity, eviction, clock)
    model: dict[bytes, tuple[int, int, float]] = {}  # value, size, expiry
    for number, (step, *arguments) in enumerate(steps):
        if step == "set":
            key, size, lifetime = arguments
            store.set(key, number, size, clock() + lifetime)
            model[key] = (number, size, clock() + lifetime)
        elif step == "get":
            value, _, expires = model.get(arguments[0], (None, 0, 0.0))
            assert store.get(arguments[0]) in ((None, value) if expires > clock() else (None,))
        elif step == "delete":
            store.delete(arguments[0])
            model.pop(arguments[0], None)
        elif step == "clear":
            store.clear()
            model.clear()
        else:
            clock.advance(arguments[0])
        held = {key for key in model if key in store._items}
        assert len(store) == len(held)
        assert store.bytes == sum(model[key][1] + len(key) + OVERHEAD for key in held) <= capacity


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_overhead_counted_for_an_entry_covers_what_python_takes(eviction: str) -> None:
    store: MemoryStore[None] = MemoryStore(4_000 * (OVERHEAD + 16), eviction)
    gc.collect()
    tracemalloc.start()
    for i in range(20_000):
        store.set(i.to_bytes(16, "big"), None, size=0, expires=NOW * 2 + i)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) > 3_000
    assert taken <= store.bytes * 1.05
