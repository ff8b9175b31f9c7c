"""Relaying: one upstream call, read on its way to whoever follows it, and kept only on proof that it is complete.

The relay is the producer of a `Flight`: it opens it with the upstream's head, pushes what arrives, and lands with what
it learnt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from cache.response.entry import Entry
from cache.response.flights import Flight
from cache.response.keep import Keeper
from cache.response.tags import Generations
from gateway.attempts import Attempts
from gateway.clock import Clock
from gateway.config import Cache
from gateway.dialects.base import Answer, BrokenStream, Piece
from gateway.encoding import Decoder, EncodingError, UnknownCoding, decoder
from gateway.http import Headers, Request
from gateway.ledger import Call
from gateway.ledger import Outcome as RowOutcome
from gateway.plan import Plan, Planner
from gateway.sse import Event, EventReader, EventTooLarge
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.headers import retry_after, to_caller, to_upstream
from gateway.upstreams.pool import Member
from gateway.upstreams.router import Route
from policies.cacheability import Outcome, storable

WINDOW = 256 * 1024
"""Bytes that an upstream may run ahead of the fastest reader."""
BOUND = 8 * 1024 * 1024
"""Bytes that one flight holds for late joiners and slow readers."""
RUN_OUT = 1.0
"""Seconds that an upstream has to end its response once its stream has ended."""
SENT_AWAY = frozenset((429, 502, 503, 504, 529))
"""Statuses by which an upstream says that another, or a later request, may do better."""
UNUSED = {"prompt": 0, "output": 0, "cached": 0}
"""What an upstream used for a request that it refused."""


@dataclass(frozen=True, slots=True)
class Head:
    """How an upstream's answer begins. ``whole``: its body is complete and comes as one piece. ``followed``: another
    process made the call; ``kept``: its answer is in the store already, and comes as the result alone. ``fallback``:
    the model that stood in for the one asked for.
    """

    status: int
    headers: Headers
    upstream: str
    stream: bool
    whole: bool
    followed: bool = False
    kept: bool = False
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class Landed:
    """How it ended: the answer, whether it was stored or why not, and what went wrong on the way, if anything."""

    head: Head
    answer: Answer
    stored: bool
    reason: str
    failure: str = ""


@dataclass(slots=True)
class _Spending:
    """Of a call under way: whether an upstream may have worked, and the tokens it reports."""

    made: bool = True
    usage: dict[str, int] | None = None


CallFlight = Flight[Head, Piece, Landed]
NewAttempts = Callable[[Plan, Request, Sequence[Member]], Attempts]
Keep = Callable[[Landed], Landed]
"""Stores what may be stored, and says so."""


def new_flight() -> CallFlight:
    """A flight for one upstream call."""
    return Flight(lambda piece: len(piece.asked), window=WINDOW, bound=BOUND)


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
    ) -> Landed:
        """The producer: calls ``members``, the best first, then whoever else there is to try (`gateway.attempts`).
        Raises `UpstreamError` when nobody answers. ``cause``: the outcome of the request for which it calls.
        """
        born = self._clock.time()
        stamped = self._generations.stamp(plan.scopes)
        attempts = self._attempts(plan, request, members)
        if not members and not await attempts.another(sent=False):
            raise UpstreamError("connect", "no upstream serves this model", sent=False)
        while True:
            with await attempts.next() as route, self._counted(attempts.plan, route.member, cause) as call:
                try:
                    response = await self._send(attempts.plan, request, request_id, route.member)
                    if response.status >= 300:
                        call.usage = UNUSED
                    if response.status in SENT_AWAY:
                        wait = retry_after(response.headers, self._clock.time())
                        route.refused(response.status, wait)
                        if await attempts.another(sent=True, retry_after=wait):
                            response.close()
                            continue
                    fallback = attempts.fallback
                    keep = (
                        partial(self._keep, plan, born, stamped, cause == "stale")
                        if not fallback
                        else partial(self._not_kept, plan, f"the model {fallback} stood in")
                    )
                    landed = await self._read(attempts.plan, route, response, flight, keep, fallback)
                except UpstreamError as error:
                    call.made = error.sent
                    route.failed()
                    if flight.opened or not await attempts.another(sent=error.sent):
                        raise
                    continue
                call.usage = call.usage or landed.answer.usage
                route.learn(landed.answer.usage)
            return landed

    @contextmanager
    def _counted(self, plan: Plan, member: Member, cause: RowOutcome) -> Iterator[_Spending]:
        """Tells the ledger of one call, however it ends."""
        spending = _Spending()
        try:
            yield spending
        finally:
            if spending.made:
                names = (plan.caller.tenant, plan.model.target, plan.dialect.path, member.name)
                self._spent(Call(self._clock.time(), *names, cause, plan.streams, spending.usage))

    async def _send(self, plan: Plan, request: Request, request_id: str, member: Member) -> UpstreamResponse:
        headers = to_upstream(request, request_id, member.proof(request))
        body = self._planner.salted(plan) if member.config.cache_salt else plan.outgoing
        return await member.send("POST", plan.dialect.path, request.query, headers, body, once=not plan.repeatable)

    async def _read(
        self, plan: Plan, route: Route, response: UpstreamResponse, flight: CallFlight, keep: Keep, fallback: str
    ) -> Landed:
        name = route.member.name
        kind = next((value for name, value in response.headers if name == b"content-type"), b"")
        coding = next((value for name, value in response.headers if name == b"content-encoding"), None)
        headers = [*to_caller(response.headers), (b"x-warmgate-route", route.header)]
        stream = response.status == 200 and kind.lower().startswith(b"text/event-stream")
        try:
            codec = decoder(coding) if coding else None
        except UnknownCoding:
            assert coding is not None
            headers.append((b"content-encoding", coding))
            head = Head(response.status, headers, name, False, False, fallback=fallback)
            flight.open(head)
            await _pass_on(response.chunks(), b"", flight)
            return keep(Landed(head, Answer(None, Outcome(fault="unknown content coding")), False, ""))
        head = Head(response.status, headers, name, stream, not stream, fallback=fallback)
        begun = partial(route.begun, first_token=stream)
        return await self.read(plan, head, _decoded(response, codec), flight, keep, begun)

    async def read(
        self,
        plan: Plan,
        head: Head,
        body: AsyncGenerator[bytes, None],
        flight: CallFlight,
        keep: Keep,
        begun: Callable[[], None] = lambda: None,
    ) -> Landed:
        """Reads an answer, decoded, on its way to the followers of ``flight``; ``begun`` is called when it begins.
        Nothing is passed on before there is a first piece, so that another upstream may be asked until then.
        """
        async with aclosing(body) as chunks:
            if head.stream:
                first = await anext(chunks, b"")
                begun()
                flight.open(head)
                answer, failure, last = await _read_stream(plan, first, chunks, flight)
                landed = keep(Landed(head, answer, False, "", failure))
                # Callers leave when they have the last piece, so all must be settled before they get it.
                flight.keep_going()
                flight.land(landed)
                await flight.push(last)
                await _run_out(chunks)
                return landed
            begun()
            return await self._read_plain(plan, head, chunks, flight, keep)

    async def _read_plain(
        self, plan: Plan, head: Head, chunks: AsyncGenerator[bytes, None], flight: CallFlight, keep: Keep
    ) -> Landed:
        """Holds the body back until it is whole, so that its fate is known when its head is sent; a large one is
        passed on.
        """
        body = bytearray()
        async for chunk in chunks:
            body += chunk
            if len(body) > max(self._max_entry, plan.dialect.held):
                head = replace(head, whole=False)
                flight.open(head)
                await _pass_on(chunks, bytes(body), flight)
                return keep(Landed(head, Answer(None, Outcome(fault="too large to keep")), False, ""))
        text = bytes(body)
        if 200 <= head.status < 300:
            answer = plan.dialect.read(plan.body, text)
        else:
            answer = Answer(None, Outcome(fault=f"status {head.status}"))
        landed = keep(Landed(head, answer, False, ""))
        flight.open(head)
        await flight.push(Piece.same(text))
        return landed

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
                self._keeper.keep(plan.identity.key, entry, now)
                return Landed(landed.head, answer, True, "", landed.failure)
            reason = "too large to keep"
        return self._not_kept(plan, reason, landed)

    def _not_kept(self, plan: Plan, reason: str, landed: Landed) -> Landed:
        if not plan.may_keep:
            return landed
        self._not_stored[reason.split(":")[0]] += 1
        return Landed(landed.head, landed.answer, False, reason, landed.failure)


async def _read_stream(
    plan: Plan, first: bytes, chunks: AsyncGenerator[bytes, None], flight: CallFlight
) -> tuple[Answer, str, Piece]:
    """Passes events on as they come, but for the last piece, which it returns with the answer and what failed, if
    anything. A stream that breaks ends with exactly one error event, and no made-up end.
    """
    collector = plan.dialect.collector(plan.body)
    failure = ""
    try:
        async with aclosing(_events(first, chunks)) as events:
            async for event in events:
                piece = collector.feed(event)
                if collector.ended:
                    return collector.close(), "", replace(piece, last=True)
                if piece.asked or piece.unasked:
                    await flight.push(piece)
    except (UpstreamError, EncodingError, BrokenStream, EventTooLarge) as error:
        failure = str(error) or type(error).__name__
    failure = failure or "the upstream's stream ended early"
    answer = collector.close()
    broken = Answer(None, Outcome(fault=answer.outcome.fault or f"incomplete: {failure}"), answer.usage)
    event = plan.dialect.error_event(f"The upstream failed in mid-stream: {failure}.", "upstream_error")
    return broken, failure, Piece(event, event, last=True)


async def _events(first: bytes, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[Event, None]:
    reader = EventReader()
    for event in reader.feed(first):
        yield event
    async for chunk in chunks:
        for event in reader.feed(chunk):
            yield event
    for event in reader.finish():
        yield event


async def _run_out(chunks: AsyncGenerator[bytes, None]) -> None:
    """Reads what an upstream sends behind the end of its stream, so that its connection can be used again."""
    try:
        async with asyncio.timeout(RUN_OUT):
            async for _ in chunks:
                pass
    except (TimeoutError, UpstreamError, EncodingError):
        pass


async def _decoded(response: UpstreamResponse, codec: Decoder | None) -> AsyncGenerator[bytes, None]:
    """The body without its content coding; raises `EncodingError`, `UpstreamError`."""
    try:
        async for chunk in response.chunks():
            data = codec.feed(chunk) if codec is not None else chunk
            if data:
                yield data
        if codec is not None and (data := codec.finish()):
            yield data
    finally:
        response.close()


async def _pass_on(chunks: AsyncGenerator[bytes, None], begun: bytes, flight: CallFlight) -> None:
    if begun:
        await flight.push(Piece.same(begun))
    async for chunk in chunks:
        await flight.push(Piece.same(chunk))
