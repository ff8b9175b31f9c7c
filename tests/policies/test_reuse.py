"""Specification of `policies.reuse`: chances of reuse by age, and the worth that follows from them."""

from itertools import pairwise

import pytest

from policies.reuse import AGE_STARTS, BUCKETS, ReuseCurve

MANY = 10**9


def learned(*chances: float) -> ReuseCurve:
    """A curve that has seen these chances of reuse in its first buckets, and no reuse in the others."""
    curve = ReuseCurve()
    for bucket in range(BUCKETS):
        chance = chances[bucket] if bucket < len(chances) else 0
        curve.observe(bucket, MANY, int(MANY * chance))
    curve.learn()
    return curve


def test_buckets_of_ages_are_single_epochs_first_and_a_third_of_the_age_later():
    assert AGE_STARTS[:9] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert all(end - start == max(1, start // 3) for start, end in pairwise(AGE_STARTS))


def test_worth_is_expected_uses_per_epoch_kept():
    # Half are used in the first epoch, and so leave it half-way on average: 0.5 uses for 0.75 epochs.
    assert learned(0.5).worth[0] == pytest.approx(0.5 / 0.75)


def test_what_is_not_yet_due_is_worth_the_way_there():
    # Nothing in the first two epochs, then certain reuse: 1 use for 2.5 epochs; a block that got there: 1 for 0.5.
    curve = learned(0, 0, 1)
    assert curve.worth[:3] == pytest.approx([1 / 2.5, 1 / 1.5, 1 / 0.5], rel=1e-6)


def test_what_will_not_be_used_any_more_is_worth_nothing():
    assert learned(0.5).worth[1:] == pytest.approx([0] * (BUCKETS - 1), abs=1e-6)


def test_planning_stops_where_going_on_would_not_pay():
    # A second chance that is remote does not lower the worth of the first, near one.
    assert learned(0.5, 0, 0, 0, 0, 0, 0.01).worth[0] == pytest.approx(0.5 / 0.75)


def test_before_anything_is_known_the_young_are_worth_more():
    worth = ReuseCurve().worth
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > worth[-1] > 0


def test_an_age_never_seen_is_judged_by_the_one_before():
    curve = ReuseCurve()
    for bucket in range(3):
        curve.observe(bucket, MANY, MANY // 100)
    curve.learn()
    assert curve.worth[3] == pytest.approx(curve.worth[2])


def test_what_was_seen_fades():
    curve = ReuseCurve()
    curve.observe(0, MANY, 0)
    curve.learn(memory=0.0)
    curve.observe(0, MANY, MANY // 2)
    curve.learn()
    assert curve.worth[0] == pytest.approx(0.5 / 0.75, rel=1e-3)
