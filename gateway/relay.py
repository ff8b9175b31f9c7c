"""Relaying: one upstream call, read on its way to whoever follows it, and kept only on proof that it is complete.

The relay is the producer of a `Flight`: it opens it with the upstream's head, pushes what arrives, and lands with what
it learnt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from cache.response.entry import Entry
from cache.response.keep import Keeper
from cache.response.tags import Generations
from gateway.attempts import Attempt, Attempts
from gateway.clock import Clock
from gateway.config import Cache
from gateway.encoding import Decoder, UnknownCoding, decoder
from gateway.http import Headers, Request
from gateway.ledger import Call
from gateway.ledger import Outcome as RowOutcome
from gateway.plan import Plan, Planner
from gateway.pump import read_from
from gateway.reading import CallFlight, EventStream, Head, Keep, Landed, Plain, Raw, Reading, Sink
from gateway.split import Sent
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.connection import Answered, Connection
from gateway.upstreams.headers import retry_after, to_caller, to_upstream
from gateway.upstreams.pool import Member
from gateway.upstreams.router import Route
from policies.cacheability import storable

SENT_AWAY = frozenset((429, 502, 503, 504, 529))
"""Statuses by which an upstream says that another, or a later request, may do better."""
UNUSED = {"prompt": 0, "output": 0, "cached": 0}
"""What an upstream used for a request that it refused."""


class _Spending:
    """Of a call under way: whether an upstream may have worked (``made``), and the tokens it reports. A context that
    tells of it, however the call ends.
    """

    __slots__ = ("_tell", "made", "usage")

    def __init__(self, tell: Callable[[dict[str, int] | None], None]) -> None:
        self.made = True
        self.usage: dict[str, int] | None = None
        self._tell = tell

    def __enter__(self) -> _Spending:
        return self

    def __exit__(self, *_: object) -> None:
        if self.made:
            self._tell(self.usage)


NewAttempts = Callable[[Plan, Request, Sequence[Member]], Attempts]


class Relay:
    """Makes upstream calls for plans."""

    def __init__(
        self,
        planner: Planner,
        keeper: Keeper,
        generations: Generations,
        clock: Clock,
        cache: Cache,
        not_stored: Counter[str],
        spent: Callable[[Call], None],
        attempts: NewAttempts,
    ) -> None:
        self._planner = planner
        self._attempts = attempts
        self._keeper = keeper
        self._generations = generations
        self._clock = clock
        self._accepted = cache.store_finish
        self._max_entry = cache.max_entry
        self._not_stored = not_stored
        self._spent = spent

    async def fly(
        self,
        plan: Plan,
        request: Request,
        request_id: str,
        members: Sequence[Member],
        flight: CallFlight,
        cause: RowOutcome,
        *,
        wanted: bool,
        first: Attempt | None = None,
    ) -> Landed:
        """The producer: calls ``members``, the best first, then whoever else there is to try (`gateway.attempts`).
        Raises `UpstreamError` when nobody answers. ``cause``: the outcome of the request for which it calls;
        ``wanted``: somebody wants the answer's message, to keep or to compare it. ``first``: an attempt that was made
        before.
        """
        born = self._clock.time()
        stamped = self._generations.stamp(plan.scopes) if plan.may_keep else {}
        attempts = self._attempts(plan, request, members)
        if not members and not await attempts.another(sent=False):
            raise UpstreamError("connect", "no upstream serves this model", sent=False)
        while True:
            if first is not None:
                attempt, first = attempts.begin_with(first), None
            else:
                attempt = self.attempt(attempts.plan, await attempts.next(), cause)
            with attempt as call:
                route = attempt.route
                try:
                    sent = await attempts.send(
                        attempt,
                        partial(self._send, request, request_id),
                        lambda member: self._counted(attempts.plan, member, cause),
                    )
                    response = sent.response
                    if response.status >= 300:
                        call.usage = UNUSED
                    if response.status in SENT_AWAY:
                        wait = retry_after(response.headers, self._clock.time())
                        route.refused(response.status, wait)
                        if await attempts.another(sent=True, retry_after=wait):
                            response.close()
                            continue
                    elif response.status == 404 and route.member.doubt_models() and attempts.left:
                        response.close()
                        continue
                    elif response.status == 200 and is_page(response):
                        response.close()
                        raise UpstreamError("protocol", "the upstream answered with a web page", sent=True)
                    fallback = attempts.fallback
                    keep = (
                        partial(self._keep, plan, born, stamped, cause == "stale")
                        if not fallback
                        else partial(self._not_kept, plan, f"the model {fallback} stood in")
                    )
                    codec, reading = self.read(attempts.plan, route, sent, flight, keep, fallback, wanted=wanted)
                    await read_from(response, codec, reading)
                    landed = flight.outcome
                except UpstreamError as error:
                    call.made = error.sent
                    route.failed()
                    if flight.opened or not await attempts.another(sent=error.sent):
                        raise
                    continue
                own = sent.ended(landed.answer.usage)
                call.usage = call.usage or own
            return landed

    def attempt(self, plan: Plan, route: Route, cause: RowOutcome) -> Attempt:
        """Begins to count a call."""
        return Attempt(route, self._counted(plan, route.member, cause))

    def _counted(self, plan: Plan, member: Member, cause: RowOutcome) -> _Spending:
        names = (plan.caller.tenant, plan.model.target, plan.dialect.path, member.name)
        return _Spending(lambda usage: self._spent(Call(self._clock.time(), *names, cause, plan.streams, usage)))

    async def _send(self, request: Request, request_id: str, plan: Plan, member: Member) -> UpstreamResponse:
        headers, body = self._outgoing(request, request_id, plan, member)
        return await member.send("POST", plan.dialect.path, request.query, headers, body, once=not plan.repeatable)

    def send_now(
        self, request: Request, request_id: str, plan: Plan, member: Member, answered: Answered
    ) -> Connection | None:
        """Sends a request that may be sent again over a connection that is there; None if there is none. ``answered``
        is told what came of it.
        """
        headers, body = self._outgoing(request, request_id, plan, member)
        return member.begin(plan.dialect.path, request.query, headers, body, answered)

    def _outgoing(self, request: Request, request_id: str, plan: Plan, member: Member) -> tuple[Headers, bytes]:
        headers = to_upstream(request, request_id, member.proof(request))
        return headers, self._planner.salted(plan) if member.config.cache_salt else plan.outgoing

    def read(
        self,
        plan: Plan,
        route: Route,
        sent: Sent,
        sink: Sink,
        keep: Keep,
        fallback: str,
        *,
        wanted: bool,
    ) -> tuple[Decoder | None, Reading]:
        """How an upstream's response is read, through which codec first."""
        response = sent.response
        kind = _kind(response)
        coding = next((value for name, value in response.headers if name == b"content-encoding"), None)
        headers = [*to_caller(response.headers), (b"x-warmgate-route", route.header)]
        stream = response.status == 200 and kind.startswith(b"text/event-stream")
        whole, codec = not stream, None
        if coding:
            try:
                codec = decoder(coding)
            except UnknownCoding:
                stream = whole = False
                headers.append((b"content-encoding", coding))
        head = Head(response.status, headers, route.member.name, stream, whole, fallback=fallback, echo=plan.echo)
        begun = partial(sent.begun, first_token=stream)
        if stream or whole:
            codec = sent.codec(codec, stream=stream)
        return codec, self.reading(plan, head, sink, keep, begun, wanted=wanted)

    def reading(
        self,
        plan: Plan,
        head: Head,
        sink: Sink,
        keep: Keep,
        begun: Callable[[], None] = lambda: None,
        *,
        wanted: bool,
    ) -> Reading:
        """How an answer that begins with ``head`` is read; ``begun`` is called at its first bytes."""
        if head.stream:
            return EventStream(sink, head, keep, begun, plan, wanted=wanted)
        if not head.whole:
            return Raw(sink, head, keep, begun, "unknown content coding")
        return Plain(sink, head, keep, begun, plan, max(self._max_entry, plan.dialect.held), wanted=wanted)

    def _keep(self, plan: Plan, born: float, stamped: dict[str, int], renewed: bool, landed: Landed) -> Landed:
        answer = landed.answer
        if not plan.may_keep:
            return landed
        verdict = storable(answer.outcome, self._accepted)
        reason = verdict.reason
        if verdict.cacheable and not renewed and not self._keeper.admits(plan.identity.key):
            reason = "asked too rarely"
        elif verdict.cacheable and answer.message is not None:
            if len(answer.message) <= self._max_entry:
                now = self._clock.time()
                entry = Entry(
                    fingerprint=plan.identity.fingerprint,
                    born=born,
                    expires=now + plan.lifetime.ttl,
                    kept_until=now + plan.lifetime.kept,
                    dialect=plan.dialect.name,
                    model=plan.model.target,
                    upstream=landed.head.upstream,
                    generations=stamped,
                    message=answer.message,
                    usage=answer.usage,
                )
                self._keeper.keep(plan.identity.key, entry, now, renews=plan.renews)
                return Landed(landed.head, answer, True, "", landed.failure)
            reason = "too large to keep"
        return self._not_kept(plan, reason, landed)

    def _not_kept(self, plan: Plan, reason: str, landed: Landed) -> Landed:
        if not plan.may_keep:
            return landed
        self._not_stored[reason.split(":")[0]] += 1
        return Landed(landed.head, landed.answer, False, reason, landed.failure)


def _kind(response: UpstreamResponse) -> bytes:
    return next((value.lower() for name, value in response.headers if name == b"content-type"), b"")


def is_page(response: UpstreamResponse) -> bool:
    """Whether it is for people: a proxy's or a host's word, which no API gives for an answer."""
    return _kind(response).startswith((b"text/html", b"application/xhtml"))
