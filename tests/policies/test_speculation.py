"""Drafts are as long as they promise to pay, and stop where they do not."""

from __future__ import annotations

import pytest

from policies.speculation import LEAST_GAIN, Chances, RowCost, draft_length


def taught(right: bool, times: int = 50, match: int = 5) -> Chances:
    chances = Chances()
    for _ in range(times):
        chances.learn(match, right)
    return chances


def test_a_chance_is_learned_for_matches_of_like_length_only() -> None:
    chances = taught(True)
    assert chances.of(5) == chances.of(7) > 0.8
    assert chances.of(3) == chances.of(8) == 0.5
    assert taught(False).of(5) < 0.1


def test_a_new_sequence_believes_what_others_met_until_it_knows_better() -> None:
    everyone = taught(True)
    mine = Chances(everyone)
    assert mine.of(5) == everyone.of(5)
    for _ in range(5):
        mine.learn(5, False)
    assert mine.of(5) < 0.4 < everyone.of(5)


def test_what_went_badly_is_tried_again_some_day() -> None:
    chances = taught(False)
    for _ in range(200):
        chances.forget(5)
    assert chances.of(5) > 0.4


@pytest.mark.parametrize(("base", "per_row"), [(0.1, 0.002), (0.03, 0.01), (0.05, 0.0)])
def test_the_cost_of_a_row_is_found_from_passes_of_several_sizes(base: float, per_row: float) -> None:
    cost = RowCost()
    for rows in (1, 4, 8, 2, 6) * 20:
        cost.observe(rows, base + per_row * rows)
    assert cost.per_row == pytest.approx(per_row, abs=1e-9)
    assert cost.seconds(16) == pytest.approx(base + 16 * per_row)
    assert cost.least_chance(1) == pytest.approx(LEAST_GAIN * per_row / (base + per_row), abs=1e-6)


def test_a_pass_that_was_held_up_hardly_counts() -> None:
    cost = RowCost()
    for rows in (1, 4, 8, 2, 6) * 20:
        cost.observe(rows, 0.1 + 0.002 * rows)
    cost.observe(1, 60.0)
    assert cost.seconds(1) < 0.11


def test_the_fuller_the_pass_the_surer_a_guess_must_be() -> None:
    cost = RowCost()
    for rows in (1, 4, 8, 16) * 20:
        cost.observe(rows, 0.1 + 0.01 * rows)
    assert cost.least_chance(1) < 0.2 < cost.least_chance(4) < cost.least_chance(16) <= 1


def test_nothing_is_known_before_the_first_pass_and_a_guess_is_still_made() -> None:
    cost = RowCost()
    assert cost.seconds(1) == cost.per_row == 0
    assert 0 < draft_length(Chances(), 3, 15, cost.least_chance(1)) < 15


def test_drafts_grow_with_success_and_end_with_failure() -> None:
    assert draft_length(taught(True, match=40), 40, 15, 0.1) == 15
    assert draft_length(taught(False), 5, 15, 0.1) == 0
    assert draft_length(taught(True), 5, 0, 0.0) == 0
