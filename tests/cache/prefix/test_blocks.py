"""A block's name is a function of everything its KV depends on, and of nothing else (O-57, O-59, O-60, O-61)."""

import os
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.prefix.blocks import LayoutId, chain, chain_hash, extras, pack, token_bytes

TOKENS = list(range(1000, 1012))
LAYOUT = LayoutId(
    weights=b"w" * 32,
    dtype="float32",
    layers=30,
    kv_heads=3,
    head_size=64,
    block_size=32,
    rope={"theta": 1e5, "factor": 1.0},
)

# Changing one of these strands every block a running deployment has stored: raise the version tag in `blocks.py` too.
GOLDEN_CHAIN = [
    "0c9da6c0ebbee9c78a4c9a5845faa32bf615763d8f61866929684d8a045df42c",
    "33e6e05fcbfdcd68d6fc58e606af2c07e48179672b7785de961a68f2754d3dff",
    "0f5cbaeef6978120231ff825e83ac29123aea3fc9c88b28eac6bc1613dbb542a",
]
GOLDEN_LAYOUT = "164e1a88336dcfee01fc7fcf6c41b92ec8d653229c0515e73e420a328b02f0e7"


def digests(**options) -> list[bytes]:
    return [block.digest for block in chain(TOKENS, 4, **options)]


def test_golden_digests():
    blocks = chain(TOKENS, 4, salt=b"tenant", adapter="lora@2", media=[(5, b"\x01" * 32)])
    assert [block.digest.hex() for block in blocks] == GOLDEN_CHAIN
    assert LAYOUT.digest.hex() == GOLDEN_LAYOUT


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_every_process_computes_the_same_digests(seed):  # O-61
    program = (
        "from tests.cache.prefix.test_blocks import *;"
        "blocks = chain(TOKENS, 4, salt=b'tenant', adapter='lora@2', media=[(5, bytes([1]) * 32)]);"
        "print([b.digest.hex() for b in blocks] + [LAYOUT.digest.hex()])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == str([*GOLDEN_CHAIN, GOLDEN_LAYOUT])


def test_adapter_and_salt_never_fall_together():  # O-57
    variants = [
        digests(),
        digests(adapter="S"),
        digests(salt=b"S"),
        digests(adapter=""),
        digests(adapter="a|b"),
        digests(adapter="a", salt=b"b"),
        digests(adapter="b", salt=b"a"),
        digests(adapter="ab"),
        digests(salt=b"ab"),
        digests(media=[(0, b"S")]),
    ]
    for one, other in combinations(variants, 2):
        assert not set(one) & set(other)


def test_a_medium_changes_the_block_it_begins_in_and_all_after_it():
    plain, image, other = digests(), digests(media=[(5, b"A" * 32)]), digests(media=[(5, b"B" * 32)])
    assert plain[0] == image[0] == other[0]
    for first, second in combinations([plain, image, other], 2):
        assert not set(first[1:]) & set(second[1:])
    assert digests(media=[(6, b"A" * 32)])[1] != image[1]


def test_the_order_in_which_media_are_named_does_not_matter():
    media = [(5, b"A" * 32), (1, b"B" * 32), (6, b"C" * 32)]
    assert digests(media=media) == digests(media=media[::-1])


@pytest.mark.parametrize("at", [-1, 12])
def test_a_medium_outside_the_prompt_is_refused_rather_than_left_out(at):
    with pytest.raises(ValueError, match="outside"):
        chain(TOKENS, 4, media=[(at, b"A")])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_out_of_range_is_refused(token):
    with pytest.raises(ValueError, match="token ids"):
        chain([token] * 4, 4)


@pytest.mark.parametrize("length, blocks", [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_a_name(length, blocks):
    assert len(chain(TOKENS[:length], 4)) == blocks


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.data())
def test_a_prefix_shares_its_blocks_and_nothing_after_the_first_change(tokens, block_size, data):
    blocks = chain(tokens, block_size)
    assert [block.index for block in blocks] == list(range(len(tokens) // block_size))
    for block, parent in zip(blocks, [None, *blocks], strict=False):
        assert block.parent == (parent and parent.digest)
        assert block.hash == block.digest[:16]
        assert block.lineage() == blocks[: block.index + 1]
    if tokens:
        at = data.draw(st.integers(0, len(tokens) - 1))
        changed = chain([*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]], block_size)
        first = at // block_size
        assert blocks[:first] == changed[:first]
        assert not {b.digest for b in blocks[first:]} & {b.digest for b in changed}


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 6))
def test_a_chain_continued_equals_a_chain_from_scratch(tokens, known):
    whole = chain(tokens, 4, salt=b"s", media=[(0, b"m")] if tokens else [])
    begun = chain(tokens, 4, salt=b"s", media=[(0, b"m")] if tokens else [], known=whole[:known])
    assert begun == whole


def test_prompts_share_the_blocks_of_a_common_beginning_and_keep_no_others_alive():
    one, other = chain(TOKENS, 4), chain([*TOKENS[:8], 1, 2, 3, 4], 4)
    assert one[0] is other[0] and one[1] is other[1] is other[2].previous
    tail = weakref.ref(one[2])
    del one
    assert tail() is None


def test_a_weak_hash_finds_but_only_equality_confirms():  # O-58
    weak = [b for seed in range(40) for b in chain([seed] * 8, 4, hash_function=lambda digest: bytes([digest[0] & 15]))]
    assert len({b.hash for b in weak}) <= 16
    assert all(one != other for one, other in combinations(weak, 2))
    suffix = [chain([head] * 4 + [7] * 4, 4, hash_function=lambda digest: b"x")[1] for head in (1, 2)]
    assert suffix[0].tokens == suffix[1].tokens and suffix[0] != suffix[1]


fields = st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.binary(max_size=12)), max_size=4)


@given(fields, fields)
def test_packing_is_injective(one, other):
    assert (pack(one) == pack(other)) == (one == other)


def test_token_bytes_are_little_endian_on_every_machine():
    assert token_bytes([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


def test_the_root_is_not_a_child_of_an_empty_parent():
    assert chain_hash(None, b"t") != chain_hash(b"", b"t")
    assert extras() == b""


CHANGES = [
    {"weights": b"v" * 32},
    {"dtype": "bfloat16"},
    {"layers": 31},
    {"kv_heads": 4},
    {"head_size": 32},
    {"block_size": 8},
    {"rope": {"theta": 1e5, "factor": 2.0}},
    {"rope": {"theta": 1e5, "factor": 1}},
    {"rope": {"theta": 1e5, "factor": "1.0"}},
    {"rope": {"theta": 1e5, "factor": None}},
    {"rope": {"theta": 1e5}},
    {"numerics": "chunk=256"},
    {"codec_version": 2},
]


def test_whatever_changes_the_numbers_changes_the_layout():  # O-59, O-60
    layouts = [LAYOUT, *(replace(LAYOUT, **change) for change in CHANGES)]
    assert len({layout.digest for layout in layouts}) == len(layouts)


def test_the_order_of_rope_parameters_does_not_matter():
    assert replace(LAYOUT, rope={"factor": 1.0, "theta": 1e5}).digest == LAYOUT.digest


def test_a_layout_without_weights_names_nothing():
    with pytest.raises(ValueError, match="weights"):
        _ = replace(LAYOUT, weights=b"").digest
