"""Token buckets."""

import math

from policies.limits import Bucket


def test_a_minutes_worth_at_once_then_at_the_rate() -> None:
    bucket = Bucket(60, now=0)
    assert [bucket.take(1, 0) for _ in range(60)] == [0.0] * 60
    assert bucket.take(1, 0) == 1.0, "one flows in each second"
    assert bucket.take(1, 0.5) == 0.5
    assert bucket.take(1, 1.0) == 0.0


def test_it_never_holds_more_than_a_minutes_worth() -> None:
    bucket = Bucket(6, now=0)
    assert bucket.take(7, 1e6) > 0
    assert bucket.take(6, 1e6) == 0


def test_spending_after_the_fact_makes_later_callers_wait() -> None:
    bucket = Bucket(60, now=0)
    bucket.spend(90, 0)
    assert bucket.take(0, 0) == 30
    assert bucket.take(0, 30) == 0


def test_a_rate_of_nothing_lets_nobody_in() -> None:
    assert Bucket(0, now=0).take(1, 5) == math.inf


def test_at_another_rate_it_keeps_what_it_holds_as_far_as_that_fits() -> None:
    bucket = Bucket(60, now=0)
    bucket.take(50, 0)
    bucket.at_rate(120, 5)
    assert bucket.take(15, 5) == 0, "ten were left and five had flowed in"
    assert bucket.take(2, 5) == 1.0
    bucket.at_rate(6, 60)
    assert bucket.take(7, 60) > 0
    assert bucket.take(6, 60) == 0
