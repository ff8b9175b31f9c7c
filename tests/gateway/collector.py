"""A small OpenTelemetry collector: takes OTLP over HTTP on a free loopback port, and keeps what it understands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class Collector:
    """``spans``: all that came. ``points``: of each metric the points that came last. ``raw``: every body.
    ``status``: what it answers with.
    """

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.spans: list[Any] = []
        self.points: dict[str, list[Any]] = {}
        self.resource: dict[str, Any] = {}
        self.raw: list[bytes] = []

    def take(self, path: str, body: bytes) -> None:
        self.raw.append(body)
        if path == "/v1/traces":
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resource = told(each.resource.attributes)
                self.spans += [span for scope in each.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in (metric for scope in each.scope_metrics for metric in scope.metrics):
                    self.points[metric.name] = list(metric.histogram.data_points)

    def counts(self, name: str) -> dict[str, tuple[int, float]]:
        """Of a metric, count and sum by outcome (and kind of token)."""
        found = {}
        for point in self.points[name]:
            labels = told(point.attributes)
            key = " ".join(filter(None, (labels["warmgate.outcome"], labels.get("gen_ai.token.type"))))
            found[key] = (point.count, point.sum)
        return found


def told(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a plain dictionary."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200:
                collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not on the test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
