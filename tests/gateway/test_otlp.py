"""Traces and metrics as a collector sees them: exact, without prompts, and never at the expense of serving."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway import source
from gateway.config import Config
from gateway.ledger import Ledger, Row, book
from gateway.source import shortcomings
from gateway.telemetry import otlp
from gateway.telemetry.conventions import span_of
from gateway.telemetry.otlp import METRICS_EVERY, Otlp
from gateway.telemetry.trace import begin
from loadtest.stub_upstream import error
from tests.field.conftest import B, Bench
from tests.gateway.collector import Collector, collecting, told
from tests.gateway.conftest import Start
from tests.harness import FakeClock

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "*")
    with collecting() as made:
        yield made


async def export(bench: Bench) -> Otlp:
    """Sends what there is, metrics as well."""
    runtime = bench.gateway.app.runtime
    assert runtime.otlp is not None
    await runtime.ledger.flush()
    bench.clock.advance(METRICS_EVERY)
    await runtime.otlp.flush()
    return runtime.otlp


async def test_a_miss_is_a_span_in_its_callers_trace_and_the_parent_of_the_upstreams(
    start: Start, collector: Collector
) -> None:
    async with start(telemetry={"otlp": collector.url}) as bench:
        await bench.send(B, x_request_id="one", traceparent=TRACEPARENT, tracestate="v=1")
        await export(bench)
        (span,), (call,) = collector.spans, bench.u.calls
    where = urlsplit(bench.u.url)
    assert span.name == f"chat {B['model']}"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert call.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert call.headers["tracestate"] == "v=1"
    assert span.kind == span.SPAN_KIND_CLIENT
    assert span.status.code == span.status.STATUS_CODE_UNSET
    attributes = told(span.attributes)
    usage = {name: attributes.pop(f"gen_ai.usage.{name}") for name in ("input_tokens", "output_tokens")}
    assert min(usage.values()) > 0
    attributes.pop("gen_ai.usage.cache_read.input_tokens", None)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": B["model"],
        "gen_ai.request.stream": False,
        "server.address": where.hostname,
        "server.port": where.port,
        "http.response.status_code": 200,
        "warmgate.outcome": "miss",
        "warmgate.tenant": "default",
        "warmgate.upstream": "u",
        "warmgate.request_id": "one",
    }
    assert collector.resource["service.name"] == "warmgate"
    assert collector.resource["service.instance.id"]


async def test_hits_are_spans_by_either_path(start: Start, collector: Collector) -> None:
    async with start(telemetry={"otlp": collector.url}) as bench:
        await bench.send(B)
        await bench.send(B, x_request_id="short")
        await bench.send(B, x_request_id="full", traceparent=TRACEPARENT)
        await export(bench)
    _, short, full = collector.spans
    assert [told(span.attributes)["warmgate.request_id"] for span in (short, full)] == ["short", "full"]
    assert {told(span.attributes)["warmgate.outcome"] for span in (short, full)} == {"exact"}
    assert (short.parent_span_id, len(short.trace_id)) == (b"", 16)
    assert full.parent_span_id.hex() == PARENT


@pytest.mark.parametrize("bad", ["", "00-1-2-3", TRACEPARENT.replace(TRACE, "0" * 32), TRACEPARENT + "-more"])
async def test_a_trace_begins_here_where_the_caller_names_none(start: Start, collector: Collector, bad: str) -> None:
    async with start(telemetry={"otlp": collector.url}) as bench:
        await bench.send(B, tracestate="v=1", **({"traceparent": bad} if bad else {}))
        await export(bench)
        (span,), (call,) = collector.spans, bench.u.calls
    assert span.parent_span_id == b""
    assert call.headers["traceparent"] == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    assert "tracestate" not in call.headers


async def test_a_caller_that_does_not_record_its_trace_gets_no_span(start: Start, collector: Collector) -> None:
    async with start(telemetry={"otlp": collector.url}) as bench:
        await bench.send(B, traceparent=TRACEPARENT[:-2] + "00")
        await export(bench)
        (call,) = bench.u.calls
    assert not collector.spans
    assert call.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert call.headers["traceparent"].endswith("-00")


async def test_without_a_collector_the_callers_header_passes_as_it_came(start: Start) -> None:
    async with start() as bench:
        await bench.send(B, traceparent=TRACEPARENT)
        assert bench.u.calls[0].headers["traceparent"] == TRACEPARENT


async def test_errors_are_told_as_such(start: Start, collector: Collector) -> None:
    async with start(telemetry={"otlp": collector.url}) as bench:
        bench.u.always(error(400))
        await bench.send(B)
        await export(bench)
    (span,) = collector.spans
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert told(span.attributes)["error.type"] == "400"
    (point,) = collector.points["gen_ai.server.request.duration"]
    assert told(point.attributes)["error.type"] == "_OTHER"
    assert not collector.points["gen_ai.server.time_to_first_token"]


async def test_metrics_count_every_request_though_hits_are_sampled_in_traces(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "HITS_KEPT", 3)
    async with start(telemetry={"otlp": collector.url}) as bench:
        usage = (await bench.send(B)).response.json()["usage"]
        await export(bench)
        for _ in range(30):
            await bench.send(B)
        await export(bench)
    hits = [span for span in collector.spans if told(span.attributes)["warmgate.outcome"] == "exact"]
    assert 3 <= len(hits) < 30
    durations = collector.counts("gen_ai.server.request.duration")
    assert {outcome: count for outcome, (count, _) in durations.items()} == {"miss": 1, "exact": 30}
    assert collector.counts("gen_ai.server.time_to_first_token")["exact"][0] == 30
    assert collector.counts("gen_ai.client.token.usage") == {
        "miss input": (1, usage["prompt_tokens"]),
        "miss output": (1, usage["completion_tokens"]),
    }
    for point in collector.points["gen_ai.server.request.duration"]:
        assert sum(point.bucket_counts) == point.count
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
        assert not point.HasField("min")


async def test_no_prompt_and_no_key_leaves(start: Start, collector: Collector, tmp_path: Path) -> None:
    ledger = {"path": str(tmp_path / "ledger.db"), "store_prompts": True}
    async with start(telemetry={"otlp": collector.url}, ledger=ledger) as bench:
        await bench.send(B, authorization="Bearer not-to-be-seen")
        await export(bench)
    assert collector.spans
    for body in collector.raw:
        assert B["messages"][-1]["content"].encode() not in body
        assert b"not-to-be-seen" not in body


async def test_a_collector_that_is_away_costs_spans_which_are_counted_and_no_metrics(
    start: Start, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with start(telemetry={"otlp": collector.url}) as bench:
        collector.status = 400  # refused for good: no further tries
        assert (await bench.send(B)).status == 200
        exporter = await export(bench)
        assert (exporter.lost, exporter.problem) == (1, "the collector did not take metrics")
        text = (await bench.gateway.client.get("/metrics")).text
        assert [line[-3:] for line in text.splitlines() if line.startswith("warmgate_otlp_ok")] == ["0.0"]
        assert [line[-3:] for line in text.splitlines() if line.startswith("warmgate_otlp_spans_lost_t")] == ["1.0"]
        collector.status = 200
        await bench.send(B)
        await export(bench)
        assert (exporter.lost, exporter.problem) == (1, "")
    assert len(collector.spans) == 1
    assert collector.counts("gen_ai.server.request.duration")["miss"][0] == 1
    assert caplog.text.count("serving goes on") == 1


async def test_a_collector_that_nobody_finds_costs_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT", 0.1)
    exporter = Otlp("http://127.0.0.1:9", FakeClock(), "w", dict)
    exporter.kept(Row(at=1.0))
    await exporter.close()
    assert exporter.lost == 1
    assert "http://127.0.0.1:9: the collector did not take spans" in caplog.text


async def test_what_a_ledger_cannot_write_is_in_the_metrics_once_it_writes_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    ledger, exporter = Ledger(None, clock), Otlp(collector.url, clock, "w", dict)
    ledger.report_to(exporter)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ledger._store, "add", full)
        for _ in range(2):
            ledger.record(Row(at=clock.time(), outcome="miss", status=200))
            await ledger.flush()
    await exporter.flush()
    assert len(collector.spans) == 2
    ledger.record(Row(at=clock.time(), outcome="miss", status=200))
    await ledger.flush()
    await exporter.close()
    assert collector.counts("gen_ai.server.request.duration")["miss"][0] == 3
    await ledger.close()


async def test_spans_wait_within_bounds(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "PENDING", 2)
    exporter = Otlp(collector.url, FakeClock(), "w", dict)
    for _ in range(5):
        exporter.kept(Row(at=1.0))
    assert exporter.lost == 3
    await exporter.close()
    assert len(collector.spans) == 2


async def test_a_reload_changes_the_collector_and_loses_nothing(start: Start, collector: Collector) -> None:
    with collecting() as other:
        async with start(telemetry={"otlp": collector.url}) as bench:
            runtime = bench.gateway.app.runtime
            await bench.send(B)
            runtime.apply(Config.model_validate({**runtime.config.model_dump(), "telemetry": {"otlp": other.url}}))
            await bench.send(B)
            runtime.apply(Config.model_validate({**runtime.config.model_dump(), "telemetry": {}}))
            assert runtime.otlp is None
            await bench.send(B)
        outcomes = [[told(span.attributes)["warmgate.outcome"] for span in one.spans] for one in (collector, other)]
    assert outcomes == [["miss"], ["exact"]]


@pytest.mark.parametrize(
    ("endpoint", "name", "provider"),
    [
        ("/v1/messages", "chat m", "anthropic"),
        ("/v1/responses", "chat m", "openai"),
        ("/v1/completions", "text_completion m", "openai"),
        ("/v1/embeddings", "embeddings m", "openai"),
        ("other", "pass_through m", "openai"),
    ],
)
def test_operations_have_the_conventions_names(collector: Collector, endpoint: str, name: str, provider: str) -> None:
    exporter = Otlp(collector.url, FakeClock(), "w", dict)
    span = span_of(Row(at=1.5, latency=0.5, endpoint=endpoint, model="m"), exporter._resource, {})
    assert (span.name, (span.attributes or {})["gen_ai.provider.name"]) == (name, provider)
    assert (span.start_time, span.end_time) == (1_500_000_000, 2_000_000_000)


@pytest.mark.parametrize(
    ("header", "joined"),
    [
        (TRACEPARENT, True),
        (TRACEPARENT.replace("00-", "cc-", 1) + "-later", True),
        (TRACEPARENT.replace("00-", "ff-", 1), False),
        (TRACEPARENT.upper(), False),
        (TRACEPARENT.replace(PARENT, "0" * 16), False),
        (TRACEPARENT + ", " + TRACEPARENT, False),
        (None, False),
    ],
)
def test_traceparent_is_read_as_the_standard_says(header: str | None, joined: bool) -> None:
    trace = begin(header)
    assert (trace.parent_id == PARENT, trace.trace_id == TRACE) == (joined, joined)
    assert len(trace.trace_id) == 32
    assert trace.span_id not in (PARENT, "0" * 16)


def test_without_the_extra_the_configuration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"engine": "off", "telemetry": {"otlp": "http://127.0.0.1:4318"}})
    assert shortcomings(config) == []

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    sentence = "telemetry.otlp needs an extra that is not installed: pip install 'warmgate[telemetry]'"
    for find in (missing, lambda _: None):
        monkeypatch.setattr(source, "find_spec", find)
        assert shortcomings(config) == [sentence]
    assert importlib.util.find_spec("opentelemetry.sdk") is not None
