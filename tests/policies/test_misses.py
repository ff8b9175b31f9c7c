"""Why a cache missed: one cause for each repeated request."""

from __future__ import annotations

from policies.misses import SAMPLED, Misses, Seen


def seen(exact: bytes = b"k", alike: int = 1, tenant: str = "t1", **fields: int) -> Seen:
    return Seen(exact, alike, tenant, fields)


def test_what_nobody_has_asked_is_nobodys_loss() -> None:
    misses = Misses()
    assert misses.cause(seen(), 0.0) == "first"
    assert misses.cause(seen(b"other", 2), 0.0) == "first"


def test_what_was_not_kept() -> None:
    misses = Misses()
    misses.cause(seen(), 0.0)
    assert misses.cause(seen(), 1.0) == "not stored"


def test_what_was_kept_is_lost_to_time_or_to_room() -> None:
    misses = Misses()
    misses.cause(seen(), 0.0)
    misses.stored(b"k", 100.0)
    assert misses.cause(seen(), 99.0) == "gone"
    assert misses.cause(seen(), 100.0) == "expired"


def test_the_same_of_another_tenant() -> None:
    misses = Misses()
    misses.cause(seen(temperature=0), 0.0)
    assert misses.cause(seen(b"k2", tenant="t2", temperature=0), 1.0) == "tenancy"


def test_the_same_with_other_fields_names_them() -> None:
    misses = Misses()
    misses.cause(seen(max_tokens=10, seed=1), 0.0)
    assert misses.cause(seen(b"k2", max_tokens=20, seed=1, top_p=1), 1.0) == "fields"
    assert misses.fields == {"max_tokens": 1, "top_p": 1}


def test_only_what_an_upstream_had_to_compute_is_counted() -> None:
    misses = Misses()
    cause = misses.cause(seen(), 0.0)
    assert not misses.causes
    misses.count(cause)
    assert misses.causes == {"first": 1}


def test_it_forgets_the_oldest() -> None:
    misses = Misses(most=10)
    for number in range(50):
        misses.cause(seen(b"%d" % number, number), 0.0)
    assert misses.cause(seen(b"45", 45), 1.0) == "not stored"
    assert misses.cause(seen(b"3", 3), 1.0) == "first"


def test_repeats_of_what_takes_no_part_are_estimated_from_a_sample() -> None:
    misses = Misses()
    for request in range(16_000):
        for _ in range(1 + request % 3):
            misses.uncacheable(request)
    assert misses.uncacheable_repeats % SAMPLED == 0
    assert abs(misses.uncacheable_repeats - 16_000) < 1_000
