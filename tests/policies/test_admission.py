"""Counting sightings in a fixed amount of memory."""

from hashlib import sha256

import pytest

from policies.admission import Sightings


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()[:16]


def test_it_counts_how_often_a_key_was_seen() -> None:
    seen = Sightings()
    assert seen.count(key(1)) == 0
    assert [seen.add(key(1)) for _ in range(3)] == [1, 2, 3]
    assert (seen.count(key(1)), seen.count(key(2))) == (3, 0)


def test_counts_are_never_too_low_and_rarely_too_high() -> None:
    seen = Sightings(width=1024)
    for number in range(2000):
        for _ in range(1 + number % 2):
            seen.add(key(number))
    counts = [seen.count(key(number)) - (1 + number % 2) for number in range(2000)]
    assert min(counts) == 0
    assert sum(count > 0 for count in counts) < 800, "4000 sightings in 4096 counters are far too many for it"


def test_what_was_seen_long_ago_fades() -> None:
    seen = Sightings(width=64)
    for _ in range(8):
        seen.add(key(0))
    for _ in range(640 - 8):
        seen.add(key(1))
    assert seen.count(key(0)) == 4


def test_a_count_stops_before_it_overflows() -> None:
    seen = Sightings()
    assert [seen.add(key(0)) for _ in range(300)][-1] == 255


def test_the_width_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Sightings(width=100)
