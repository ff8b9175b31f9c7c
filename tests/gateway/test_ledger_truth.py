"""Every number told of known traffic must be the known number: the ledger, its rows and CSV, the metrics."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.known_traffic import (
    CALLS,
    COST,
    GROUPS,
    HITS,
    IN_TIME,
    NOON,
    REQUESTS,
    TOLD_CALLS,
    after_known_traffic,
)
from tests.harness import FakeClock, Running, running_gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Running]:
    async with after_known_traffic(tmp_path) as running:
        yield running


async def groups(gateway: Running, question: str = "") -> list[dict[str, Any]]:
    response = await gateway.client.get(f"/admin/ledger{question}")
    assert response.status_code == 200, response.text
    return response.json()["groups"]


async def test_every_number_of_the_ledger_is_the_truth(gateway: Running) -> None:
    lines = {line["outcome"]: line for line in await groups(gateway)}
    assert {outcome: line["requests"] for outcome, line in lines.items()} == REQUESTS
    assert {outcome: line["calls"] for outcome, line in lines.items() if line["calls"]} == CALLS
    (all_,) = await groups(gateway, "?by=endpoint")
    assert all_["requests"] == sum(REQUESTS.values())
    assert all_["hits"] == 10

    served_misses = TOLD_CALLS - 1 - 1  # not the refresh; the bypass is no miss
    assert lines["miss"]["served_tokens"] == 110 * served_misses + 8
    assert lines["miss"]["unknown_served"] == 1  # the absurd one
    assert all_["saved_tokens"] == 110 * HITS
    assert all_["served_tokens"] == 110 * (HITS + served_misses + 1) + 8
    assert all_["unknown_served"] == 2  # the curated one as well

    assert all_["provider_cached_tokens"] == 40 * TOLD_CALLS
    assert all_["computed_prompt_tokens"] == 60 * TOLD_CALLS
    assert all_["unsplit_prompt_tokens"] == 7
    assert all_["upstream_prompt_tokens"] == 100 * TOLD_CALLS + 7
    assert all_["upstream_output_tokens"] == 10 * TOLD_CALLS + 1
    assert all_["upstream_tokens"] == 110 * TOLD_CALLS + 8
    assert all_["unknown_usage"] == 3  # absurd, broken off, left; the refused one used nothing

    assert all_["cost_usd"] == pytest.approx(COST * (TOLD_CALLS - 1), rel=1e-12)
    assert all_["unknown_cost"] == 3 + 1 + 1  # those, the unsplit one, the one without a price
    assert all_["saved_usd"] == pytest.approx(COST * (HITS - 1), rel=1e-12)
    assert all_["unknown_saved"] == 2  # curated, and without a price
    assert lines["exact"]["cost_usd"] == 0
    assert lines["faq"]["saved_usd"] is None

    assert all_["latency_count"] == sum(REQUESTS.values())
    assert all_["latency_mean"] == pytest.approx(2 / sum(REQUESTS.values()))
    assert lines["miss"]["latency_p95"] > 1
    assert lines["exact"]["latency_p95"] < 0.001
    assert all_["slo_judged"] == sum(REQUESTS.values()) - 2 - 3  # not the other model's, nor the callers' own errors
    assert all_["slo_met"] == all_["slo_judged"] - 3  # not the two upstream errors, nor the slow one


async def test_a_clock_that_is_set_back_and_a_restart_move_nothing_out_of_sight(gateway: Running) -> None:
    noon = NOON
    by_minute = Counter[int]()
    for line in await groups(gateway, "?step=1m&by=outcome"):
        by_minute[line["at"] - noon] += line["requests"]
    assert by_minute == {0: 19, 60: 1, 7260: 1, -3540 // 60 * 60: 3}
    hour = (await groups(gateway, f"?from={noon}&to={noon + 3600}&by=endpoint"))[0]
    assert hour["requests"] == 20


async def test_metrics_say_the_same(gateway: Running) -> None:
    response = await gateway.client.get("/metrics")
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            sums[sample.name, ""] += sample.value
            if kind := sample.labels.get("kind") or sample.labels.get("outcome"):
                sums[sample.name, kind] += sample.value
    (all_,) = await groups(gateway, "?by=endpoint")
    assert {o: sums["warmgate_requests_total", o] for o in REQUESTS} == REQUESTS
    for name, kind, field in (
        ("warmgate_served_tokens_total", "", "served_tokens"),
        ("warmgate_served_unknown_total", "", "unknown_served"),
        ("warmgate_upstream_calls_total", "", "calls"),
        ("warmgate_upstream_tokens_total", "cached", "provider_cached_tokens"),
        ("warmgate_upstream_tokens_total", "computed", "computed_prompt_tokens"),
        ("warmgate_upstream_tokens_total", "unsplit", "unsplit_prompt_tokens"),
        ("warmgate_upstream_tokens_total", "output", "upstream_output_tokens"),
        ("warmgate_upstream_unknown_usage_total", "", "unknown_usage"),
        ("warmgate_cost_unknown_total", "", "unknown_cost"),
        ("warmgate_saved_unknown_total", "", "unknown_saved"),
        ("warmgate_slo_judged_total", "", "slo_judged"),
        ("warmgate_slo_met_total", "", "slo_met"),
        ("warmgate_request_seconds_count", "", "requests"),
    ):
        assert sums[name, kind] == all_[field], name
    assert sums["warmgate_cost_usd_total", ""] == pytest.approx(all_["cost_usd"], rel=1e-12)
    assert sums["warmgate_saved_usd_total", ""] == pytest.approx(all_["saved_usd"], rel=1e-12)
    assert sums["warmgate_request_seconds_sum", ""] == 2
    assert sums["warmgate_ledger_ok", ""] == 1


async def test_every_label_is_the_truth(gateway: Running) -> None:
    """Each series apart, so that nothing is counted under a wrong name and made up for under another."""
    series: dict[str, dict[tuple[str, str, bool], float]] = defaultdict(dict)
    for family in text_string_to_metric_families((await gateway.client.get("/metrics")).text):
        for sample in family.samples:
            named = sample.labels
            if {"model", "outcome", "stream"} <= named.keys() and "le" not in named and "kind" not in named:
                key = (named["model"], named["outcome"], named["stream"] == "true")
                series[sample.name][key] = series[sample.name].get(key, 0) + sample.value
    assert series["warmgate_requests_total"] == GROUPS
    assert series["warmgate_request_seconds_count"] == GROUPS
    assert {key: value for key, value in series["warmgate_request_seconds_sum"].items() if value} == {
        ("m1", "miss", False): 2.0  # time moved for one alone
    }
    streamed = {("m1", "miss", True): 1, ("m1", "error", True): 2}
    hits = {key: count for key, count in GROUPS.items() if key[1] in ("exact", "stale", "faq", "coalesced")}
    assert series["warmgate_ttft_seconds_count"] == hits | streamed
    assert sum(series["warmgate_slo_met_tokens_total"].values()) == IN_TIME
    for never in ("held_out", "held_out_judged", "held_out_agreed", "upstream_cache_write_tokens"):
        assert series[f"warmgate_{never}_total"] == {}, never
    lines = [line for line in await groups(gateway, "?by=model,outcome,stream") if line["requests"]]
    assert {(line["model"], line["outcome"], line["stream"]): line["requests"] for line in lines} == GROUPS
    clock = gateway.app.runtime.clock
    assert isinstance(clock, FakeClock)
    clock.advance(4 * 3600)  # past what was counted before it was set back
    seen = (await gateway.client.get("/dashboard/api/overview?range=6h")).json()
    by_speed = {(line["outcome"], bool(line["stream"])): line["requests"] for line in seen["speed"] if line["requests"]}
    by_model = {line["model"]: line["requests"] for line in seen["models"]}
    expected_speed, expected_model = Counter[tuple[str, bool]](), Counter[str]()
    for (model, outcome, stream), count in GROUPS.items():
        expected_speed[outcome, stream] += count
        expected_model[model] += count
    assert (by_speed, by_model) == (expected_speed, expected_model)
    assert seen["slo"][0]["tokens_per_second"] * (seen["now"] - seen["range"]["since"]) == pytest.approx(IN_TIME)


async def test_the_status_says_the_same(gateway: Running) -> None:
    status = (await gateway.client.get("/admin/status")).json()
    assert status["outcomes"] == REQUESTS
    assert list(status["workers"]) == [status["worker"]]


async def test_rows_and_csv_say_the_same(gateway: Running) -> None:
    rows = (await gateway.client.get("/admin/ledger/rows?limit=1000")).json()["rows"]
    assert Counter(row["outcome"] for row in rows) == REQUESTS
    reasons = Counter(row["reason"].partition(":")[0] for row in rows if row["outcome"] == "error")
    assert reasons["caller left"] == 1
    assert reasons["model_not_found"] == 1
    assert reasons["status 500"] == 1
    text = (await gateway.client.get("/admin/ledger?by=outcome&format=csv")).text
    table = {line["outcome"]: line for line in csv.DictReader(io.StringIO(text))}
    assert {outcome: int(line["requests"]) for outcome, line in table.items()} == REQUESTS
    assert table["faq"]["saved_usd"] == ""


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("?by=colour", "'by' must name some of"),
        ("?by=model,model", "each once"),
        ("?from=yesterday", "'from' must be"),
        ("?step=30s", "whole minutes"),
        ("?step=soon", "whole minutes"),
        ("?format=xml", "json, csv or parquet"),
        ("?frm=1", "Unknown parameter 'frm'"),
        ("?stream=maybe", "'stream' must be"),
        ("/rows?limit=0", "'limit' must be"),
        ("/rows?limit=x", "'limit' must be"),
    ],
)
async def test_a_question_that_makes_no_sense_gets_one_sentence(question: str, sentence: str) -> None:
    async with running_gateway({"upstreams": [], "engine": "off"}) as gateway:
        response = await gateway.client.get(f"/admin/ledger{question}")
        assert response.status_code == 400
        assert sentence in response.json()["detail"]


@pytest.mark.parametrize("question", ["?from=-1h&to=2100-01-01", "?from=2020-01-01T00:00:00Z&model=m1&stream=true"])
async def test_questions_about_nothing_have_empty_answers(question: str) -> None:
    async with running_gateway({"upstreams": [], "engine": "off"}) as gateway:
        assert await groups(gateway, question) == []
        assert (await gateway.client.get(f"/admin/ledger{question}&format=csv")).text == ""
