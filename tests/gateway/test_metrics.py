"""Prometheus metrics: the same from every worker, never going down, and documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.ledger import OUTCOMES, Call, Row
from tests.harness import Running, running_gateway, upstream

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"


def config(folder: Path | None = None) -> dict[str, Any]:
    ledger = {"ledger": {"path": str(folder / "ledger.db")}} if folder else {}
    return {"upstreams": [upstream("http://127.0.0.1:9", models=["m1"])], **ledger}


def record(gateway: Running, outcome: Any = "exact", **more: Any) -> None:
    row = Row(at=gateway.app.runtime.clock.time(), tenant="t", model="m1", endpoint=CHAT, outcome=outcome, status=200)
    row.usage, row.latency, row.ttft = {"prompt": 10, "output": 5, "cached": 4}, 0.02, 0.01
    for name, value in more.items():
        setattr(row, name, value)
    gateway.app.runtime.ledger.record(row)


async def samples(gateway: Running, **labels: str) -> dict[str, float]:
    """The sum of each sample that has these labels."""
    found: dict[str, float] = {}
    text = (await gateway.client.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if all(sample.labels.get(name) == value for name, value in labels.items()):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def test_every_worker_tells_of_all_of_them(tmp_path: Path) -> None:
    async with running_gateway(config(tmp_path)) as one, running_gateway(config(tmp_path)) as two:
        for times, gateway in ((2, one), (3, two)):
            for _ in range(times):
                record(gateway)
            await gateway.app.runtime.ledger.flush()
        for gateway in (one, two):
            told = await samples(gateway)
            assert told["warmgate_requests_total"] == 5
            assert told["warmgate_served_tokens_total"] == 75
            assert told["warmgate_request_seconds_count"] == 5
            assert told["warmgate_request_seconds_sum"] == pytest.approx(0.1)
            assert told["warmgate_ledger_ok"] == 2  # one each
        names = {(await samples(one, worker=g.app.runtime.ledger.worker))["warmgate_ledger_ok"] for g in (one, two)}
        assert names == {1}


async def test_counters_outlive_a_worker_and_its_gauges_do_not(tmp_path: Path) -> None:
    async with running_gateway(config(tmp_path)) as gateway:
        record(gateway)
        first = gateway.app.runtime.ledger.worker
    async with running_gateway(config(tmp_path)) as gateway:
        record(gateway)
        assert (await samples(gateway))["warmgate_requests_total"] == 2
        assert await samples(gateway, worker=first) == {}


async def test_without_a_file_a_worker_tells_of_itself() -> None:
    async with running_gateway(config()) as gateway:
        record(gateway)
        assert (await samples(gateway))["warmgate_requests_total"] == 1


async def test_histograms_are_whole_and_in_order() -> None:
    async with running_gateway(config()) as gateway:
        for latency in (0.00005, 0.02, 0.02, 1000.0):
            record(gateway, "miss", latency=latency, ttft=None)
        text = (await gateway.client.get("/metrics")).text
        buckets = re.findall(r'^warmgate_request_seconds_bucket\{le="([^"]+)".*\} (.+)$', text, re.MULTILINE)
        assert [float(bound) for bound, _ in buckets] == sorted(float(bound) for bound, _ in buckets)
        counts = [float(count) for _, count in buckets]
        assert counts == sorted(counts)
        assert (counts[0], dict(buckets)["0.025"], counts[-1]) == (1, "3.0", 4)
        assert "warmgate_ttft_seconds_bucket" not in text


@pytest.mark.parametrize("name", ['"} 1\nevil 1\n#', "back\\slash", "new\nline", "{}"])
async def test_hostile_names_cannot_break_the_exposition(name: str) -> None:
    async with running_gateway(config()) as gateway:
        record(gateway, model=name)
        text = (await gateway.client.get("/metrics")).text
        (sample,) = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "warmgate_requests_total"
        ]
        assert sample.labels["model"] == name
        assert "\nevil" not in text


async def test_every_metric_is_documented_and_nothing_else_is(tmp_path: Path) -> None:
    async with running_gateway({**config(tmp_path), "cache": {"disk": {"path": str(tmp_path / "cache")}}}) as gateway:
        for outcome in OUTCOMES:
            record(gateway, outcome)
        ledger = gateway.app.runtime.ledger
        for usage in ({"prompt": 9, "output": 1, "cached": 2, "cache_write": 3}, None):
            ledger.spent(Call(gateway.app.runtime.clock.time(), "t", "m1", CHAT, "u", "miss", False, usage))
        text = (await gateway.client.get("/metrics")).text
    told = set(re.findall(r"^# TYPE (warmgate_\w+)", text, re.MULTILINE))
    documented = set(re.findall(r"^\| `(warmgate_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert told == documented


def test_dashboards_and_alerts_ask_for_metrics_that_exist() -> None:
    documented = set(re.findall(r"^\| `(warmgate_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    files = [*(ROOT / "deploy" / "grafana").glob("*.json"), *(ROOT / "deploy" / "prometheus").glob("*.yaml")]
    assert len(files) >= 2
    for file in files:
        for name in set(re.findall(r"\bwarmgate_\w+", file.read_text())):
            bare = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in documented or bare in documented, f"{file.name} asks for {name}"
