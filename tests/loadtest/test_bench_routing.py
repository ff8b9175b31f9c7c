"""The replay behind `make bench-routing`, small: real engine processes behind a real gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.bench_routing.__main__ import Options, Result, measure, measure_with_a_death, routed
from loadtest.bench_routing.fleet import EngineProcess, engines
from loadtest.bench_routing.model import KV_BYTES, write_model
from loadtest.bench_routing.replay import Turn, reuse

OPTIONS = Options(chats=8, turns=4, engines=2, at_once=4, tokens=10_000)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[list[EngineProcess]]:
    with engines(model, OPTIONS.engines, OPTIONS.tokens * KV_BYTES) as made:
        yield made


def replayed(name: str, folder: Path, model: Path, fleet: list[EngineProcess]) -> Result:
    with routed(folder, model, fleet, name) as servers:
        return measure(servers, fleet, OPTIONS)


def test_routing_by_prefix_reuses_more_than_taking_turns_and_loses_no_balance(
    tmp_path: Path, model: Path, fleet: list[EngineProcess]
) -> None:
    exact, turns = (replayed(name, tmp_path, model, fleet) for name in ("exact", "round_robin"))
    assert exact.replay.ended("ok") == turns.replay.ended("ok") == OPTIONS.chats * OPTIONS.turns
    assert exact.replay.reuse > turns.replay.reuse + 0.03
    assert exact.replay.reuse > 0.7
    assert exact.requests <= 1.5, "of 16 requests each, a few more or less are chance"


def test_no_request_is_lost_when_an_engine_is_killed(tmp_path: Path, model: Path, fleet: list[EngineProcess]) -> None:
    with routed(tmp_path, model, fleet, "exact") as servers:
        replay = measure_with_a_death(servers, fleet, OPTIONS)
    assert replay.ended("lost") == 0
    assert replay.ended("ok") >= OPTIONS.chats * OPTIONS.turns - OPTIONS.at_once
    assert replay.quarter(3) > replay.quarter(0)


def test_reuse_counts_tokens() -> None:
    assert reuse([Turn(100, 50, "ok"), Turn(300, 150, "ok"), Turn(0, 0, "lost")]) == 0.5
    assert reuse([]) == 0.0
