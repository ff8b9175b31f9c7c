"""Traces and metrics for an OpenTelemetry collector (OTLP over HTTP), made of what the ledger has counted and kept.

The request path only makes a span's id; everything else happens once a second in another thread. A collector that is
away costs the spans of that time, which are counted; metrics are running sums, so that they lose nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from gateway.clock import Clock
from gateway.ledger import Row
from gateway.ledger import counters as c
from gateway.ledger.book import Group, Pages
from gateway.ledger.labels import OTHER
from gateway.telemetry.conventions import Places, metrics_of, span_of

log = logging.getLogger(__name__)

METRICS_EVERY = 15.0
"""Seconds between two reports of metrics."""
PENDING = 10_000
"""Spans that wait at most."""
AT_ONCE = 1_000
"""Spans in one request."""
GROUPS = 5_000
"""Groups told apart in metrics; later ones are told without their model."""
TIMEOUT = 3.0
"""Seconds that a collector may take, further tries included."""
LAST = 1.0
"""Seconds that it may take when the gateway ends."""
_LOG_EVERY = 60.0


class Otlp:
    """Exports to the collector at ``url``. ``lost`` counts spans that never arrived; ``problem`` says why not.

    ``places`` tells where upstreams are. ``instance`` tells this worker's sums from those of others. Headers for the
    collector, certificates and resource attributes are read from OpenTelemetry's own environment variables.
    """

    def __init__(self, url: str, clock: Clock, instance: str, places: Callable[[], Places]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what goes wrong is said here, once a minute
        self.url = url
        self.lost = 0
        self.problem = ""
        self._clock = clock
        self._places = places
        self._resource = _resource(instance)
        self._spans = OTLPSpanExporter(endpoint=f"{url}/v1/traces", timeout=TIMEOUT)
        self._metrics = OTLPMetricExporter(endpoint=f"{url}/v1/metrics", timeout=TIMEOUT)
        self._pending: list[Row] = []
        self._sums: dict[Group, c.Counters] = {}
        self._began = clock.time()
        self._metrics_at = clock.monotonic() + METRICS_EVERY
        self._changed = False
        self._logged_at = -_LOG_EVERY
        self._flushing = asyncio.Lock()

    def kept(self, row: Row) -> None:
        """The ledger keeps a row: a span, unless whoever began the trace wants none."""
        if row.trace is not None and not row.trace.sampled:
            return
        if len(self._pending) < PENDING:
            self._pending.append(row)
        else:
            self.lost += 1

    def counted(self, pages: Pages) -> None:
        """The ledger has written pages."""
        for groups in pages.minutes.values():
            for group, counts in groups.items():
                if group not in self._sums and len(self._sums) >= GROUPS:
                    group = (group[0], OTHER, *group[2:])
                c.add(self._sums.setdefault(group, c.counters()), counts)
                self._changed = True

    async def flush(self) -> None:
        """Sends the spans there are, and the metrics when they are due; never raises."""
        async with self._flushing:
            rows, self._pending = self._pending, []
            places = self._places()
            for start in range(0, len(rows), AT_ONCE):
                some = rows[start : start + AT_ONCE]
                if not await self._sent("spans", lambda some=some: self._send_spans(some, places)):
                    self.lost += len(some)
            now = self._clock.monotonic()
            if self._changed and now >= self._metrics_at:
                self._metrics_at = now + METRICS_EVERY
                sums = {group: list(counts) for group, counts in self._sums.items()}
                at = self._clock.time()
                self._changed = not await self._sent("metrics", lambda: self._send_metrics(sums, places, at))

    async def close(self) -> None:
        """Sends what is left."""
        self._metrics_at = 0.0
        loop = asyncio.get_running_loop()
        giving_up = [loop.call_later(LAST, exporter.shutdown) for exporter in (self._spans, self._metrics)]
        await self.flush()
        for timer in giving_up:
            timer.cancel()
        self._spans.shutdown()
        self._metrics.shutdown()

    async def _sent(self, what: str, send: Callable[[], bool]) -> bool:
        try:
            sent = await asyncio.to_thread(send)
            problem = "" if sent else f"the collector did not take {what}"
        except Exception as error:  # telemetry is never worth more than what it tells of
            sent, problem = False, f"{type(error).__name__}: {error}"
        now = self._clock.monotonic()
        if problem and now - self._logged_at >= _LOG_EVERY:
            self._logged_at = now
            log.error("nothing can be exported to %s: %s; serving goes on", self.url, problem)
        elif self.problem and not problem:
            log.warning("export to %s works again; %d spans were lost so far", self.url, self.lost)
        self.problem = problem
        return sent

    def _send_spans(self, rows: list[Row], places: Places) -> bool:
        spans = [span_of(row, self._resource, places) for row in rows]
        return self._spans.export(spans) is SpanExportResult.SUCCESS

    def _send_metrics(self, sums: dict[Group, c.Counters], places: Places, now: float) -> bool:
        data = metrics_of(sums, self._resource, places, self._began, now)
        return self._metrics.export(data) is MetricExportResult.SUCCESS


def _resource(instance: str) -> Resource:
    """Named as the environment says (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES), else warmgate."""
    found = Resource.create({"service.instance.id": instance})
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: "warmgate"}))
    return found
