"""Ejection and slow return of an upstream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.health import FAILURES, FIRST_BREAK, FIRST_SHARE, LONGEST_BREAK, RETURN, Health


def ejected(now: float = 100.0) -> Health:
    health = Health()
    for _ in range(FAILURES):
        health.failed(now)
    return health


def test_a_few_failures_in_a_row_eject_and_a_success_between_them_does_not():
    health = Health()
    for _ in range(5):
        assert [health.failed(100.0) for _ in range(FAILURES - 1)] == [False] * (FAILURES - 1)
        health.succeeded(100.0)
    assert health.available(100.0)
    assert [health.failed(100.0) for _ in range(FAILURES)][-1]
    assert not health.available(100.0)


def test_after_its_break_it_is_tried_and_comes_back_by_degrees():
    health = ejected()
    assert not health.available(100.0 + FIRST_BREAK - 0.1)
    now = 100.0 + FIRST_BREAK
    assert health.available(now)
    assert health.share(now) == FIRST_SHARE
    health.succeeded(now)
    assert health.share(now) == pytest.approx(FIRST_SHARE)
    assert health.share(now + RETURN / 2) == pytest.approx(0.55)
    assert health.share(now + RETURN) == 1.0


def test_a_success_during_the_break_does_not_end_it():
    health = ejected()
    health.succeeded(100.5)
    assert not health.available(100.5)


def test_a_relapse_ejects_at_once_and_for_longer():
    health = ejected()
    health.succeeded(102.0)
    assert health.failed(103.0)
    assert not health.available(103.0 + FIRST_BREAK)
    assert health.available(103.0 + 2 * FIRST_BREAK)


def test_breaks_are_bounded():
    health = ejected()
    now = 100.0
    for _ in range(20):
        now += LONGEST_BREAK
        health.failed(now)
    assert health.available(now + LONGEST_BREAK)


def test_long_good_conduct_is_remembered():
    health = ejected()
    health.succeeded(102.0)
    health.succeeded(102.0 + LONGEST_BREAK + 1)
    for _ in range(FAILURES):
        health.failed(300.0)
    assert health.available(300.0 + FIRST_BREAK)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=50))
def test_the_share_is_always_a_share_and_no_break_is_for_ever(steps):
    health, now = Health(), 0.0
    for good, later in steps:
        now += later
        (health.succeeded if good else health.failed)(now)
        assert 0 < health.share(now) <= 1
    assert health.available(now + LONGEST_BREAK)
