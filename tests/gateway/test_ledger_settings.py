"""The price file and the service levels, as the ledger reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Config
from gateway.ledger.settings import load_prices, service_levels
from gateway.source import shortcomings
from policies.pricing import PriceError, Tokens
from policies.slo import Slo

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "prices.yaml"


def test_the_example_is_a_price_file() -> None:
    price = load_prices(EXAMPLE).price("claude-sonnet-4-5")
    assert price is not None
    assert price.of(Tokens(10**6, 0, cached=0)) == 3 * 10**12


def test_without_a_file_nothing_has_a_price() -> None:
    assert len(load_prices(None)) == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"models: {m: {input: x}}", "prices.yaml: models.m.input must be a number"),
        (b"models: [", "prices.yaml is not YAML in line"),
        (b"\xff\xfe", "prices.yaml is not UTF-8"),
        (b"", "prices.yaml: must hold 'models'"),
        (None, "prices.yaml cannot be read: No such file"),
    ],
)
def test_a_fault_is_one_sentence_and_stops_the_start(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "prices.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PriceError) as caught:
        load_prices(path)
    assert len(caught.value.problems) == 1
    assert sentence in caught.value.problems[0]
    faults = shortcomings(Config.model_validate({"prices": str(path), "engine": "off"}))
    assert faults == [f"prices: {caught.value.problems[0]}"]


def test_a_models_own_name_says_its_service_level_before_an_alias_does() -> None:
    config = Config.model_validate(
        {
            "engine": "off",
            "models": {
                "a-fast": {"target": "m1", "slo": {"ttft": "100ms"}},
                "m1": {"slo": {"ttft": "1s", "tpot": "40ms", "total": "1m"}},
                "b-fast": {"target": "m2", "slo": {"ttft": "200ms"}},
                "plain": {"target": "m3"},
            },
        }
    )
    assert service_levels(config) == {"m1": Slo(1.0, 0.04, 60.0), "m2": Slo(0.2)}
