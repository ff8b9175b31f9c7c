"""Installed and effective compute of a running gateway: every number from traffic of which all is known."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import power
from gateway.config import Config
from gateway.ledger import Call, Row
from gateway.power import Power
from gateway.source import shortcomings
from loadtest.stub_upstream import StubUpstream, answer
from tests.harness import FakeClock, Running, running_gateway, upstream

HOUR = 3600
NOON = 1_796_040_000
TOLD = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
LABELS = {"prefill_per_second": 50, "watts": 200, "cost_per_hour": 3.6}
WORK = 60 + 4 * 10
"""Prompt tokens' worth of such a call."""


def at_noon() -> FakeClock:
    clock = FakeClock()
    clock._time = float(NOON)
    return clock


async def traffic(gateway: Running, u: StubUpstream, clock: FakeClock) -> None:
    """A miss, two hits, and half an hour later another miss; then the hour is over."""
    u.always(answer(usage=TOLD))
    for question in ("a", "a", "a", "b"):
        if question == "b":
            clock.advance(HOUR / 2)
        body = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": question}]}
        assert (await gateway.chat(body)).status_code == 200
        await gateway.app.runtime.keeper.drain()
    clock.advance(HOUR / 2)


async def told(gateway: Running, query: str = "") -> dict[str, Any]:
    (line,) = (await gateway.client.get(f"/admin/effective{query}")).json()
    return line


async def test_every_number_is_the_traffics_truth() -> None:
    clock = at_noon()
    async with StubUpstream() as u:
        config = {
            "upstreams": [upstream(u.url, models=["m1"], labels=LABELS)],
            "models": {"m1": {"slo": {"total": "1s"}}},
        }
        async with running_gateway(config, clock) as gateway:
            await traffic(gateway, u, clock)
            line = await told(gateway)
            seconds = line.pop("engine_seconds")
            assert seconds.pop("by_answers") == pytest.approx(2 * WORK / 50)
            assert seconds.pop("times") == pytest.approx((2 * WORK + 2 * WORK + 2 * 40) / (2 * WORK))
            assert seconds == {"installed": HOUR, "used": 2 * WORK / 50, "by_prefixes": 2 * 40 / 50}
            assert line == {
                "upstream": "u",
                "seconds": HOUR,
                "per_second": 50,
                "per_second_source": "configured",
                "tokens": {
                    "could_have_computed": 50 * HOUR,
                    "computed": 2 * WORK,
                    "in_time": 4 * 10,
                    "saved_by_answers": 2 * 110,
                    "saved_by_prefixes": 2 * 40,
                    "served": 4 * 110,
                },
                "unknown_usage": 0,
                "watts": 200,
                "power": "configured",
                "served_per_joule": 440 / (200 * HOUR),
                "in_time_per_joule": 40 / (200 * HOUR),
                "usd": 3.6,
                "served_per_usd": pytest.approx(440 / 3.6),
                "in_time_per_usd": pytest.approx(40 / 3.6),
            }
            (shown,) = (await gateway.client.get("/dashboard/api/overview?range=6h")).json()["effective"]
            assert shown["tokens"] == line["tokens"]  # not the hours before the ledger began
            assert (await told(gateway, "?from=-10m"))["tokens"]["computed"] == 0
            metrics = (await gateway.client.get("/metrics")).text
            assert 'warmgate_upstream_prefill_per_second{source="configured",upstream="u"} 50.0' in metrics
            assert 'warmgate_upstream_watts{source="configured",upstream="u"} 200.0' in metrics
            assert 'warmgate_upstream_usd_per_hour{upstream="u"} 3.6' in metrics


async def test_without_a_word_of_the_operator_the_best_minute_counts_and_the_rest_is_unknown() -> None:
    clock = at_noon()
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url, models=["m1"])]}, clock) as gateway:
        line = await told(gateway)
        assert (line["per_second"], line["engine_seconds"], line["watts"], line["usd"]) == (None, None, None, None)
        assert line["tokens"]["could_have_computed"] is None
        await traffic(gateway, u, clock)
        line = await told(gateway)
        assert (line["per_second"], line["per_second_source"]) == (WORK / 60, "best minute")
        assert line["engine_seconds"]["used"] == 120
        for name in ("watts", "served_per_joule", "in_time_per_joule", "usd", "served_per_usd", "in_time_per_usd"):
            assert line[name] is None, name
        assert line["tokens"]["in_time"] is None  # no service level
        metrics = (await gateway.client.get("/metrics")).text
        assert 'warmgate_upstream_prefill_per_second{source="best minute",upstream="u"}' in metrics
        assert "warmgate_upstream_watts{" not in metrics


async def test_what_no_call_told_is_unknown_not_zero() -> None:
    clock = at_noon()
    config = {"upstreams": [upstream("http://127.0.0.1:9", models=["m1"], labels={"prefill_per_second": 50})]}
    async with running_gateway(config, clock) as gateway:
        ledger = gateway.app.runtime.ledger
        ledger.spent(Call(clock.time(), "t", "m1", "/v1/chat/completions", "u", "miss", False, None))
        ledger.record(Row(clock.time(), "t", "m1", "/v1/chat/completions", "miss", "u", 200))
        line = await told(gateway)
        assert (line["engine_seconds"], line["tokens"]["computed"], line["tokens"]["saved_by_prefixes"]) == (
            None,
            None,
            None,
        )
        assert (line["unknown_usage"], line["usd"]) == (1, None)
        ledger.spent(
            Call(clock.time(), "t", "m1", "/v1/chat/completions", "u", "miss", False, {"prompt": 9, "output": 1})
        )
        line = await told(gateway)
        assert line["tokens"]["computed"] == 9 + 4  # cached or not, it did not say
        assert line["engine_seconds"]["by_prefixes"] is None


async def test_what_calls_cost_is_what_it_costs_where_no_machine_is_paid(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("models: {m1: {input: 1, cached_input: 0.25, output: 4}}")
    clock = at_noon()
    async with StubUpstream() as u:
        config = {"upstreams": [upstream(u.url, models=["m1"])], "prices": str(tmp_path / "prices.yaml")}
        async with running_gateway(config, clock) as gateway:
            await traffic(gateway, u, clock)
            line = await told(gateway)
            assert line["usd"] == pytest.approx(2 * 110e-6)
            assert line["served_per_usd"] == pytest.approx(440 / 220e-6)


@pytest.mark.parametrize(("value", "shown"), [("much", "'much'"), (0, "0.0"), (-1, "-1.0")])
def test_a_label_that_is_no_number_is_said(value: Any, shown: str) -> None:
    config = {"upstreams": [upstream("http://u", labels={"watts": value, "hardware": "h200"})]}
    faults = shortcomings(Config.model_validate(config))
    assert faults == [f"upstreams[0].labels.watts must be a number above 0, not {shown}"]


# What the machine draws


def rapl(folder: Path, *microjoules: int) -> None:
    for index, value in enumerate(microjoules):
        package = folder / f"intel-rapl:{index}"
        package.mkdir(exist_ok=True)
        (package / "energy_uj").write_text(f"{value}\n")
        (package / "max_energy_range_uj").write_text("999999\n")
    (folder / "intel-rapl:0:0").mkdir(exist_ok=True)  # a part of a package is not counted again


def test_processors_are_read_by_rapl_also_when_a_counter_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "RAPL", tmp_path)
    clock = FakeClock()
    rapl(tmp_path, 900_000, 0)
    meter = Power(clock)
    meter.apply("cpu")
    assert meter.source == "rapl"
    meter.read()
    assert meter.watts(10) is None  # one reading says nothing
    for first, second in ((950_000, 10_000), (0, 20_000), (50_000, 30_000)):
        clock.advance(10)
        rapl(tmp_path, first, second)
        meter.read()
    assert meter.watts(30) == pytest.approx((3 * 50_000 + 3 * 10_000) / 1e6 / 30)
    assert meter.watts(3600) is None  # it was not watched as long
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    meter.read()
    assert (meter.source, meter.watts(10)) == ("", None)


def test_gpus_are_read_by_nvml_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(power, "RAPL", tmp_path)
    drawn = [5_000, 7_000]

    class NVMLError(Exception):
        pass

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(drawn),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: drawn[gpu],
    )
    clock, meter = FakeClock(), Power(FakeClock())
    meter._clock = clock
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter.apply("cuda")
    assert meter.source == ""  # not installed
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    meter.apply("cuda")
    assert meter.source == "nvml"
    meter.read()
    clock.advance(10)
    drawn[0] += 3_000_000
    meter.read()
    assert meter.watts(10) == 300
    meter.apply(None)
    assert (meter.source, meter.watts(10)) == ("", None)


async def test_the_embedded_engine_is_measured_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "RAPL", tmp_path)
    rapl(tmp_path, 0)
    clock = at_noon()
    machines = [
        upstream("http://127.0.0.1:9", "engine", models=["m1"]),
        upstream("http://127.0.0.1:9", "far", models=["m1"]),
    ]
    config = {"upstreams": machines, "engine": {"device": "cpu"}}
    async with running_gateway(config, clock) as gateway:
        meter = gateway.app.runtime.power
        for joules in (0.0, 360.0):
            meter._read = lambda joules=joules: joules
            meter.read()
            clock.advance(HOUR)
        clock.advance(-HOUR)
        lines = {line["upstream"]: line for line in (await gateway.client.get("/admin/effective?from=-1h")).json()}
        assert (lines["engine"]["watts"], lines["engine"]["power"]) == (0.1, "rapl")
        assert (lines["far"]["watts"], lines["far"]["power"]) == (None, "")
