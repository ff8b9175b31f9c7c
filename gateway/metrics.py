"""Prometheus metrics, read off the ledger and the stores at the moment of the scrape, so that requests pay nothing for
them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.ledger import BOUNDS, SAVED
from gateway.runtime import Runtime

_STATES = {"closed": 0, "half-open": 1, "open": 2}


def render(runtime: Runtime) -> tuple[bytes, str]:
    """The exposition text and its content type."""
    registry = CollectorRegistry()
    registry.register(_Scrape(runtime))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Scrape(Collector):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._cache()
        yield from self._upstreams()

    def _requests(self) -> Iterator[Metric]:
        labels = ["tenant", "model", "endpoint", "outcome", "upstream"]
        requests = CounterMetricFamily("warmgate_requests", "Requests by how they were answered.", labels=labels)
        tokens = CounterMetricFamily(
            "warmgate_tokens",
            "Tokens served, by kind, and whether an upstream computed them.",
            labels=[*labels, "kind", "source"],
        )
        latency = HistogramMetricFamily("warmgate_request_seconds", "From arrival to the last byte.", labels=labels)
        for group, totals in self._runtime.ledger.totals.items():
            values = [str(part) for part in group]
            requests.add_metric(values, totals.requests)
            source = "cache" if group.outcome in SAVED else "upstream"
            tokens.add_metric([*values, "prompt", source], totals.prompt_tokens)
            tokens.add_metric([*values, "output", source], totals.output_tokens)
            tokens.add_metric([*values, "provider_cached", source], totals.provider_cached_tokens)
            buckets: list[tuple[str, float]] = []
            below = 0
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), totals.latency_counts, strict=True):
                below += count
                buckets.append((bound, below))
            latency.add_metric(values, buckets=buckets, sum_value=totals.latency_sum)
        yield requests
        yield tokens
        yield latency

    def _cache(self) -> Iterator[Metric]:
        runtime = self._runtime
        yield GaugeMetricFamily("warmgate_flights", "Upstream calls that others may join.", value=len(runtime.flights))
        if runtime.memory is not None:
            yield GaugeMetricFamily(
                "warmgate_memory_bytes", "Bytes held in the memory tier.", value=runtime.memory.bytes
            )
            yield GaugeMetricFamily("warmgate_memory_entries", "Entries in the memory tier.", value=len(runtime.memory))
            yield CounterMetricFamily(
                "warmgate_memory_evictions", "Entries evicted from the memory tier.", value=runtime.memory.evictions
            )
        not_stored = CounterMetricFamily("warmgate_not_stored", "Answers not stored, by reason.", labels=["reason"])
        for reason, count in runtime.not_stored.items():
            not_stored.add_metric([reason], count)
        yield not_stored
        bad = CounterMetricFamily(
            "warmgate_bad_entries", "Stored bytes that were not believed, by reason.", labels=["reason"]
        )
        for reason, count in runtime.recall.bad_entries.items():
            bad.add_metric([reason], count)
        yield bad
        if runtime.shared is not None:
            name = runtime.shared.name
            state = GaugeMetricFamily("warmgate_store_circuit", "0 closed, 1 half-open, 2 open.", labels=["store"])
            state.add_metric([name], _STATES[runtime.shared.breaker.state])
            yield state
            calls = CounterMetricFamily(
                "warmgate_store_calls", "Calls to the shared store.", labels=["store", "call", "result"]
            )
            for call, results in runtime.shared.counters.items():
                for result, count in results.items():
                    calls.add_metric([name, call, result], count)
            yield calls

    def _upstreams(self) -> Iterator[Metric]:
        load = GaugeMetricFamily(
            "warmgate_upstream_in_flight", "Requests under way at an upstream.", labels=["upstream"]
        )
        for member in self._runtime.pool.members:
            load.add_metric([member.name], member.in_flight)
        yield load
