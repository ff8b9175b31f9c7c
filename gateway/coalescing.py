"""Joining: equal requests in flight share one upstream call, in whichever form each of them wants its answer.

A request joins a flight that is under way, or takes off with one that others may join. A flight that began before a
purge is joined by nobody after it, and a stale entry is renewed by one flight however many ask.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any

from cache.response.entry import BadEntry
from cache.response.flights import FellBehind, Follower
from gateway.attempts import Attempt
from gateway.dialects.base import Piece
from gateway.encoding import EncodingError
from gateway.exchange import Exchange
from gateway.hit import kept_response
from gateway.http import NO_BUFFERING, Headers, Response, Stream
from gateway.ledger import Outcome
from gateway.plan import Plan
from gateway.reading import CallFlight, Head, Landed, new_flight
from gateway.runtime import Runtime
from gateway.sharing import Sharing
from gateway.tenants import Denied
from gateway.upstreams.client import UpstreamError
from gateway.upstreams.pool import Member

DISARMED = "miss"
"""Why the cache did not answer (RFC 9211) where what it has is not believed (`gateway.trust`)."""
Spare = Callable[[], Response | None]
"""A stale answer, if one may be served now that the upstream has failed."""


class Coalescing:
    """Answers what the cache could not, by a call of its own or by somebody else's."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sharing = Sharing(runtime, runtime.shared_flights) if runtime.shared_flights is not None else None

    async def answer(
        self, exchange: Exchange, plan: Plan, fwd: str, spare: Spare, first: Attempt | None = None
    ) -> Response:
        """``fwd``: why the cache could not (RFC 9211). ``first``: a call that was begun already (`gateway.direct`).
        Raises `Denied`, `UpstreamError`, `EncodingError`.
        """
        if plan.may_keep:
            self._runtime.keeper.sight(plan.identity.key)
        try:
            members = await self.route(exchange, plan)
            cause = "bypass" if fwd == "bypass" else "miss"
            for attempt in (1, 2, 3):  # a flight may turn out to bring nothing of use; then the next is tried
                oldest = self._oldest(plan)
                joined = self._joinable(plan, oldest) if plan.may_join and attempt < 3 else None
                flight = joined or self._take_off(exchange, plan, members, cause, first, alone=attempt == 3)
                first = None
                collapsed = joined is not None
                response = await self._follow(exchange, plan, flight, fwd, spare, oldest, collapsed=collapsed)
                if response is not None:
                    return response
            raise UpstreamError("protocol", "no answer came in the form that was asked for", sent=True)
        except (UpstreamError, EncodingError):
            if (kept := spare()) is None:
                raise
            return kept

    def refresh(self, exchange: Exchange, plan: Plan) -> None:
        """Renews a stale entry behind the caller's back, once however many ask."""
        if not plan.may_keep or self._under_way(plan):
            return

        async def renew() -> None:
            try:
                members = await self.route(exchange, plan)
            except (Denied, UpstreamError):
                return
            if not self._under_way(plan):
                self._take_off(exchange, plan, members, "stale").keep_going()

        self._runtime.background(renew())

    async def route(self, exchange: Exchange, plan: Plan) -> list[Member]:
        """The upstreams that may answer, empty where only a fallback's may; raises `Denied` (404), `UpstreamError`."""
        runtime = self._runtime
        members = await runtime.pool.serving(plan.model.target, exchange.request)
        if members:
            return members
        for name in plan.model.fallback if plan.dialect.interchangeable else ():
            if await runtime.pool.serving(runtime.planner.model(name).target, exchange.request):
                return []  # it will stand in
        if not runtime.pool.members:
            raise UpstreamError("connect", "no upstream is configured", sent=False)
        exchange.row.model, exchange.row.reason = "", f"model_not_found: {plan.model.name}"
        raise Denied(404, f"The model {plan.model.name[:100]!r} does not exist here.", "model_not_found")

    def _under_way(self, plan: Plan) -> bool:
        return self._runtime.flights.get(plan.identity.fingerprint, tags=plan.tag_scopes) is not None

    def _oldest(self, plan: Plan) -> float | None:
        """When a call must have begun, at the earliest, that this caller accepts (unix seconds)."""
        max_age = plan.directives.max_age
        return None if max_age is None else self._runtime.clock.time() - max_age

    def _joinable(self, plan: Plan, oldest: float | None) -> CallFlight | None:
        """A flight that answers this request."""
        return self._runtime.flights.get(plan.identity.fingerprint, oldest, plan.tag_scopes)

    def _take_off(
        self,
        exchange: Exchange,
        plan: Plan,
        members: list[Member],
        cause: Outcome,
        first: Attempt | None = None,
        *,
        alone: bool = False,
    ) -> CallFlight:
        """Begins an upstream call, to be counted under the outcome that causes it; others may join it, unless they can
        join another.
        """
        runtime, key = self._runtime, plan.identity.fingerprint
        shared = (plan.may_join or cause == "stale") and not alone and not self._under_way(plan)
        flight = new_flight(shared=shared)
        wanted = plan.may_keep or exchange.comparison is not None

        def call() -> Coroutine[Any, Any, Landed]:
            request, name = exchange.request, exchange.request_id
            return runtime.relay.fly(plan, request, name, members, flight, cause, wanted=wanted, first=first)

        if shared:
            runtime.flights.add(key, flight, runtime.clock.time(), runtime.generations.stamp(plan.scopes))
        producer = call() if not shared or self._sharing is None else self._sharing.fly(plan, flight, call)
        flight.start(producer, lambda: runtime.flights.drop(key, flight))
        return flight

    async def _follow(
        self,
        exchange: Exchange,
        plan: Plan,
        flight: CallFlight,
        fwd: str,
        spare: Spare,
        oldest: float | None,
        *,
        collapsed: bool,
    ) -> Response | None:
        """The answer of a flight in this caller's form; None: it is in another form, and cannot be turned into this, or
        another gateway began it before ``oldest``.
        """
        row = exchange.row
        follower = flight.join()
        handed_over = False
        try:
            head = await flight.head()
            if head.elsewhere is not None and oldest is not None and head.elsewhere < oldest:
                return None
            row.upstream, collapsed = head.upstream, collapsed or head.elsewhere is not None
            row.outcome = "coalesced" if collapsed else "bypass" if fwd == "bypass" else "miss"
            if head.status >= 500 and (kept := spare()) is not None:
                return kept
            if head.status >= 400:
                row.outcome, row.reason = "error", f"status {head.status}"
            upstream = named(head)
            other_form = head.stream != plan.streams or head.echo != plan.echo
            if head.kept or (collapsed and head.status == 200 and other_form):
                async for _ in flight.pieces(follower):  # whoever takes no pieces would hold the call up if left alone
                    pass
                landed = await flight.result()
                if landed.answer.message is None or landed.answer.outcome.fault:
                    return None
                row.usage = landed.answer.usage
                headers = [upstream, cache_status(plan, fwd, head, None, collapsed=True)]
                return kept_response(plan, landed.answer.message, self._runtime.clock.time(), headers)
            headers: Headers = [*head.headers, upstream]
            if head.whole:
                landed = await flight.result()
                pieces = [piece.asked for piece in follower.take()]
                row.usage, row.reason = landed.answer.usage, landed.reason or row.reason
                exchange.computed = landed.answer.message
                headers.append(cache_status(plan, fwd, head, landed, collapsed=collapsed))
                return Response(head.status, headers, b"".join(pieces))
            headers.append(cache_status(plan, fwd, head, None, collapsed=collapsed))
            if head.stream:
                headers += NO_BUFFERING
            handed_over = True
            return Response(head.status, headers, _Following(exchange, plan, flight, follower, stream=head.stream))
        except (FellBehind, BadEntry):
            return None
        finally:
            if not handed_over:
                flight.leave(follower)


class _Following(Stream):
    """The body of an answer that is not whole yet, for one follower of its flight."""

    def __init__(
        self, exchange: Exchange, plan: Plan, flight: CallFlight, follower: Follower[Piece], *, stream: bool
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._plan = plan
        self._flight = flight
        self._follower = follower
        self._stream = stream
        self._asked = plan.dialect.wants_usage(plan.body)
        follower.wake = lambda: self.wake()

    def take(self) -> bytes:
        try:
            pieces = self._follower.take()
        except FellBehind:
            return self._fell_behind()
        if self._follower.ended:
            self.ended = True
            landed_at(self._exchange, self._flight.outcome)
        if len(pieces) == 1:
            data = pieces[0].asked if self._asked else pieces[0].unasked
        else:
            data = b"".join([piece.asked if self._asked else piece.unasked for piece in pieces])
        if data and self._exchange.row.ttft is None:
            self._exchange.first_piece()
        return data

    def leave(self) -> None:
        self._flight.leave(self._follower)

    def _fell_behind(self) -> bytes:
        row = self._exchange.row
        row.outcome, row.reason = "error", "reader too slow"
        if not self._stream:
            raise UpstreamError("reset", "this reader fell too far behind", sent=True)
        self.ended = True
        message = "This reader fell too far behind the stream it had joined."
        return self._plan.dialect.error_event(message, "too_slow")


def landed_at(exchange: Exchange, landed: Landed) -> None:
    """The caller has, or is about to have, all there is."""
    row = exchange.row
    exchange.computed = landed.answer.message
    row.usage, row.reason = landed.answer.usage, landed.failure or landed.reason or row.reason
    if landed.failure:
        row.outcome = "error"


def named(head: Head) -> tuple[bytes, bytes]:
    """Who computed it, and which model where that was not the one asked for."""
    who = f"{head.upstream}; model={head.fallback}" if head.fallback else head.upstream
    return b"x-warmgate-upstream", who.encode()


def cache_status(plan: Plan, fwd: str, head: Head, landed: Landed | None, *, collapsed: bool) -> tuple[bytes, bytes]:
    """RFC 9211: how the request was handled by the response cache."""
    parts = [f"warmgate; fwd={fwd}"]
    if collapsed:
        parts.append("collapsed")
    if landed is not None and landed.stored:
        parts.append("stored")
    if fwd == "bypass":
        parts.append(f"detail={_quoted(plan.verdict.reason)}")
    elif fwd == DISARMED:
        parts.append("detail=disarmed")
    elif head.fallback:
        parts.append(f"detail={_quoted(f'not stored: the model {head.fallback} stood in')}")
    elif landed is not None and landed.reason:
        parts.append(f"detail={_quoted('not stored: ' + landed.reason)}")
    return b"cache-status", "; ".join(parts).encode()


@lru_cache(1024)
def _quoted(text: str) -> str:
    """An RFC 8941 string."""
    printable = "".join(sign if " " <= sign <= "~" else "?" for sign in text)
    return '"' + printable.replace("\\", "\\\\").replace('"', '\\"') + '"'
