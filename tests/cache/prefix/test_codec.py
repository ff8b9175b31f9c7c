"""A stored block is read back bit for bit, or not at all (O-58, O-59, O-62)."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.prefix.blocks import Block, chain
from cache.prefix.codec import BadBlock, Codec, tenant_tag

LAYOUT, TENANT = b"L" * 32, b"tenant-secret"
CODEC = Codec(LAYOUT, 64)
BLOCKS = chain(list(range(8)), 4, salt=TENANT)
PAYLOAD = bytes(range(64))


def encode(
    block: Block = BLOCKS[1], payload: bytes = PAYLOAD, *, codec: Codec = CODEC, tenant: bytes = TENANT
) -> bytes:
    record, view = codec.allocate(block, tenant)
    view[:] = payload
    codec.seal(record)
    return bytes(record)


def refusal(record: bytes, block: Block = BLOCKS[1], *, codec: Codec = CODEC, tenant: bytes = TENANT) -> str:
    with pytest.raises(BadBlock) as caught:
        codec.decode(record, block, tenant)
    return caught.value.reason


@given(st.binary(min_size=64, max_size=64), st.sampled_from(BLOCKS))
def test_what_was_stored_comes_back(payload, block):
    record = encode(block, payload)
    assert CODEC.decode(record, block, TENANT) == payload
    assert len(record) == CODEC.record_bytes(block, TENANT)


def test_golden_record():
    """The stored form of version 1; a change of it needs a new `VERSION`, or stores keep unreadable records."""
    record = encode(Block(b"h" * 16, b"d" * 32, None, 0, b"\1\0\0\0"), b"", codec=Codec(b"L", 0))
    assert record.hex() == (
        "57474b56010000007c000000000000000000000005c86f92fd39275b93e2ca754ef79b846c010000004c74100000005b"
        "e7e746c03162aeeb817dd58132709469040000000000000070000000006b04000000010000007820000000e3b0c44298"
        "fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855642000000064646464646464646464646464646464"
        "64646464646464646464646464646464"
    )


@given(st.data())
def test_any_flipped_bit_is_found(data):
    record = bytearray(encode())
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    refusal(bytes(record))


@given(st.integers(0, len(encode()) - 1))
def test_a_record_cut_anywhere_is_found(length):
    refusal(encode()[:length])


@given(st.binary(max_size=400))
def test_anything_else_is_found(data):
    refusal(data)
    refusal(encode() + data[:1] + b"x")


@given(st.integers(0, len(encode())), st.integers(0, len(encode())))
def test_a_run_of_zeros_is_found(one, other):
    start, stop = sorted((one, other))
    record = encode()[:start] + bytes(stop - start) + encode()[stop:]
    if record != encode():
        refusal(record)


def test_a_record_that_was_never_sealed_is_not_readable():
    record, view = CODEC.allocate(BLOCKS[1], TENANT)
    view[:] = PAYLOAD
    assert refusal(bytes(record)) == "checksum"


OTHERS = {
    "layout": encode(codec=Codec(b"M" * 32, 64)),
    "tenant": encode(tenant=b"other"),
    "index": encode(Block(BLOCKS[1].hash, BLOCKS[1].digest, BLOCKS[1].parent, 2, BLOCKS[1].tokens)),
    "parent": encode(Block(BLOCKS[1].hash, BLOCKS[1].digest, b"p" * 32, 1, BLOCKS[1].tokens)),
    "tokens": encode(Block(BLOCKS[1].hash, BLOCKS[1].digest, BLOCKS[1].parent, 1, b"\1\0\0\0" * 4)),
    "extra": encode(Block(BLOCKS[1].hash, BLOCKS[1].digest, BLOCKS[1].parent, 1, BLOCKS[1].tokens, b"x")),
    "digest": encode(Block(BLOCKS[1].hash, b"d" * 32, BLOCKS[1].parent, 1, BLOCKS[1].tokens)),
    "size": encode(payload=b"1", codec=Codec(LAYOUT, 1)),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_sound_record_of_something_else_is_refused_by_name(field):
    assert refusal(OTHERS[field]) == f"foreign-{field}"


def test_an_unknown_version_and_another_format_are_refused_by_name():
    record = bytearray(encode())
    record[4] = 2
    assert refusal(bytes(record)) == "version"
    assert refusal(os.urandom(500)) == "magic"


def test_the_salt_of_a_tenant_is_never_stored():
    assert BLOCKS[0].extra and TENANT in BLOCKS[0].extra
    record = encode(BLOCKS[0])
    assert TENANT not in record
    assert tenant_tag(TENANT) in record and tenant_tag(b"") != tenant_tag(TENANT)
