"""Intervals must hold the truth as often as they say."""

from __future__ import annotations

import random

import pytest

from policies.savings import FEWEST, Interval, mean, share


@pytest.mark.parametrize(("n", "t"), [(5, 2.776), (6, 2.571), (11, 2.228), (31, 2.042), (1001, 1.962)])
def test_the_width_is_students(n: int, t: float) -> None:
    values = [float(number) for number in range(n)]
    found = mean(values)
    assert found is not None
    deviation = (sum((value - (n - 1) / 2) ** 2 for value in values) / (n - 1)) ** 0.5
    assert (found.high - found.value) / (deviation / n**0.5) == pytest.approx(t, rel=3e-3)


def test_too_few_values_say_nothing() -> None:
    assert mean([1.0] * (FEWEST - 1)) is None
    assert mean([1.0] * FEWEST) == Interval(1.0, 1.0, 1.0)
    assert share(0, 0) is None


def test_the_interval_of_a_mean_holds_the_truth_in_about_95_of_100_samples() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        found = mean([rng.gauss(10, 3) for _ in range(12)])
        assert found is not None
        held += found.low <= 10 <= found.high
    assert 0.935 < held / 2000 < 0.965


@pytest.mark.parametrize("truth", [0.5, 0.9, 0.99])
def test_the_interval_of_a_share_holds_the_truth_near_one_too(truth: float) -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(2000):
        found = share(sum(rng.random() < truth for _ in range(100)), 100)
        assert found is not None
        assert 0 <= found.low <= found.value <= found.high <= 1
        held += found.low <= truth <= found.high
    assert held / 2000 > 0.92


def test_all_that_agreed_is_no_proof_that_all_will() -> None:
    found = share(20, 20)
    assert found is not None
    assert found.high == 1.0
    assert found.low == pytest.approx(0.839, abs=0.001)


def test_arithmetic() -> None:
    assert Interval(3, 2, 5).less(1).times(10) == Interval(20, 10, 40)
