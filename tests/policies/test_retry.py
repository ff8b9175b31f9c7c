"""Pauses between rounds."""

import pytest

from policies.retry import Retries

RETRIES = Retries(rounds=3, base=0.2, longest=5)


@pytest.mark.parametrize(
    ("done", "asked", "draw", "expected"),
    [
        (0, None, 0.0, 0.0),
        (0, None, 1.0, 0.2),
        (1, None, 1.0, 0.4),
        (2, None, 0.5, 0.4),
        (3, None, 0.5, None),
        (0, 2.0, 0.5, 2.1),
        (0, 5.0, 0.0, 5.0),
        (0, 5.1, 0.0, None),
    ],
)
def test_the_pause_grows_is_random_and_keeps_to_what_was_asked(
    done: int, asked: float | None, draw: float, expected: float | None
) -> None:
    assert RETRIES.pause(done, asked, draw) == expected


def test_no_pause_is_longer_than_the_longest() -> None:
    assert Retries(rounds=50, base=1, longest=5).pause(40, None, 1.0) == 5


def test_without_rounds_nothing_is_tried_again() -> None:
    assert Retries(rounds=0, base=1, longest=5).pause(0, None, 0.0) is None
