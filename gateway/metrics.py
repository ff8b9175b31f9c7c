"""Prometheus metrics, the same from whichever worker is asked: counters from the ledger that all workers share, gauges
from each worker's own words, told apart by the label ``worker``. Requests pay nothing for them. `docs/metrics.md` lists
them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.response.tags import parts_of
from gateway.effective import Facts, best_minutes, facts_of
from gateway.ledger import LedgerClosed
from gateway.ledger import counters as c
from gateway.ledger.query import Sum, totals
from gateway.ledger.schema import GROUP, MINUTE
from gateway.runtime import Runtime
from gateway.vitals import Vitals, of_all_workers
from policies.pricing import PICO

_CIRCUITS = {"closed": 0, "half-open": 1, "open": 2}
_GROUP: list[str] = list(GROUP)
_TIMED = ["model", "outcome", "stream"]
_LE = [*(str(bound) for bound in c.BOUNDS), "+Inf"]


async def render(runtime: Runtime) -> tuple[bytes, str]:
    """The exposition text and its content type."""
    workers = await of_all_workers(runtime)
    try:
        now = runtime.clock.time()
        sums, best = await runtime.ledger.read(lambda connection: (totals(connection), best_minutes(connection, now)))
    except LedgerClosed:
        sums, best = [], {}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(sums, workers, facts_of(runtime, MINUTE), best))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Scrape(Collector):
    def __init__(
        self, sums: list[Sum], workers: dict[str, Vitals], facts: dict[str, Facts], best: dict[str, float]
    ) -> None:
        self._facts, self._best = facts, best
        self._sums = [(_labels(line.key), line.counts) for line in sums]
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        yield self._counter("warmgate_requests", "Requests, each under exactly one outcome.", c.REQUESTS)
        yield self._kinds(
            "warmgate_served_tokens",
            "Tokens that callers were told their answers hold.",
            {"prompt": c.SERVED_PROMPT, "output": c.SERVED_OUTPUT},
        )
        yield self._counter("warmgate_served_unknown", "Good answers without a usage report.", c.UNKNOWN_SERVED)
        yield self._counter("warmgate_upstream_calls", "Calls to upstreams that have ended.", c.CALLS)
        yield self._kinds(
            "warmgate_upstream_tokens",
            "Tokens of upstream calls; unsplit: prompt tokens of which the upstream did not say whether it had them.",
            {"computed": c.COMPUTED, "cached": c.CACHED, "unsplit": c.UNSPLIT, "output": c.OUTPUT},
        )
        yield self._counter(
            "warmgate_upstream_cache_write_tokens",
            "Of the computed prompt tokens: those the provider put into its cache.",
            c.CACHE_WRITE,
        )
        yield self._counter("warmgate_upstream_unknown_usage", "Calls without a usage report.", c.UNKNOWN_USAGE)
        yield self._counter("warmgate_cost_usd", "What upstream calls cost, as far as known.", c.COST_PICO, PICO)
        yield self._counter("warmgate_cost_unknown", "Calls whose cost is unknown.", c.UNKNOWN_COST)
        yield self._counter("warmgate_saved_usd", "What saved answers would have cost.", c.SAVED_PICO, PICO)
        yield self._counter("warmgate_saved_unknown", "Saved answers whose cost is unknown.", c.UNKNOWN_SAVED)
        yield self._counter("warmgate_slo_judged", "Requests measured against a service level.", c.SLO_JUDGED)
        yield self._counter("warmgate_slo_met", "Requests that met it.", c.SLO_MET)
        yield self._counter("warmgate_slo_met_tokens", "Output tokens of requests that met it.", c.SLO_MET_TOKENS)
        yield self._counter("warmgate_held_out", "Hits sent upstream all the same, to measure.", c.HELD_OUT)
        yield self._counter("warmgate_held_out_judged", "Of them, those whose answers compare.", c.HELD_OUT_JUDGED)
        yield self._counter("warmgate_held_out_agreed", "Of those, the ones that agreed.", c.HELD_OUT_AGREED)
        yield self._histogram(
            "warmgate_request_seconds", "From arrival to the last byte.", c.LATENCY_US, c.FIRST_LATENCY, c.FIRST_TTFT
        )
        yield self._histogram(
            "warmgate_ttft_seconds", "From arrival to the first token.", c.TTFT_US, c.FIRST_TTFT, len(c.COLUMNS)
        )
        yield from self._machines()
        yield from self._gauges()

    def _counter(self, name: str, what: str, column: int, per: int = 1) -> Metric:
        family = CounterMetricFamily(name, what, labels=_GROUP)
        for labels, counts in self._sums:
            if counts[column]:
                family.add_metric(labels, counts[column] / per if per > 1 else counts[column])
        return family

    def _kinds(self, name: str, what: str, columns: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, what, labels=[*_GROUP, "kind"])
        for labels, counts in self._sums:
            for kind, column in columns.items():
                if counts[column]:
                    family.add_metric([*labels, kind], counts[column])
        return family

    def _histogram(self, name: str, what: str, total: int, first: int, last: int) -> Metric:
        """By fewer labels than the counters, since each has many buckets."""
        family = HistogramMetricFamily(name, what, labels=_TIMED)
        added: dict[tuple[str, ...], c.Counters] = defaultdict(c.counters)
        for labels, counts in self._sums:
            c.add(added[tuple(labels[_GROUP.index(label)] for label in _TIMED)], counts)
        for labels, counts in added.items():
            buckets = list(zip(_LE, accumulate(counts[first:last]), strict=True))
            if buckets[-1][1]:
                family.add_metric(labels, buckets, counts[total] / 1e6)
        return family

    def _machines(self) -> Iterator[Metric]:
        """What upstreams can do, draw and cost, where that is known."""
        rate = GaugeMetricFamily(
            "warmgate_upstream_prefill_per_second",
            "Prompt tokens that an upstream computes in a second: as configured, or as in its best minute of a day.",
            labels=["upstream", "source"],
        )
        watts = GaugeMetricFamily("warmgate_upstream_watts", "What it draws.", labels=["upstream", "source"])
        price = GaugeMetricFamily("warmgate_upstream_usd_per_hour", "What it costs to run.", labels=["upstream"])
        for name in dict.fromkeys([*self._facts, *self._best]):
            facts = self._facts.get(name, Facts())
            if facts.prefill_per_second is not None:
                rate.add_metric([name, "configured"], facts.prefill_per_second)
            elif name in self._best:
                rate.add_metric([name, "best minute"], self._best[name])
            if facts.watts is not None:
                watts.add_metric([name, facts.power], facts.watts)
            if facts.cost_per_hour is not None:
                price.add_metric([name], facts.cost_per_hour)
        yield from (rate, watts, price)

    def _gauges(self) -> Iterator[Metric]:
        """Each worker's own; a worker that has ended takes its series with it."""
        flights = _gauge("warmgate_flights", "Upstream calls that others may join.")
        memory = _gauge("warmgate_memory_bytes", "Bytes held in the memory tier.")
        most = _gauge("warmgate_memory_max_bytes", "Bytes the memory tier may hold.")
        entries = _gauge("warmgate_memory_entries", "Entries in the memory tier.")
        evictions = CounterMetricFamily("warmgate_memory_evictions", "Entries evicted from memory.", labels=["worker"])
        not_stored = _counter("warmgate_not_stored", "Answers not stored, by reason.", "reason")
        missed = _counter("warmgate_missed", "Misses of requests that take part in the cache, by cause.", "cause")
        bad = _counter("warmgate_bad_entries", "Stored bytes that were not believed, by reason.", "reason")
        circuit = _gauge("warmgate_store_circuit", "0 closed, 1 half-open, 2 open.", "store")
        calls = _counter("warmgate_store_calls", "Calls to the shared store.", "store", "call", "result")
        load = _gauge("warmgate_upstream_in_flight", "Requests under way at an upstream.", "upstream")
        pending = _gauge("warmgate_upstream_pending_tokens", "Prompt tokens sent and not yet computed.", "upstream")
        elsewhere = _gauge("warmgate_upstream_elsewhere", "Requests it reports that are not this worker's.", "upstream")
        kv_use = _gauge("warmgate_upstream_kv_use", "Share of its KV memory that it reports as held.", "upstream")
        ejected = _gauge(
            "warmgate_upstream_ejected", "Whether an upstream is left alone because it failed.", "upstream"
        )
        routes = _counter("warmgate_route_decisions", "Upstream calls by the reason for where they went.", "reason")
        deciding = _counter("warmgate_route_seconds", "Time taken by these decisions, without tokenizing.")
        splits = _counter("warmgate_splits", "Requests split over two upstreams, and others by why not.", "result")
        held = _counter("warmgate_route_tokens", "Prompt tokens held where they went, as expected and as told.", "kind")
        blocks = _gauge("warmgate_route_index_blocks", "Beginnings of prompts in the router's index.")
        events = _counter("warmgate_kv_events", "KV events, and what was wrong with them.", "upstream", "what")
        sentinel = _gauge("warmgate_sentinel_ok", "Lights: 1 green, 0 red.", "light", "upstream", "tier")
        round_at = _gauge("warmgate_sentinel_round_timestamp_seconds", "When the last round of sentinels ended.")
        canaries = _counter("warmgate_sentinel_requests", "Canaries sent to upstreams, in no other figure.")
        cost = _counter("warmgate_sentinel_tokens", "Tokens of these canaries, in no other figure.", "kind")
        disarmed = _gauge("warmgate_disarmed", "Whether what is kept may not answer.", "tenant", "namespace", "model")
        ledger = _gauge("warmgate_ledger_ok", "Whether the ledger can be written.")
        dropped = _counter("warmgate_ledger_dropped", "Requests that the ledger had to give up counting.")
        log = _gauge("warmgate_access_log_ok", "Whether the access log can be written.")
        unlogged = _counter("warmgate_access_log_dropped", "Lines that the access log had to give up.")
        export = _gauge("warmgate_otlp_ok", "Whether the collector takes what it is sent.")
        lost = _counter("warmgate_otlp_spans_lost", "Spans that never reached the collector.")
        for worker, told in self._workers.items():
            flights.add_metric([worker], told["flights"])
            if told["memory"] is not None:
                memory.add_metric([worker], told["memory"]["bytes"])
                most.add_metric([worker], told["memory"]["max_bytes"])
                entries.add_metric([worker], told["memory"]["entries"])
                evictions.add_metric([worker], told["memory"]["evictions"])
            by_word = (
                (not_stored, told["not_stored"]),
                (missed, told["misses"]["causes"]),
                (bad, told["bad_entries"]),
            )
            for family, counts in by_word:
                for reason, count in counts.items():
                    family.add_metric([worker, reason], count)
            if told["store"] is not None:
                name = told["store"]["name"]
                circuit.add_metric([worker, name], _CIRCUITS[told["store"]["circuit"]])
                for call, results in told["store"]["calls"].items():
                    for result, count in results.items():
                        calls.add_metric([worker, name, call, result], count)
            for upstream, state in told["upstreams"].items():
                load.add_metric([worker, upstream], state["in_flight"])
                pending.add_metric([worker, upstream], state["pending"])
                elsewhere.add_metric([worker, upstream], state["elsewhere"])
                kv_use.add_metric([worker, upstream], state["kv_use"])
                ejected.add_metric([worker, upstream], state["ejected"])
            for reason, count in told["routing"]["decisions"].items():
                routes.add_metric([worker, reason], count)
            deciding.add_metric([worker], told["routing"]["seconds"])
            for result, count in told["splits"].items():
                splits.add_metric([worker, result], count)
            for kind in ("expected", "told"):
                held.add_metric([worker, kind], told["routing"][kind])
            blocks.add_metric([worker], told["routing"]["blocks"])
            for upstream, counts in told["routing"]["events"].items():
                for what, count in counts.items():
                    events.add_metric([worker, upstream, what], count)
            for light in told["sentinels"]["lights"]:
                if light["state"] != "grey":
                    labels = [worker, light["name"], light["upstream"], light["tier"]]
                    sentinel.add_metric(labels, light["state"] == "green")
            if told["sentinels"]["at"] is not None:
                round_at.add_metric([worker], told["sentinels"]["at"])
                canaries.add_metric([worker], told["sentinels"]["spent"].get("requests", 0))
                for kind in ("prompt", "cached", "output"):
                    cost.add_metric([worker, kind], told["sentinels"]["spent"].get(kind, 0))
            off = told["trust"]["disarmed"]
            for place in dict.fromkeys([*off, *(seen[0] for seen in told["trust"]["seen"])]):
                disarmed.add_metric([worker, *parts_of(place)], place in off)
            ledger.add_metric([worker], not told["ledger"]["problem"])
            dropped.add_metric([worker], told["ledger"]["dropped"])
            log.add_metric([worker], not told["access_log"]["problem"])
            unlogged.add_metric([worker], told["access_log"]["dropped"])
            if told["otlp"] is not None:
                export.add_metric([worker], not told["otlp"]["problem"])
                lost.add_metric([worker], told["otlp"]["lost"])
        yield from (
            flights,
            memory,
            most,
            entries,
            evictions,
            not_stored,
            missed,
            bad,
            circuit,
            calls,
            load,
            pending,
            elsewhere,
            kv_use,
            ejected,
            routes,
            deciding,
            splits,
            held,
            blocks,
            events,
            sentinel,
            round_at,
            canaries,
            cost,
            disarmed,
            ledger,
            dropped,
            log,
            unlogged,
            export,
            lost,
        )


def _labels(key: Sequence[object]) -> list[str]:
    return [*map(str, key[:-1]), "true" if key[-1] else "false"]


def _gauge(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=["worker", *labels])


def _counter(name: str, what: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, what, labels=["worker", *labels])
