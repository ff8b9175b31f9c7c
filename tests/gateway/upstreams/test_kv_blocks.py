"""KV events: both spellings are read, chains follow parents, and whatever is hostile is counted and left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.kv_blocks import BadEvent, Mirror, block_chain, block_root, read_batch

pack: Callable[[Any], bytes] = msgpack.Packer().pack


def stored(first: int, count: int = 1, parent: Any = None, size: int = 4, **more: Any) -> dict[str, Any]:
    """Blocks named 100 + n; block n holds the tokens 4n … 4n + 3."""
    return {
        "type": "BlockStored",
        "block_hashes": [100 + first + i for i in range(count)],
        "parent_block_hash": parent,
        "token_ids": list(range(first * size, (first + count) * size)),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def batch(*events: Any, ts: float = 1.0) -> bytes:
    return pack({"ts": ts, "events": list(events), "data_parallel_rank": 0})


def apply(mirror: Mirror, *events: Any) -> list[tuple[int, list[int], bool]]:
    return mirror.apply(read_batch(batch(*events))).steps


CHAIN = block_chain(range(100), 4, block_root([]))


def test_blocks_get_the_names_that_the_router_gives_to_a_prompt():
    assert apply(Mirror(1000), stored(0, 3)) == [(0, CHAIN[:3], True)]


def test_a_chain_goes_on_from_its_parent_in_a_later_batch():
    mirror = Mirror(1000)
    apply(mirror, stored(0, 3))
    assert apply(mirror, stored(3, 2, parent=102)) == [(0, CHAIN[3:5], True)]


def test_arrays_are_read_as_maps_are():
    event = ["BlockStored", [100, 101], None, list(range(8)), 4, None, "GPU"]
    mirror = Mirror(1000)
    assert mirror.apply(read_batch(pack([1.0, [event, ["BlockRemoved", [101], "GPU"]], 0]))).steps == [
        (0, CHAIN[:2], True),
        (0, [CHAIN[1]], False),
    ]


def test_byte_names_are_names_too():
    mirror = Mirror(1000)
    event = stored(0, 2) | {"block_hashes": [b"a" * 32, b"b" * 32]}
    assert apply(mirror, event) == [(0, CHAIN[:2], True)]
    assert apply(mirror, {"type": "BlockRemoved", "block_hashes": [b"b" * 32]}) == [(0, [CHAIN[1]], False)]


def test_a_salt_and_an_adapter_make_other_chains():
    plain = apply(Mirror(9), stored(0, 2))[0][1]
    salted = apply(Mirror(9), stored(0, 2, extra_keys=[["s"], None]))[0][1]
    adapter = apply(Mirror(9), stored(0, 2, lora_name="s"))[0][1]
    assert len({*plain, *salted, *adapter}) == 6
    assert salted == block_chain(range(9), 4, block_root(["s"]))


def test_extra_keys_in_the_middle_change_what_follows():
    mirror = Mirror(9)
    assert apply(mirror, stored(0, 2, extra_keys=[None, ["image"]]))[0][1][1] != CHAIN[1]


def test_tiers_are_told_apart_and_a_parent_may_be_on_another():
    mirror = Mirror(1000)
    apply(mirror, stored(0, 1))
    assert apply(mirror, stored(1, 1, parent=100, medium="CPU")) == [(1, [CHAIN[1]], True)]
    assert apply(mirror, stored(2, 1, parent=101, medium="lmcache")) == [(2, [CHAIN[2]], True)]
    assert apply(mirror, {"type": "BlockRemoved", "block_hashes": [101], "medium": "GPU"}) == []
    assert apply(mirror, {"type": "BlockRemoved", "block_hashes": [101], "medium": "CPU"}) == [(1, [CHAIN[1]], False)]


def test_a_removal_of_something_unknown_changes_nothing():
    mirror = Mirror(1000)
    assert apply(mirror, {"type": "BlockRemoved", "block_hashes": [1, 2]}) == []
    assert not mirror.bad


def test_clearing_comes_before_what_follows_it():
    mirror = Mirror(1000)
    apply(mirror, stored(0, 3))
    changes = mirror.apply(read_batch(batch(stored(3, 1, parent=102), {"type": "AllBlocksCleared"}, stored(0, 1))))
    assert (changes.cleared, changes.steps) == (True, [(0, CHAIN[:1], True)])
    assert len(mirror) == 1


def test_an_unknown_parent_is_an_orphan():
    mirror = Mirror(1000)
    assert apply(mirror, stored(3, 1, parent=999)) == []
    assert (mirror.orphans, mirror.bad) == (1, {"unknown parent": 1})


def test_a_name_that_is_given_to_other_tokens_no_longer_stands_for_the_first():
    mirror, held = Mirror(1000), set[int]()
    for n in range(5):
        for _, names, added in apply(mirror, stored(0, 1, token_ids=list(range(4 * n, 4 * n + 4)))):
            (held.update if added else held.difference_update)(names)
    assert (len(mirror), held) == (1, set(block_chain(range(16, 21), 4, block_root([]))))


def test_it_holds_no_more_than_its_bound():
    mirror = Mirror(100)
    steps = [step for n in range(50) for step in apply(mirror, stored(n * 10, 10))]
    assert len(mirror) <= 100
    held = {name for _, names, added in steps if added for name in names}
    held -= {name for _, names, added in steps if not added for name in names}
    assert len(held) == len(mirror)


@pytest.mark.parametrize(
    "event",
    [
        stored(0) | {"token_ids": [1, 2, 3]},
        stored(0) | {"token_ids": "abcd"},
        stored(0) | {"token_ids": [1, 2, 3, -4]},
        stored(0) | {"token_ids": [1, 2, 3, 1 << 32]},
        stored(0) | {"token_ids": [1, 2, 3, "4"]},
        stored(0) | {"token_ids": [1, 2, 3, 1.5]},
        stored(0) | {"block_size": 0},
        stored(0) | {"block_size": 1 << 40},
        stored(0) | {"block_size": True},
        stored(0) | {"block_size": None},
        stored(0) | {"block_hashes": []},
        stored(0) | {"block_hashes": [[1]]},
        stored(0) | {"block_hashes": None},
        stored(0) | {"block_hashes": ["100"]},
        stored(0) | {"block_hashes": [bytes(1 << 20)]},
        {"type": "BlockRemoved"},
        {"type": "Surprise"},
        {"no": "type"},
        ["BlockStored"],
        [],
        7,
        None,
    ],
)
def test_a_bad_event_is_counted_and_what_stands_beside_it_is_taken(event):
    mirror = Mirror(1000)
    assert apply(mirror, event, stored(0, 1)) == [(0, CHAIN[:1], True)]
    assert sum(mirror.bad.values()) == 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        pack(5),
        pack({}),
        pack([1.0]),
        pack({"ts": "now", "events": []}),
        pack({"ts": float("nan"), "events": []}),
        pack({"ts": float("inf"), "events": []}),
        pack({"ts": 1 << 63, "events": []}),
        pack({"ts": -1.0, "events": []}),
        pack({"ts": 1.0, "events": {}}),
        pack({"ts": 1.0, "events": [None] * 100_001}),
        b"\0" * (17 * 1024 * 1024),
    ],
)
def test_bytes_that_are_no_batch_are_refused(payload):
    with pytest.raises(BadEvent):
        read_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(payload):
    try:
        Mirror(10).apply(read_batch(payload))
    except BadEvent:
        pass


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*stored(0), "extra_keys", "lora_name"]), JUNK), st.booleans())
def test_any_fields_are_taken_or_counted(fields, over):
    event = {**stored(0, 2), **fields} if over else fields
    Mirror(10).apply(read_batch(batch(event)))
