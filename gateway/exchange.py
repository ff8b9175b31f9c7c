"""One request on its way through the gateway, and the ledger row it will leave."""

from __future__ import annotations

from dataclasses import replace

from gateway.clock import Clock
from gateway.dialects import DIALECTS, Dialect
from gateway.dialects.openai import error_body
from gateway.holdout import Comparison
from gateway.http import JSON, Headers, Request, Response
from gateway.ids import accepted, unique
from gateway.ledger import Row
from gateway.plan import Plan
from gateway.telemetry.trace import begin
from gateway.tenants import Caller
from policies.misses import Cause


class Exchange:
    """``caller`` is set once it is admitted; ``began``: monotonic seconds."""

    def __init__(self, request: Request, clock: Clock) -> None:
        self.request = request
        self.request_id = accepted(request.header(b"x-request-id")) or unique(32)
        self.dialect: Dialect | None = DIALECTS.get(request.path.rstrip("/")) if request.method == "POST" else None
        self.caller: Caller | None = None
        self.row = Row(
            at=clock.time(), endpoint=self.dialect.path if self.dialect else "other", request_id=self.request_id
        )
        self.plan: Plan | None = None  # where it was made before the caller was admitted
        self._clock = clock
        self.began = clock.monotonic()
        self.comparison: Comparison | None = None  # where this would have been a hit
        self.computed: bytes | None = None  # the message that an upstream made for this request
        self.cause: Cause = "declined"  # why the cache did not have the answer, should this be a miss

    def join_trace(self) -> None:
        """Makes a span of it: a child of the caller's, and the parent of whatever upstreams do for it."""
        trace = self.row.trace = begin(self.request.header(b"traceparent"))
        left = (b"traceparent",) if trace.parent_id else (b"traceparent", b"tracestate")
        kept = [(name, value) for name, value in self.request.headers if name not in left]
        self.request = replace(self.request, headers=[*kept, (b"traceparent", trace.header)], passed_on=None)

    def first_piece(self) -> None:
        """The first piece of a streamed answer is handed over."""
        self.row.ttft = self._clock.monotonic() - self.began

    def refusal(self, status: int, message: str, code: str | None, headers: Headers | None = None) -> Response:
        """An error of our own, in the form of the API that was asked."""
        self.row.reason = self.row.reason or (code or "")
        if self.dialect is None:
            body = error_body(status, message, code)
        else:
            body = self.dialect.error(status, message, code, self.request_id)
        return Response(status, [JSON, *(headers or [])], body)
