"""What the ledger knows in the words of OpenTelemetry's GenAI semantic conventions
(https://github.com/open-telemetry/semantic-conventions-genai; their status is "development").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.ledger import Row
from gateway.ledger import counters as c
from gateway.ledger.book import Group
from gateway.ledger.labels import NAME, clean
from gateway.telemetry.trace import begin
from policies.pricing import tokens

Attributes = dict[str, str | bool | int | float]
Places = Mapping[str, tuple[str, int]]
"""Host and port of each upstream, by name."""

SCOPE = InstrumentationScope("warmgate")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages/count_tokens": "count_tokens",
}
_NANO = 1_000_000_000


def span_of(row: Row, resource: Resource, places: Places) -> ReadableSpan:
    """The span of a request: the client's view of it, as the conventions see spans of operations."""
    trace = row.trace or begin()
    parent = _context(trace.trace_id, trace.parent_id, remote=True) if trace.parent_id else None
    told = _shared(row.tenant, clean(row.model, NAME), row.endpoint, row.upstream, row.outcome, row.stream, places)
    told |= {"warmgate.request_id": row.request_id, "http.response.status_code": row.status}
    used = tokens(row.usage)
    if used is not None:
        told |= {"gen_ai.usage.input_tokens": used.prompt, "gen_ai.usage.output_tokens": used.output}
        if used.cached is not None:
            told["gen_ai.usage.cache_read.input_tokens"] = used.cached
    if row.stream and row.ttft is not None:
        told["gen_ai.response.time_to_first_chunk"] = row.ttft
    if row.reason:
        told["warmgate.reason"] = clean(row.reason, NAME)
    failed = row.outcome == "error"
    if failed:
        told["error.type"] = str(row.status) if row.status >= 400 else "_OTHER"
    return ReadableSpan(
        name=f"{told['gen_ai.operation.name']} {told.get('gen_ai.request.model', '')}".rstrip(),
        context=_context(trace.trace_id, trace.span_id, remote=False),
        parent=parent,
        resource=resource,
        attributes=told,
        kind=SpanKind.CLIENT,
        status=Status(StatusCode.ERROR) if failed else Status(),
        start_time=int(row.at * _NANO),
        end_time=int((row.at + row.latency) * _NANO),
        instrumentation_scope=SCOPE,
    )


def metrics_of(
    sums: Mapping[Group, c.Counters], resource: Resource, places: Places, began: float, now: float
) -> MetricsData:
    """Histograms of all that was counted from ``began`` to ``now`` (unix seconds). The buckets are the ledger's; of
    tokens it keeps sums only, so that theirs have one bucket.
    """
    durations, firsts, used = [], [], []
    span = int(began * _NANO), int(now * _NANO)
    for group, counts in sums.items():
        told = _shared(*group, places)
        failed: Attributes = {"error.type": "_OTHER"} if group[4] == "error" else {}
        durations += _point(told | failed, span, counts[c.LATENCY_US] / 1e6, counts[c.FIRST_LATENCY : c.FIRST_TTFT])
        if not failed:
            firsts += _point(told, span, counts[c.TTFT_US] / 1e6, counts[c.FIRST_TTFT :])
        calls = [counts[c.CALLS] - counts[c.UNKNOWN_USAGE]]
        prompt = counts[c.CACHED] + counts[c.COMPUTED] + counts[c.UNSPLIT]
        used += _point(told | {"gen_ai.token.type": "input"}, span, prompt, calls)
        used += _point(told | {"gen_ai.token.type": "output"}, span, counts[c.OUTPUT], calls)
    metrics = [
        _histogram("gen_ai.server.request.duration", "s", "From arrival to the last byte.", durations),
        _histogram("gen_ai.server.time_to_first_token", "s", "From arrival to the first byte of an answer.", firsts),
        _histogram("gen_ai.client.token.usage", "{token}", "Tokens of upstream calls.", used),
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _shared(
    tenant: str, model: str, endpoint: str, upstream: str, outcome: str, stream: bool, places: Places
) -> Attributes:
    """What spans and metrics say alike."""
    told: Attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(endpoint, "pass_through"),
        "gen_ai.provider.name": "anthropic" if endpoint.startswith("/v1/messages") else "openai",
        "gen_ai.request.stream": stream,
        "warmgate.tenant": tenant,
        "warmgate.outcome": outcome,
    }
    if model:
        told["gen_ai.request.model"] = model
    if upstream:
        told["warmgate.upstream"] = upstream
    if upstream in places:
        told["server.address"], told["server.port"] = places[upstream]
    return told


def _point(told: Attributes, span: tuple[int, int], total: float, buckets: list[int]) -> Iterable[HistogramDataPoint]:
    count = sum(buckets)
    if not count:
        return
    bounds = c.BOUNDS if len(buckets) > 1 else ()
    unknown: float = None  # type: ignore[assignment]  # left out, which the protocol allows and the type does not
    yield HistogramDataPoint(told, *span, count, total, buckets, bounds, min=unknown, max=unknown)


def _histogram(name: str, unit: str, what: str, points: list[HistogramDataPoint]) -> Metric:
    return Metric(name, what, unit, Histogram(points, AggregationTemporality.CUMULATIVE))


def _context(trace_id: str, span_id: str, *, remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))
