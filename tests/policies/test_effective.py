"""Engine-seconds: used, and spared by either kind of cache."""

from __future__ import annotations

import pytest

from policies.effective import OUTPUT, Tokens, effective


def test_work_is_counted_in_prompt_tokens() -> None:
    tokens = Tokens(computed=600, cached=400, unsplit=0, output=100, saved_prompt=1000, saved_output=50)
    found = effective(tokens, seconds=3600, per_second=100)
    assert found.installed == 3600
    assert found.used == pytest.approx((600 + OUTPUT * 100) / 100)
    assert found.by_answers == pytest.approx((0.6 * 1000 + OUTPUT * 50) / 100)  # of prompts, 60 % must be computed
    assert found.by_prefixes == 4
    assert found.times == pytest.approx((10 + 8 + 4) / 10)


def test_what_was_cached_stays_unknown_where_nobody_said() -> None:
    tokens = Tokens(computed=None, cached=None, unsplit=500, output=0, saved_prompt=100, saved_output=0)
    found = effective(tokens, 60, 100)
    assert (found.used, found.by_answers, found.by_prefixes) == (5, 1, None)
    assert found.times == pytest.approx(1.2)


def test_what_answers_saved_stays_unknown_where_nobody_said() -> None:
    found = effective(Tokens(600, 400, 0, 0, None, None), 60, 100)
    assert (found.by_answers, found.times) == (None, pytest.approx((6 + 4) / 6))


def test_an_idle_engine_has_no_times() -> None:
    found = effective(Tokens(0, 0, 0, 0, 0, 0), 60, 100)
    assert (found.used, found.times) == (0, None)
