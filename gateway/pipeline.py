"""The request path: admit, understand, recall, join, route, relay, keep. In this order, for every request and every
dialect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from cache.response.entry import BadEntry, Entry
from cache.response.flights import FellBehind
from gateway.batch import Batches
from gateway.clock import Clock
from gateway.dialects import DIALECTS, Dialect
from gateway.dialects.embeddings import Embeddings
from gateway.dialects.openai import error_body
from gateway.encoding import EncodingError
from gateway.hit import hit_headers, kept_response
from gateway.http import JSON, NO_BUFFERING, Headers, Request, Response, begun
from gateway.ids import accepted, unique
from gateway.ledger import SAVED, Outcome, Row
from gateway.passthrough import list_models, pass_through
from gateway.plan import BadRequest, Plan, read_body
from gateway.relay import CallFlight, Head, Landed, new_flight
from gateway.runtime import Runtime
from gateway.shortcut import Shortcut
from gateway.tenants import Caller, Denied
from gateway.upstreams.client import UpstreamError
from gateway.upstreams.pool import Member
from policies.freshness import freshness


class Exchange:
    """One request on its way through the pipeline, and the ledger row it will leave."""

    def __init__(self, request: Request, clock: Clock) -> None:
        self.request = request
        self.request_id = accepted(request.header(b"x-request-id")) or unique(32)
        self.dialect: Dialect | None = DIALECTS.get(request.path.rstrip("/")) if request.method == "POST" else None
        self.caller: Caller | None = None
        self.row = Row(
            at=clock.time(), endpoint=self.dialect.path if self.dialect else "other", request_id=self.request_id
        )
        self.began = clock.monotonic()
        self.complete = False  # a streamed answer has been handed over to its end

    def error(self, status: int, message: str, code: str | None = None) -> bytes:
        """An error body in the form of the API that was asked."""
        if self.dialect is None:
            return error_body(status, message, code)
        return self.dialect.error(status, message, code, self.request_id)


class Pipeline:
    """Answers requests. One per process; it reads everything that a reload may replace from ``runtime``."""

    def __init__(self, runtime: Runtime, shortcut: Shortcut) -> None:
        self._runtime = runtime
        self._shortcut = shortcut
        self._batches = Batches(runtime)

    async def answer(self, request: Request) -> Response:
        """Answers a request to ``/v1/…``. Every request leaves one ledger row, also one whose caller left."""
        runtime = self._runtime
        exchange = Exchange(request, runtime.clock)
        try:
            response = await self._admitted(exchange)
        except Denied as denied:
            exchange.row.outcome = "error"
            retry = [(b"retry-after", b"%d" % denied.retry_after)] if denied.retry_after is not None else []
            response = self._error(exchange, denied.status, denied.message, denied.code, retry)
        except BadRequest as error:
            exchange.row.outcome = "error"
            response = self._error(exchange, 400, str(error), "invalid_request")
        except (UpstreamError, EncodingError) as error:
            response = self._upstream_failed(exchange, error)
        except BaseException:
            exchange.row.outcome, exchange.row.reason = "error", exchange.row.reason or "caller left"
            self._close(exchange, 499)
            raise
        if isinstance(response.body, bytes):
            self._close(exchange, response.status)
        else:
            response.body = await begun(self._until_end(exchange, response.status, response.body))
        response.headers.append((b"x-request-id", exchange.request_id.encode()))
        return response

    def refused(self, request: Request, status: int, message: str, code: str) -> Response:
        """The answer to a request that could not be read at all (too large, undecodable)."""
        exchange = Exchange(request, self._runtime.clock)
        response = self._error(exchange, status, message, code, [(b"x-request-id", exchange.request_id.encode())])
        self._close(exchange, status)
        return response

    async def _admitted(self, exchange: Exchange) -> Response:
        runtime, request = self._runtime, exchange.request
        tenants = runtime.tenants
        caller = tenants.identify(request)
        exchange.row.tenant = caller.tenant
        tenants.admit(caller)
        exchange.caller = caller
        if exchange.dialect is not None:
            body = read_body(request.body)
            plan = runtime.planner.plan(request, exchange.dialect, caller, body)
            if isinstance(exchange.dialect, Embeddings):
                by_item = await self._batches.answer(plan, request, exchange.row, lambda: self._route(exchange, plan))
                if by_item is not None:
                    return by_item
            return await self._recall(exchange, plan)
        if request.path.rstrip("/") == "/v1/models" and request.method == "GET":
            exchange.row.outcome = "bypass"
            return Response(200, [JSON], await list_models(runtime, request, caller))
        return await pass_through(runtime, exchange.request, exchange.request_id, exchange.row, caller)

    async def _recall(self, exchange: Exchange, plan: Plan) -> Response:
        """Answered before? Curated answers first: they are the operator's own word."""
        runtime, row = self._runtime, exchange.row
        row.model, row.stream = plan.model.target, plan.streams
        stale: Entry | None = None
        fwd = "uri-miss" if plan.may_serve else "request"
        if plan.may_serve and (curated := runtime.curated(plan)) is not None:
            row.outcome = "faq"
            now, status = runtime.clock.time(), (b"cache-status", b"warmgate; hit; detail=faq")
            return kept_response(plan, curated, now, [status])
        self._shortcut.remember(exchange.request, plan)
        if plan.may_recall:
            now = runtime.clock.time()
            found = await runtime.recall.find(plan.identity, now)
            if found is not None:
                entry = found.entry
                expires = 0.0 if runtime.generations.softened(entry.generations, entry.born) else entry.expires
                age = max(0.0, now - entry.born)
                state = freshness(age, expires - now, plan.lifetime.while_revalidate, plan.directives)
                if state == "expired":
                    stale, fwd = entry, "stale"
                else:
                    if state == "revalidate":
                        self._refresh(exchange, plan)
                    hit = self._hit(exchange, plan, entry, "exact" if state == "fresh" else "stale", expires)
                    if hit is not None:
                        return hit
        if plan.directives.only_if_cached:
            row.outcome, row.reason = "miss", "only-if-cached"
            return self._error(
                exchange,
                504,
                "Nothing stored answers this request (only-if-cached).",
                "not_cached",
                [(b"cache-status", b"warmgate; fwd=%s" % fwd.encode())],
            )
        if not plan.verdict.cacheable:
            fwd, row.reason = "bypass", plan.verdict.reason
        return await self._join(exchange, plan, fwd, stale)

    def _hit(self, exchange: Exchange, plan: Plan, entry: Entry, outcome: Outcome, expires: float) -> Response | None:
        """None: what is stored cannot be given."""
        row, now = exchange.row, self._runtime.clock.time()
        headers = hit_headers(outcome, max(0.0, now - entry.born), expires - now)
        try:
            response = kept_response(plan, entry.message, now, headers)
        except BadEntry as error:
            self._runtime.recall.bad_entries[str(error)] += 1
            return None
        row.outcome, row.upstream, row.usage = outcome, entry.upstream, entry.usage
        return response

    async def _join(self, exchange: Exchange, plan: Plan, fwd: str, stale: Entry | None) -> Response:
        """Being answered right now? Then wait with the others; else make the call that others may join."""
        flights, key = self._runtime.flights, plan.identity.key
        try:
            members = await self._route(exchange, plan)
            for _ in range(2):  # a flight in the other form may bring nothing of use; then the next is tried
                flight = flights.get(key) if plan.may_join else None
                if flight is None or not flight.joinable:
                    break
                response = await self._follow(exchange, plan, flight, collapsed=True, fwd=fwd, stale=stale)
                if response is not None:
                    return response
            shared = plan.may_join and key not in flights  # nothing was awaited since that was looked up
            flight = self._take_off(exchange, plan, members, "bypass" if fwd == "bypass" else "miss", shared=shared)
            response = await self._follow(exchange, plan, flight, collapsed=False, fwd=fwd, stale=stale)
            assert response is not None
            return response
        except (UpstreamError, EncodingError):
            kept = self._after_error(exchange, plan, stale)
            if kept is None:
                raise
            return kept

    async def _route(self, exchange: Exchange, plan: Plan) -> list[Member]:
        members = await self._runtime.pool.serving(plan.model.target, exchange.request)
        if members:
            return members
        if not self._runtime.pool.members:
            raise UpstreamError("connect", "no upstream is configured", sent=False)
        exchange.row.model, exchange.row.reason = "", f"model_not_found: {plan.model.name}"
        raise Denied(404, f"The model {plan.model.name[:100]!r} does not exist here.", "model_not_found")

    def _take_off(
        self, exchange: Exchange, plan: Plan, members: list[Member], cause: Outcome, *, shared: bool
    ) -> CallFlight:
        """Begins an upstream call, to be counted under the outcome that causes it."""
        runtime = self._runtime
        flight = new_flight()
        flights, key = runtime.flights, plan.identity.key

        def over() -> None:
            if flights.get(key) is flight:
                del flights[key]

        if shared:
            flights[key] = flight
        flight.start(runtime.relay.fly(plan, exchange.request, exchange.request_id, members, flight, cause), over)
        return flight

    def _refresh(self, exchange: Exchange, plan: Plan) -> None:
        """Renews a stale entry behind the caller's back, once however many ask."""
        if plan.identity.key in self._runtime.flights or not plan.may_keep:
            return

        async def renew() -> None:
            try:
                members = await self._route(exchange, plan)
            except (Denied, UpstreamError):
                return
            if plan.identity.key not in self._runtime.flights:
                self._take_off(exchange, plan, members, "stale", shared=True).keep_going()

        self._runtime.background(renew())

    async def _follow(
        self,
        exchange: Exchange,
        plan: Plan,
        flight: CallFlight,
        *,
        collapsed: bool,
        fwd: str,
        stale: Entry | None = None,
    ) -> Response | None:
        """The answer of a flight in this caller's form.

        None: a flight joined in another form brought no answer that can be turned into this one. With ``stale`` that is
        served where the upstream fails.
        """
        row = exchange.row
        token = flight.join()
        handed_over = False
        try:
            head: Head = await flight.head()
            row.upstream = head.upstream
            row.outcome = "coalesced" if collapsed else "bypass" if fwd == "bypass" else "miss"
            if head.status >= 400:
                row.outcome, row.reason = "error", f"status {head.status}"
            if head.status >= 500 and (kept := self._after_error(exchange, plan, stale)) is not None:
                return kept
            other_form = head.status == 200 and head.stream != plan.streams
            if collapsed and other_form:
                async for _ in flight.pieces(token):  # whoever takes no pieces would hold the call up if left alone
                    pass
                landed: Landed = await flight.result()
                if landed.answer.message is None or landed.answer.outcome.fault:
                    return None
                row.usage = landed.answer.usage
                status = (b"cache-status", self._status(plan, fwd, None, collapsed=True))
                return kept_response(plan, landed.answer.message, self._runtime.clock.time(), [status])
            headers: Headers = [*head.headers, (b"x-warmgate-upstream", head.upstream.encode())]
            if head.whole:
                pieces = [piece.asked async for piece in flight.pieces(token)]
                landed = await flight.result()
                row.usage, row.reason = landed.answer.usage, landed.reason or row.reason
                headers.append((b"cache-status", self._status(plan, fwd, landed, collapsed=collapsed)))
                return Response(head.status, headers, b"".join(pieces))
            headers.append((b"cache-status", self._status(plan, fwd, None, collapsed=collapsed)))
            if head.stream:
                headers += NO_BUFFERING
            body = await begun(self._pieces(exchange, plan, flight, token))
            handed_over = True
            return Response(head.status, headers, body)
        except FellBehind:
            return None
        finally:
            if not handed_over:
                flight.leave(token)

    async def _pieces(
        self, exchange: Exchange, plan: Plan, flight: CallFlight, token: object
    ) -> AsyncGenerator[bytes, None]:
        row, clock = exchange.row, self._runtime.clock
        asked = plan.dialect.wants_usage(plan.body)
        try:
            yield b""
            async for piece in flight.pieces(token):
                if piece.last:
                    self._landed(exchange, await flight.result())
                data = piece.asked if asked else piece.unasked
                if data:
                    if row.ttft is None:
                        row.ttft = clock.monotonic() - exchange.began
                    yield data
            self._landed(exchange, await flight.result())
        except FellBehind:
            row.outcome, row.reason = "error", "reader too slow"
            yield plan.dialect.error_event("This reader fell too far behind the stream it had joined.", "too_slow")
        finally:
            flight.leave(token)

    @staticmethod
    def _landed(exchange: Exchange, landed: Landed) -> None:
        """The caller has, or is about to have, all there is."""
        exchange.complete, row = True, exchange.row
        row.usage, row.reason = landed.answer.usage, landed.failure or landed.reason or row.reason
        if landed.failure:
            row.outcome = "error"

    def _status(self, plan: Plan, fwd: str, landed: Landed | None, *, collapsed: bool) -> bytes:
        """RFC 9211: how the request was handled by the response cache."""
        parts = [f"warmgate; fwd={fwd}"]
        if collapsed:
            parts.append("collapsed")
        if landed is not None and landed.stored:
            parts.append("stored")
        if fwd == "bypass":
            parts.append(f"detail={_quoted(plan.verdict.reason)}")
        elif landed is not None and landed.reason:
            parts.append(f"detail={_quoted('not stored: ' + landed.reason)}")
        return "; ".join(parts).encode()

    def _after_error(self, exchange: Exchange, plan: Plan, stale: Entry | None) -> Response | None:
        """RFC 5861: the stale entry, where the operator's setting or the caller's ``stale-if-error`` allows it."""
        asked = plan.directives.stale_if_error
        allowed = plan.lifetime.if_error if asked is None else asked
        if stale is None or self._runtime.clock.time() - stale.expires > allowed:
            return None
        exchange.row.reason = "upstream failed"
        return self._hit(exchange, plan, stale, "stale", stale.expires)

    def _upstream_failed(self, exchange: Exchange, error: UpstreamError | EncodingError) -> Response:
        exchange.row.outcome, exchange.row.reason = "error", str(error)
        if isinstance(error, UpstreamError) and error.kind == "timeout":
            return self._error(exchange, 504, f"The upstream did not answer in time: {error}.", "upstream_timeout")
        return self._error(exchange, 502, f"The upstream could not answer: {error}.", "upstream_error")

    def _error(self, exchange: Exchange, status: int, message: str, code: str | None, headers: Any = ()) -> Response:
        exchange.row.reason = exchange.row.reason or (code or "")
        return Response(status, [JSON, *headers], exchange.error(status, message, code))

    async def _until_end(
        self, exchange: Exchange, status: int, body: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """The body; its row is written when it has ended, or the caller has left."""
        row = exchange.row
        ended = 499  # the caller left, unless it turns out otherwise
        try:
            yield b""
            async for chunk in body:
                yield chunk
            ended = status
        except (UpstreamError, EncodingError) as error:
            row.outcome, row.reason, ended = "error", str(error), status
            raise
        finally:
            await body.aclose()
            if ended == 499 and exchange.complete:
                ended = status
            elif ended == 499:
                row.outcome, row.reason = "error", row.reason or "caller left"
            self._close(exchange, ended)

    def _close(self, exchange: Exchange, status: int) -> None:
        runtime, row = self._runtime, exchange.row
        row.status = status
        row.latency = runtime.clock.monotonic() - exchange.began
        if exchange.caller is not None:
            runtime.tenants.release(exchange.caller, row.usage)
        if row.outcome in SAVED and row.ttft is None:
            row.ttft = row.latency
        runtime.ledger.record(row)


def _quoted(text: str) -> str:
    """An RFC 8941 string."""
    printable = "".join(sign if " " <= sign <= "~" else "?" for sign in text)
    return '"' + printable.replace("\\", "\\\\").replace('"', '\\"') + '"'
