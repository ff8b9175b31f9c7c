"""Cache-Control of requests, and when an answer may be served."""

import math

import pytest

from policies.freshness import Directives, Lifetime, freshness, parse_cache_control, serves_after_error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Directives()),
        ("no-cache", Directives(no_cache=True)),
        ("No-Store , MAX-AGE=60", Directives(no_store=True, max_age=60)),
        ('max-age="5"', Directives(max_age=5)),
        ("max-age", Directives(max_age=0)),
        ("max-age=soon", Directives(max_age=0)),
        ("max-age=-5", Directives(max_age=0)),
        ("max-stale", Directives(max_stale=math.inf)),
        ("max-stale=10, only-if-cached", Directives(max_stale=10, only_if_cached=True)),
        ("stale-if-error=600", Directives(stale_if_error=600)),
        ("private, x=1, ,", Directives()),
    ],
)
def test_parsing(text: str, expected: Directives) -> None:
    assert parse_cache_control(text) == expected


@pytest.mark.parametrize(
    ("age", "expires_in", "window", "directives", "expected"),
    [
        (1, 9, 0, Directives(), "fresh"),
        (10, 0, 0, Directives(), "expired"),
        (11, -1, 5, Directives(), "revalidate"),
        (16, -6, 5, Directives(), "expired"),
        (5, 5, 0, Directives(max_age=4), "expired"),
        (4, 6, 0, Directives(max_age=4), "fresh"),
        (0, 10, 0, Directives(max_age=0), "fresh"),
        (11, -1, 0, Directives(max_stale=1), "stale"),
        (12, -2, 0, Directives(max_stale=1), "expired"),
        (99, -90, 0, Directives(max_stale=math.inf), "stale"),
        (99, -90, 0, Directives(max_stale=math.inf, max_age=50), "expired"),
        (11, -1, 5, Directives(max_stale=9), "revalidate"),
    ],
)
def test_states(age: float, expires_in: float, window: float, directives: Directives, expected: str) -> None:
    assert freshness(age, expires_in, window, directives) == expected


def test_an_answer_is_kept_as_long_as_any_rule_could_serve_it() -> None:
    assert Lifetime(10, 5, 60).kept == 70
    assert Lifetime(10, 5, 6, on_request=7).kept == 17
    assert Lifetime(10).kept == 10


@pytest.mark.parametrize(
    ("age", "expires_in", "if_error", "directives", "expected"),
    [
        (70, -10, 10, Directives(), True),
        (71, -11, 10, Directives(), False),
        (60, 0, 0, Directives(), False),
        (70, -10, 0, Directives(stale_if_error=10), True),
        (70, -10, 99, Directives(stale_if_error=0), False),
        (20, 40, 0, Directives(max_age=10), False),
        (20, 40, 10, Directives(max_age=10), True),
        (21, 39, 0, Directives(max_age=10, stale_if_error=10), False),
    ],
)
def test_when_the_upstream_fails(
    age: float, expires_in: float, if_error: float, directives: Directives, expected: bool
) -> None:
    assert serves_after_error(age, expires_in, if_error, directives) == expected
