"""Money is exact, and what is not known is never zero."""

from __future__ import annotations

from fractions import Fraction

import pytest

from policies.pricing import ABSURD, PICO, PriceError, PriceTable, Tokens, parse_prices, tokens

GPT = {"input": 0.15, "cached_input": 0.075, "output": 0.6}
CLAUDE = {"input": 3, "cached_input": 0.3, "cache_write": 3.75, "output": 15}


def table(**models: object) -> PriceTable:
    return parse_prices({"models": models})


def cost(entry: dict[str, object], used: Tokens) -> int | None:
    price = table(m=entry).price("m")
    assert price is not None
    return price.of(used)


@pytest.mark.parametrize(
    ("entry", "used", "dollars"),
    [
        (GPT, Tokens(1_000_000, 0, cached=0), Fraction("0.15")),
        (GPT, Tokens(1, 1, cached=0), Fraction("0.75") / 10**6),
        (GPT, Tokens(1000, 10, cached=400), (600 * Fraction("0.15") + 400 * Fraction("0.075") + 6) / 10**6),
        (CLAUDE, Tokens(1000, 0, cached=300, cache_write=500), (200 * 3 + 90 + 500 * Fraction("3.75")) / 10**6),
        ({"input": 0.0375}, Tokens(7, 0), 7 * Fraction("0.0375") / 10**6),
        ({"input": 1}, Tokens(10, 0, cached=4), Fraction(10, 10**6)),  # no price of its own: as any input
        ({"input": 1, "output": 2}, Tokens(10, 1, cached=None), Fraction(12, 10**6)),  # the split does not matter
        ({"input": 0, "output": 0}, Tokens(10, 10), Fraction(0)),  # free, and known to be
    ],
)
def test_cost_is_exact(entry: dict[str, object], used: Tokens, dollars: Fraction) -> None:
    pico = cost(entry, used)
    assert pico is not None
    assert Fraction(pico, PICO) == dollars


@pytest.mark.parametrize(
    ("entry", "used"),
    [
        (GPT, Tokens(10, 1, cached=None)),  # which of them were cached, nobody said
        ({"input": 1}, Tokens(10, 1)),  # output has no price
    ],
)
def test_what_is_not_known_has_no_cost(entry: dict[str, object], used: Tokens) -> None:
    assert cost(entry, used) is None


def test_own_name_before_longest_pattern() -> None:
    prices = parse_prices(
        {"models": {"gpt-*": {"input": 1}, "gpt-4o*": {"input": 2}, "gpt-4o-mini": {"input": 3}, "*": {"input": 9}}}
    )
    found = [prices.price(name) for name in ("gpt-5", "gpt-4o", "gpt-4o-mini", "llama")]
    assert [price.of(Tokens(1, 0)) for price in found if price] == [1_000_000, 2_000_000, 3_000_000, 9_000_000]
    assert table(m=GPT).price("other") is None
    assert PriceTable().price("m") is None


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt": 10},
        {"output": 10},
        {"prompt": -1, "output": 1},
        {"prompt": ABSURD, "output": 1},
        {"prompt": 1, "output": 10**15},
        {"prompt": 10, "output": 1, "cached": 11},
        {"prompt": 10, "output": 1, "cached": -1},
        {"prompt": 10, "output": 1, "cached": 6, "cache_write": 5},
    ],
)
def test_a_usage_report_that_is_missing_or_absurd_tells_nothing(usage: dict[str, int] | None) -> None:
    assert tokens(usage) is None


def test_a_usage_report_is_read() -> None:
    assert tokens({"prompt": 10, "output": 5}) == Tokens(10, 5, None, 0)
    assert tokens({"prompt": 10, "output": 5, "cached": 4, "cache_write": 6}) == Tokens(10, 5, 4, 6)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "must hold 'models'"),
        ({"models": {}, "currency": "EUR"}, "nothing else beside it"),
        ({"models": {"m": {"output": 1}}}, "models.m must say at least what 'input' costs"),
        ({"models": {"m": {"input": "cheap"}}}, "models.m.input must be a number of dollars"),
        ({"models": {"m": {"input": -1}}}, "models.m.input must be a number of dollars"),
        ({"models": {"m": {"input": float("nan")}}}, "models.m.input must be a number of dollars"),
        ({"models": {"m": {"input": True}}}, "models.m.input must be a number of dollars"),
        ({"models": {"m": {"input": 0.0000001}}}, "models.m.input may have at most six decimals"),
        ({"models": {"m": {"input": 1, "inptu": 2}}}, "models.m: unknown price 'inptu'"),
    ],
)
def test_a_faulty_table_is_refused_in_one_sentence(data: object, sentence: str) -> None:
    with pytest.raises(PriceError) as caught:
        parse_prices(data)
    assert len(caught.value.problems) == 1
    assert sentence in caught.value.problems[0]
