"""Directly: a request that takes no part in the cache goes from the caller's connection to an upstream's, and its
answer back, by callbacks and without a task. It is what most of a proxy's traffic is.

Only what needs no waiting is done here: the caller is admitted at once, an upstream is known that serves the model, a
connection to it is free. Whatever else there is to do, from a refusal to a second attempt, is the pipeline's, which
goes on from where this has come to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl

from gateway.attempts import Attempt
from gateway.coalescing import cache_status, landed_at, named
from gateway.encoding import EncodingError
from gateway.exchange import Exchange
from gateway.http import NO_BUFFERING, Headers, Request, Response
from gateway.pipeline import Pipeline
from gateway.plan import BadRequest, Plan, read_body
from gateway.pump import Pump
from gateway.reading import Head, Landed, Piece
from gateway.relay import is_page
from gateway.runtime import Runtime
from gateway.split import Sent
from gateway.tenants import Caller, Denied
from gateway.upstreams.connection import Connection, StaleConnection
from gateway.upstreams.pool import for_whole
from gateway.upstreams.response import UpstreamError, UpstreamResponse

log = logging.getLogger(__name__)


class Outlet(Protocol):
    """The caller's connection, as far as an errand needs it: while its ``flow`` is paused the caller has to catch up,
    then `Errand.on_room` is called. `whole`, a last `chunk`, `give_up` and `hand_over` end the errand.
    """

    flow: FlowControl

    def whole(self, response: Response) -> None:
        """A whole answer."""
        ...

    def begin(self, status: int, headers: Headers) -> None:
        """The head of an answer that comes in chunks."""
        ...

    def chunk(self, data: bytes, *, last: bool) -> None:
        """A part of it."""
        ...

    def give_up(self) -> None:
        """The answer broke off."""
        ...

    def hand_over(self, work: Coroutine[Any, Any, Response], over: Callable[[], None]) -> None:
        """The answer comes from the full path; ``over`` is called when that has ended, however it did."""
        ...


class Direct:
    """Begins errands."""

    def __init__(self, runtime: Runtime, pipeline: Pipeline) -> None:
        self._runtime = runtime
        self._pipeline = pipeline

    def meet(self, request: Request, caller: Caller) -> Exchange:
        """A request of a known caller, understood as far as it can be; what is wrong with it the pipeline will say."""
        exchange = Exchange(request, self._runtime.clock)
        if exchange.dialect is not None:
            try:
                body = read_body(request.body)
                exchange.plan = self._runtime.planner.plan(request, exchange.dialect, caller, body)
            except (BadRequest, Denied):
                pass
        return exchange

    def begin(self, exchange: Exchange, outlet: Outlet) -> Errand | None:
        """Sends a request on its way; None leaves it, uncounted, to the pipeline."""
        runtime, plan = self._runtime, exchange.plan
        if plan is None or plan.verdict.cacheable or plan.directives.only_if_cached or not plan.repeatable:
            return None
        if runtime.otlp is not None or (plan.may_serve and runtime.curated(plan) is not None):
            return None
        members = runtime.pool.serving_now(plan.model.target)
        if members is None or runtime.splits.concern(members):
            return None
        model, size, salt = plan.model.target, len(plan.outgoing), runtime.planner.salt(plan.caller.tenant)
        asked = runtime.router.read_now(model, plan.body, size, salt, members)
        if asked is None or not plan.caller.usage.admit_at_once():
            return None
        try:
            route = runtime.router.route(asked, for_whole(members))
        except BaseException:
            plan.caller.usage.release(None)
            raise
        exchange.caller, exchange.row.tenant = plan.caller, plan.caller.tenant
        self._pipeline.note(exchange, plan)
        self._pipeline.note_bypass(exchange, plan)
        errand = Errand(runtime, self._pipeline, exchange, plan, runtime.relay.attempt(plan, route, "bypass"), outlet)
        errand.send()
        return errand


class Errand:
    """One request under way, and the sink that its answer is read into."""

    def __init__(
        self,
        runtime: Runtime,
        pipeline: Pipeline,
        exchange: Exchange,
        plan: Plan,
        attempt: Attempt,
        outlet: Outlet,
    ) -> None:
        self.opened = False
        self.on_room: Callable[[], None] = _nothing
        self._runtime, self._pipeline = runtime, pipeline
        self._exchange, self._plan = exchange, plan
        self._attempt, self._outlet, self._flow = attempt, outlet, outlet.flow
        self._connection: Connection | None = None  # until the upstream answers
        self._pump: Pump | None = None
        self._sent: Sent | None = None
        self._whole = False
        self._asked = plan.dialect.wants_usage(plan.body)
        self._over = False

    def send(self) -> None:
        """Sends the request, over the full path if there is no connection yet."""
        exchange, member = self._exchange, self._attempt.route.member
        try:
            self._connection = self._runtime.relay.send_now(
                exchange.request, exchange.request_id, self._plan, member, self._answered
            )
        except UpstreamError as error:
            self._attempt.answer = error
        if self._connection is None:
            self._hand_over()

    def leave(self) -> None:
        """The caller has left."""
        if self._over:
            return
        if self._connection is not None:
            self._connection.abandon()
        if self._pump is not None:
            self._pump.stop()
        self._end()
        self._attempt.close()
        self._pipeline.left(self._exchange)

    def _answered(self, answer: UpstreamResponse | UpstreamError) -> None:
        """The upstream's head is there, or none will come."""
        self._connection = None
        if isinstance(answer, UpstreamError) or answer.status != 200 or is_page(answer):
            if not isinstance(answer, StaleConnection):
                self._attempt.answer = answer
            self._hand_over()
            return
        try:
            relay, splits, attempt = self._runtime.relay, self._runtime.splits, self._attempt
            self._sent = Sent(splits, attempt.route, answer, None, splits.now())
            codec, reading = relay.read(self._plan, attempt.route, self._sent, self, _as_it_is, "", wanted=False)
            self._pump = Pump(answer, codec, reading, self._read)
            self._pump.start()
        except Exception:
            log.exception("an answer could not be passed on")
            answer.close()
            self._fail("internal error")

    def _read(self, error: Exception | None) -> None:
        """Nothing more will be read."""
        if error is None or self._over:
            return
        if not self.opened and isinstance(error, UpstreamError | EncodingError):
            self._attempt.answer = error
            self._hand_over()
            return
        if not isinstance(error, UpstreamError | EncodingError):
            log.error("an answer broke off", exc_info=error)
        self._fail(str(error))

    def _hand_over(self) -> None:
        self._end()
        attempt = self._attempt

        def over() -> None:
            if not attempt.taken:
                attempt.close()

        self._outlet.hand_over(self._pipeline.go_on(self._exchange, self._plan, attempt), over)

    def _fail(self, reason: str) -> None:
        """In the middle of the answer, which cannot say so."""
        if self._over:
            return
        self._end()
        self._attempt.close()
        self._exchange.row.outcome, self._exchange.row.reason = "error", reason
        self._pipeline.close(self._exchange, 200)
        self._outlet.give_up()

    def _end(self) -> None:
        """Nothing more happens here; what refers back to this is let go, so that no cycle is left to be collected."""
        self._over = True
        self._pump, self.on_room = None, _nothing

    # The sink

    @property
    def full(self) -> bool:
        """Whether the caller has to catch up first."""
        return self._flow.write_paused

    def open(self, head: Head) -> None:
        """The answer begins."""
        self.opened, self._whole = True, head.whole
        row = self._exchange.row
        row.upstream, row.outcome = head.upstream, "bypass"
        if not head.whole:
            self._outlet.begin(head.status, self._headers(head, None))

    def put(self, piece: Piece) -> None:
        """A part of it."""
        data = piece.asked if self._asked else piece.unasked
        if data:
            if self._exchange.row.ttft is None:
                self._exchange.first_piece()
            self._outlet.chunk(data, last=False)

    def land(self, result: Landed, last: Piece | None = None) -> None:
        """It is complete; all is settled before the caller has the last of it."""
        exchange, attempt = self._exchange, self._attempt
        assert self._sent is not None
        attempt.call.usage = self._sent.ended(result.answer.usage)
        attempt.close()
        landed_at(exchange, result)
        data = b"" if last is None else last.asked if self._asked or self._whole else last.unasked
        if not self._whole and data and exchange.row.ttft is None:
            exchange.first_piece()
        self._pipeline.close(exchange, result.head.status)
        self._end()
        if self._whole:
            self._outlet.whole(Response(result.head.status, self._headers(result.head, result), data))
        else:
            self._outlet.chunk(data, last=True)

    def _headers(self, head: Head, landed: Landed | None) -> Headers:
        return [
            *head.headers,
            named(head),
            cache_status(self._plan, "bypass", head, landed, collapsed=False),
            *(NO_BUFFERING if head.stream else ()),
            (b"x-request-id", self._exchange.request_id.encode()),
        ]


def _as_it_is(landed: Landed) -> Landed:
    """Nothing is kept."""
    return landed


def _nothing() -> None:
    """What nobody waits for."""
