"""The request path: admit, understand, recall, join, route, relay, keep. In this order, for every request and every
dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial

from cache.response.entry import BadEntry, Entry
from gateway.attempts import Attempt
from gateway.batch import Batches
from gateway.coalescing import DISARMED, Coalescing
from gateway.dialects.embeddings import Embeddings
from gateway.encoding import EncodingError
from gateway.exchange import Exchange
from gateway.hit import hit_headers, kept_response
from gateway.holdout import PATIENCE, Comparison, agreement
from gateway.http import JSON, Request, Response, Stream
from gateway.ladder import seen, uncacheable
from gateway.ledger import SAVED, Outcome
from gateway.passthrough import list_models, one_model, pass_through
from gateway.plan import BadRequest, Plan, read_body
from gateway.relay import UNUSED
from gateway.runtime import Runtime
from gateway.shortcut import Shortcut
from gateway.tenants import Denied
from gateway.trust import place
from gateway.upstreams.client import UpstreamError
from policies.freshness import freshness, serves_after_error

COME_BACK_AFTER = 2
"""Seconds after which a caller may try again where no upstream was reached: about as long as one is left alone at
first (`policies.health`).
"""


class Pipeline:
    """Answers requests. One per process; it reads everything that a reload may replace from ``runtime``."""

    def __init__(self, runtime: Runtime, shortcut: Shortcut) -> None:
        self._runtime = runtime
        self._shortcut = shortcut
        self._coalescing = Coalescing(runtime)
        self._batches = Batches(runtime)

    async def answer(self, request: Request, met: Exchange | None = None) -> Response:
        """Answers a request to ``/v1/…``. Every request leaves one ledger row, also one whose caller left. ``met``: the
        request as far as it is understood already.
        """
        exchange = met or Exchange(request, self._runtime.clock)
        if self._runtime.otlp is not None:
            exchange.join_trace()
        return await self._settled(exchange, self._admitted(exchange))

    async def go_on(self, exchange: Exchange, plan: Plan, first: Attempt) -> Response:
        """Goes on with a request that was begun without it (`gateway.direct`) and needs more than that."""
        return await self._settled(exchange, self._coalescing.answer(exchange, plan, "bypass", lambda: None, first))

    async def _settled(self, exchange: Exchange, work: Awaitable[Response]) -> Response:
        try:
            response = await work
        except Denied as denied:
            exchange.row.outcome = "error"
            retry = [(b"retry-after", b"%d" % denied.retry_after)] if denied.retry_after is not None else []
            response = exchange.refusal(denied.status, denied.message, denied.code, retry)
        except BadRequest as error:
            exchange.row.outcome = "error"
            response = exchange.refusal(400, str(error), "invalid_request")
        except (UpstreamError, EncodingError) as error:
            response = self._upstream_failed(exchange, error)
        except BaseException:
            self.left(exchange)
            raise
        if isinstance(response.body, bytes):
            self.close(exchange, response.status)
        else:
            response.body.on_close = partial(self._streamed, exchange, response.status, response.body)
        response.headers.append((b"x-request-id", exchange.request_id.encode()))
        return response

    def refused(self, request: Request, status: int, message: str, code: str) -> Response:
        """The answer to a request that could not be read at all (too large, undecodable)."""
        exchange = Exchange(request, self._runtime.clock)
        response = exchange.refusal(status, message, code, [(b"x-request-id", exchange.request_id.encode())])
        self.close(exchange, status)
        return response

    async def _admitted(self, exchange: Exchange) -> Response:
        runtime, request = self._runtime, exchange.request
        tenants = runtime.tenants
        caller = tenants.identify(request)
        exchange.row.tenant = caller.tenant
        await tenants.admit(caller)
        exchange.caller = caller
        if exchange.dialect is not None:
            plan = exchange.plan or runtime.planner.plan(request, exchange.dialect, caller, read_body(request.body))
            if isinstance(exchange.dialect, Embeddings):
                route = partial(self._coalescing.route, exchange, plan)
                by_item = await self._batches.answer(exchange, plan, route)
                if by_item is not None:
                    return by_item
            return await self._recall(exchange, plan)
        if request.path.rstrip("/") == "/v1/models" and request.method == "GET":
            exchange.row.outcome, exchange.row.usage = "bypass", UNUSED
            return Response(200, [JSON], await list_models(runtime, request, caller))
        if request.path.startswith("/v1/models/") and request.method == "GET":
            alias = one_model(runtime, request.path.removeprefix("/v1/models/").rstrip("/"), caller)
            if alias is not None:
                exchange.row.outcome, exchange.row.usage = "bypass", UNUSED
                return Response(200, [JSON], alias)
        return await pass_through(runtime, exchange.request, exchange.request_id, exchange.row, caller)

    async def _recall(self, exchange: Exchange, plan: Plan) -> Response:
        """Answered before? Curated answers first: they are the operator's own word."""
        runtime, row = self._runtime, exchange.row
        self.note(exchange, plan)
        stale: Entry | None = None
        fwd = "uri-miss" if plan.may_serve else "request"
        if plan.may_serve and (curated := runtime.curated(plan)) is not None:
            row.outcome = "faq"
            now, status = runtime.clock.time(), (b"cache-status", b"warmgate; hit; detail=faq")
            return kept_response(plan, curated, now, [status])
        self._shortcut.remember(exchange.request, plan)
        if plan.may_recall:
            found = await runtime.recall.find(plan.identity, runtime.clock.time(), plan.tag_scopes)
            if found is not None:
                entry, now = found.entry, runtime.clock.time()
                expires = runtime.generations.fresh_until(entry.generations, entry.born, entry.expires)
                age = max(0.0, now - entry.born)
                state = freshness(age, expires - now, plan.lifetime.while_revalidate, plan.directives)
                if not runtime.trust.believes(plan):
                    if state != "expired":
                        exchange.comparison = _compared(plan, entry, held_out=False)
                        fwd, row.reason = DISARMED, "disarmed"
                elif state == "expired":
                    stale, renews = entry, expires > now
                    fwd, plan = "request" if renews else "stale", replace(plan, renews=renews)
                else:
                    if state == "revalidate":
                        self._coalescing.refresh(exchange, plan)
                    if state == "fresh" and not plan.directives.only_if_cached and runtime.holdout.due():
                        return await self._hold_out(exchange, plan, entry)
                    hit = self._hit(exchange, plan, entry, "exact" if state == "fresh" else "stale")
                    if hit is not None:
                        return hit
        if plan.directives.only_if_cached:
            row.outcome, row.reason = "miss", "only-if-cached"
            message = "Nothing stored answers this request (only-if-cached)."
            detail = b"; detail=disarmed" if fwd == DISARMED else b""
            status = (b"cache-status", b"warmgate; fwd=" + fwd.encode() + detail)
            return exchange.refusal(504, message, "not_cached", [status])
        if not plan.verdict.cacheable:
            fwd = "bypass"
            self.note_bypass(exchange, plan)
        elif fwd == DISARMED:
            exchange.cause = "disarmed"
        elif fwd != "request" and plan.may_recall and plan.may_keep:
            exchange.cause = runtime.misses.cause(seen(plan), runtime.clock.time())
        return await self._coalescing.answer(exchange, plan, fwd, lambda: self._spare(exchange, plan, stale))

    def note(self, exchange: Exchange, plan: Plan) -> None:
        """A request is understood."""
        runtime, row = self._runtime, exchange.row
        row.model, row.stream = plan.model.target, plan.streams
        runtime.prefix_health.request(row.tenant, row.model, plan.body, exchange.began)
        if runtime.stores_prompts:
            row.prompt = plan.question

    def note_bypass(self, exchange: Exchange, plan: Plan) -> None:
        """It takes no part in the cache."""
        exchange.row.reason = plan.verdict.reason
        self._runtime.misses.uncacheable(uncacheable(exchange.request, exchange.row.tenant))

    async def _hold_out(self, exchange: Exchange, plan: Plan, entry: Entry) -> Response:
        """Sends upstream what could have been answered; the kept answer serves should that fail."""
        exchange.comparison, exchange.row.reason = _compared(plan, entry, held_out=True), "held out"
        exchange.cause = "held out"
        alone = replace(plan, lifetime=replace(plan.lifetime, ttl=0.0))  # neither joined nor stored

        def kept() -> Response | None:
            hold_out.went(well=False)
            exchange.comparison, exchange.row.reason = None, "held out, upstream failed"
            return self._hit(exchange, plan, entry, "exact")

        hold_out = self._runtime.holdout
        try:
            async with asyncio.timeout(PATIENCE):
                response = await self._coalescing.answer(exchange, alone, "request", kept)
        except (Denied, TimeoutError) as error:  # nobody serves the model any more, or not in reasonable time
            if (hit := kept()) is None:
                raise UpstreamError("timeout", str(error), sent=True) from None
            return hit
        if response.status >= 400 and (hit := kept()) is not None:
            if not isinstance(response.body, bytes):
                response.body.close()
            return hit
        if exchange.comparison is not None:
            hold_out.went(well=True)
        return response

    def _spare(self, exchange: Exchange, plan: Plan, stale: Entry | None) -> Response | None:
        """The stale answer, if it may serve now that the upstream has failed, and nothing was purged meanwhile."""
        runtime, now = self._runtime, self._runtime.clock.time()
        if stale is None or not runtime.generations.alive(stale.generations, stale.born):
            return None
        expires = runtime.generations.fresh_until(stale.generations, stale.born, stale.expires)
        if not serves_after_error(now - stale.born, expires - now, plan.lifetime.if_error, plan.directives):
            return None
        exchange.row.reason = "upstream failed"
        return self._hit(exchange, plan, stale, "stale")

    def _hit(self, exchange: Exchange, plan: Plan, entry: Entry, outcome: Outcome) -> Response | None:
        """None: what is stored cannot be given."""
        row, runtime, now = exchange.row, self._runtime, self._runtime.clock.time()
        expires = runtime.generations.fresh_until(entry.generations, entry.born, entry.expires)
        headers = hit_headers(outcome, max(0.0, now - entry.born), expires - now)
        try:
            response = kept_response(plan, entry.message, now, headers)
        except BadEntry as error:
            runtime.recall.bad_entries[str(error)] += 1
            return None
        row.outcome, row.upstream, row.usage = outcome, entry.upstream, entry.usage
        return response

    def _upstream_failed(self, exchange: Exchange, error: UpstreamError | EncodingError) -> Response:
        exchange.row.outcome, exchange.row.reason = "error", str(error)
        if isinstance(error, UpstreamError) and not error.sent:
            again = [(b"retry-after", b"%d" % COME_BACK_AFTER)]
            return exchange.refusal(503, f"No upstream can be reached: {error}.", "upstream_unavailable", again)
        if isinstance(error, UpstreamError) and error.kind == "timeout":
            return exchange.refusal(504, f"The upstream did not answer in time: {error}.", "upstream_timeout")
        return exchange.refusal(502, f"The upstream could not answer: {error}.", "upstream_error")

    def _streamed(self, exchange: Exchange, status: int, body: Stream, failure: Exception | None) -> None:
        """A body that came in pieces has ended, has failed, or its caller has left."""
        row = exchange.row
        if failure is not None:
            row.outcome, row.reason = "error", str(failure)
        elif not body.ended:
            row.outcome, row.reason, status = "error", row.reason or "caller left", 499
        self.close(exchange, status)

    def left(self, exchange: Exchange) -> None:
        """The caller left before there was an answer."""
        exchange.row.outcome, exchange.row.reason = "error", exchange.row.reason or "caller left"
        self.close(exchange, 499)

    def close(self, exchange: Exchange, status: int) -> None:
        """All is over: the caller's usage is settled, and the ledger told."""
        runtime, row = self._runtime, exchange.row
        row.status = status
        row.latency = runtime.clock.monotonic() - exchange.began
        if exchange.caller is not None:
            exchange.caller.usage.release(row.usage)
        if row.outcome in SAVED and row.ttft is None:
            row.ttft = row.latency
        compared = exchange.comparison
        if compared is not None and row.outcome == "miss" and status == 200:
            verdict = agreement(compared.kept, exchange.computed) if compared.kept else "unjudged"
            if verdict != "unjudged":
                runtime.trust.compared(compared.place, verdict == "agrees")
            row.held_out = verdict if compared.held_out else ""
        if row.outcome == "miss":
            runtime.misses.count(exchange.cause)
        runtime.ledger.record(row)


def _compared(plan: Plan, entry: Entry, *, held_out: bool) -> Comparison:
    """To be compared with what an upstream answers in its stead."""
    return Comparison(b"" if plan.sampled else entry.message, place(plan), held_out)
