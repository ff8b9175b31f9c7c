"""Entries in their binary form: a round trip loses nothing, and nothing that is damaged or foreign is believed."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.response.entry import FORMAT, BadEntry, Entry, decode, encode

moments = st.floats(0, 4e9)
entries = st.builds(
    Entry,
    fingerprint=st.binary(min_size=32, max_size=32),
    born=moments,
    expires=moments,
    kept_until=moments,
    dialect=st.text(max_size=10),
    model=st.text(max_size=20),
    upstream=st.text(max_size=20),
    generations=st.dictionaries(st.text(max_size=10), st.integers(0, 2**53), max_size=5),
    message=st.binary(max_size=200),
    usage=st.dictionaries(st.sampled_from(["prompt", "output", "cached"]), st.integers(0, 2**40)),
)


@given(entries)
def test_round_trip(entry: Entry) -> None:
    assert decode(encode(entry), entry.fingerprint) == entry


@given(entries, st.data())
def test_one_flipped_bit_is_never_believed(entry: Entry, data: st.DataObject) -> None:
    stored = bytearray(encode(entry))
    position = data.draw(st.integers(0, len(stored) * 8 - 1))
    stored[position // 8] ^= 1 << position % 8
    with pytest.raises(BadEntry):
        decode(bytes(stored), entry.fingerprint)


@given(entries, st.data())
def test_a_cut_or_lengthened_entry_is_never_believed(entry: Entry, data: st.DataObject) -> None:
    stored = encode(entry)
    with pytest.raises(BadEntry):
        decode(stored[: data.draw(st.integers(0, len(stored) - 1))], entry.fingerprint)
    with pytest.raises(BadEntry):
        decode(stored + b"x", entry.fingerprint)


@given(entries)
def test_an_entry_of_another_request_is_never_believed(entry: Entry) -> None:
    other = bytes([entry.fingerprint[0] ^ 1]) + entry.fingerprint[1:]
    with pytest.raises(BadEntry, match="other request"):
        decode(encode(entry), other)


@pytest.mark.parametrize("change", [-1, 1])
def test_other_format_versions_are_refused(change: int) -> None:
    entry = Entry(b"f" * 32, 0, 1, 1, "chat", "m", "u", {}, b"{}")
    stored = bytearray(encode(entry))
    stored[3] = FORMAT + change
    with pytest.raises(BadEntry, match="version"):
        decode(bytes(stored), entry.fingerprint)


@pytest.mark.parametrize("data", [b"", b"W", b"WGE", b"{}", b'{"choices":[]}', pickle.dumps({"a": 1})])
def test_what_is_not_an_entry_is_refused(data: bytes) -> None:
    with pytest.raises(BadEntry):
        decode(data, b"f" * 32)
