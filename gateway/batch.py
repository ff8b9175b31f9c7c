"""Embeddings, item by item: a batch asks the upstream only for what is new, each item once, whoever else asks for it.

Usage: an answer put together here reports for each input the prompt tokens that its item was counted with when it was
computed (an item's share in its batch), as if the whole batch had been computed; the ledger counts as upstream tokens
only what was sent upstream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cache.response.canonical import Identity, Scope, identify, respell
from cache.response.entry import Entry
from gateway.coalescing import cache_status
from gateway.dialects.embeddings import Item, assemble, is_kept, items_of, kept_items, read_only, shares
from gateway.encoding import EncodingError
from gateway.exchange import Exchange
from gateway.hit import hit_headers
from gateway.http import JSON, Request, Response
from gateway.ladder import seen
from gateway.ledger import Outcome, Row
from gateway.plan import Plan, varying
from gateway.reading import Head, Landed, new_flight
from gateway.runtime import Runtime
from gateway.tenants import Denied
from gateway.upstreams.client import UpstreamError
from gateway.upstreams.pool import Member
from policies.cacheability import Verdict
from policies.freshness import freshness, serves_after_error
from policies.misses import Cause

LOOKUPS_AT_ONCE = 64
"""Lookups of one batch in the shared store that may wait at once, so that a large batch is not taken for a slow
store.
"""
_ITEM = "embeddings/item"
"""Stands for the dialect in the keys of items, so that no item is found as the answer to a request."""

Wanted = dict[Identity, Item]
Route = Callable[[], Awaitable[list[Member]]]


@dataclass(slots=True)
class _Work:
    """One request on its way. ``old``: which items are too old to serve, and why (RFC 9211's ``fwd``); ``due``: which
    serve, but are to be renewed; ``fwd``: why the cache does not answer all; ``cause``: the outcome of upstream calls.
    """

    plan: Plan
    request: Request
    row: Row
    route: Route
    wanted: Wanted
    order: list[Identity]
    have: dict[Identity, Entry] = field(default_factory=dict)
    stale: dict[Identity, Entry] = field(default_factory=dict)
    recalled: int = 0
    old: dict[Identity, str] = field(default_factory=dict)
    due: list[Identity] = field(default_factory=list)
    fwd: str = "request"
    cause: Outcome = "miss"
    joined: bool = False
    stored: bool = False

    @property
    def new(self) -> list[Identity]:
        return [identity for identity in self.wanted if identity not in self.have]


class Batches:
    """Answers embedding requests. ``asked`` holds the items that an upstream is computing."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: dict[Identity, asyncio.Future[Entry]] = {}

    async def answer(self, exchange: Exchange, plan: Plan, route: Route) -> Response | None:
        """None: not for item by item. Raises what ``route`` raises, and `UpstreamError`."""
        request, row = exchange.request, exchange.row
        items = items_of(plan.body)
        if items is None:
            return None
        order = [_identity(plan, request, item) for item in items]
        work = _Work(plan, request, row, route, dict(zip(order, items, strict=True)), order)
        row.model = plan.model.target
        if plan.may_recall:
            if self._runtime.trust.believes(plan):
                await self._recall(work)
            reasons = {work.old.get(identity, "uri-miss") for identity in work.new}
            work.fwd = next((why for why in ("uri-miss", "stale") if why in reasons), "request")
        if work.due and plan.may_keep:
            self._runtime.background(self._renew(work))
        if work.new and plan.directives.only_if_cached:
            return None
        if work.new and work.old.get(work.new[0]) != "request" and plan.may_recall and plan.may_keep:
            exchange.cause = self._cause(work, work.new[0])
        work.recalled = len(work.have)
        while new := work.new:
            others = {i: self._asked[i] for i in new if plan.may_join and i in self._asked}
            response = await self._ask(work, [i for i in new if i not in others])
            if response is not None:
                return response
            if others:
                await asyncio.wait(others.values())
                work.have |= {
                    i: f.result() for i, f in others.items() if not f.cancelled() and self._serves(work, f.result())
                }
                work.joined = True
        return self._whole(work)

    def _cause(self, work: _Work, missing: Identity) -> Cause:
        """Why the cache did not have the whole batch: what the first item that is missing was lost to."""
        plan, runtime = work.plan, self._runtime
        if not runtime.trust.believes(plan):
            return "disarmed"
        alone = replace(plan, identity=missing, body={**plan.body, "input": work.wanted[missing]})
        return runtime.misses.cause(seen(alone), runtime.clock.time())

    async def _recall(self, work: _Work) -> None:
        """Looks every item up: memory at once, the shared store a few at a time."""
        wanted, runtime = list(work.wanted), self._runtime
        for start in range(0, len(wanted), LOOKUPS_AT_ONCE):
            some, now = wanted[start : start + LOOKUPS_AT_ONCE], runtime.clock.time()
            lookups = (runtime.recall.find(i, now, work.plan.tag_scopes) for i in some)
            for identity, found in zip(some, await asyncio.gather(*lookups), strict=True):
                if found is None or not is_kept(found.entry.message):
                    continue
                entry, directives = found.entry, work.plan.directives
                age, expires_in = self._times(entry)
                state = freshness(age, expires_in, work.plan.lifetime.while_revalidate, directives)
                if state != "expired":
                    work.have[identity] = entry
                    work.due += [identity] if state == "revalidate" else []
                    continue
                work.old[identity] = "request" if expires_in > 0 else "stale"
                if serves_after_error(age, expires_in, work.plan.lifetime.if_error, directives):
                    work.stale[identity] = entry

    async def _renew(self, work: _Work) -> None:
        """Has stale items computed anew behind the caller's back, each once however many ask."""
        due = [identity for identity in work.due if identity not in self._asked]
        have = {identity: entry for identity, entry in work.have.items() if identity not in due}
        with suppress(Denied, UpstreamError, EncodingError):
            await self._ask(replace(work, row=replace(work.row), have=have, stale={}, cause="stale"), due)

    def _times(self, entry: Entry) -> tuple[float, float]:
        """Its age, and in how many seconds it expires."""
        now = self._runtime.clock.time()
        expires = self._runtime.generations.fresh_until(entry.generations, entry.born, entry.expires)
        return max(0.0, now - entry.born), expires - now

    def _serves(self, work: _Work, entry: Entry) -> bool:
        """Whether an item that somebody else asked for is new enough: nothing was purged since, for one thing."""
        fresh = freshness(*self._times(entry), 0.0, work.plan.directives) != "expired"
        return fresh and self._alive(work, entry)

    def _alive(self, work: _Work, entry: Entry) -> bool:
        """Whether nothing was purged under which it was kept, or under which it is asked for."""
        return self._runtime.recall.for_tags(entry, work.plan.tag_scopes) is not None

    async def _ask(self, work: _Work, new: list[Identity]) -> Response | None:
        """Has an upstream compute items, for this caller and whoever waits. A response: to be passed on as it is."""
        if not new:
            return None
        promised = {i: asyncio.get_running_loop().create_future() for i in new} if work.plan.may_join else {}
        self._asked |= promised
        try:
            response = await self._call(work, new)
            for identity, future in promised.items():
                if identity in work.have:
                    future.set_result(work.have[identity])
            return response
        finally:
            for identity, future in promised.items():
                del self._asked[identity]
                future.cancel()

    async def _call(self, work: _Work, new: list[Identity]) -> Response | None:
        """The upstream call itself; on success the items are kept and added to what ``work`` has."""
        runtime, row = self._runtime, work.row
        everything = new == work.order
        born = runtime.clock.time()
        plans = {i: replace(work.plan, identity=i) for i in new}
        stamps = {i: runtime.generations.stamp(plan.scopes) for i, plan in plans.items()}
        row.outcome = work.cause
        for identity in new if work.plan.may_keep else ():
            runtime.keeper.sight(identity.key)
        try:
            head, landed, body = await self._fly(work, new, everything)
        except UpstreamError:
            if self._serves_stale(work, new):
                return None
            raise
        row.upstream, row.usage = head.upstream, landed.answer.usage or None
        if head.status >= 500 and self._serves_stale(work, new):
            return None
        message = landed.answer.message
        if message is None and head.status == 200 and not everything:
            return await self._call(work, work.order)  # an answer of unknown form cannot be put together
        headers = [*head.headers, (b"x-warmgate-upstream", head.upstream.encode())]
        if message is None:
            row.outcome = "error" if head.status >= 400 else row.outcome
            row.reason = landed.answer.outcome.fault
            if work.plan.may_keep:
                runtime.not_stored[row.reason] += 1
                landed = replace(landed, reason=row.reason)
            status = cache_status(work.plan, work.fwd, head, landed, collapsed=False)
            return Response(head.status, [*headers, status], body)
        tokens = landed.answer.usage.get("prompt")
        counted = shares(tokens, [work.wanted[i] for i in new]) if tokens is not None else [None] * len(new)
        now = runtime.clock.time()
        work.stored = work.plan.may_keep
        for identity, kept, count in zip(new, kept_items(message), counted, strict=True):
            entry = Entry(
                fingerprint=identity.fingerprint,
                born=born,
                expires=now + work.plan.lifetime.ttl,
                kept_until=now + work.plan.lifetime.kept,
                dialect=_ITEM,
                model=work.plan.model.target,
                upstream=head.upstream,
                generations=stamps[identity],
                message=kept,
                usage={} if count is None else {"prompt": count},
            )
            work.have[identity] = entry
            if not runtime.keeper.admits(identity.key) or len(kept) > runtime.config.cache.max_entry:
                work.stored = False
            elif work.plan.may_keep:
                renews = work.plan.renews or work.old.get(identity) == "request"
                runtime.keeper.keep(identity.key, entry, now, renews=renews)
        if everything:
            stored = b"; stored" if work.stored else b""
            status = b"warmgate; fwd=" + work.fwd.encode() + stored
            return Response(head.status, [*headers, (b"cache-status", status)], body)
        return None

    async def _fly(self, work: _Work, new: Sequence[Identity], everything: bool) -> tuple[Head, Landed, bytes]:
        """Sends the caller's own bytes where everything is asked for, else the same request for the new items."""
        plan, runtime = work.plan, self._runtime
        if not everything:
            body = {**plan.body, "input": [work.wanted[i] for i in new], "model": plan.model.target}
            body.pop("cache_salt", None)
            plan = replace(plan, body=body, outgoing=respell(body))
        plan = replace(plan, verdict=Verdict(False, "kept item by item"))
        members = await work.route()
        flight = new_flight(shared=False)
        call = runtime.relay.fly(
            plan, work.request, work.row.request_id, members, flight, work.row.outcome, wanted=True
        )
        flight.start(call, lambda: None)
        token = flight.join()
        try:
            head = await flight.head()
            pieces = [piece.asked async for piece in flight.pieces(token)]
            return head, await flight.result(), b"".join(pieces)
        finally:
            flight.leave(token)

    def _serves_stale(self, work: _Work, new: Sequence[Identity]) -> bool:
        """RFC 5861, ``stale-if-error``: whether what the upstream failed to give is there, though stale."""
        if not all(identity in work.stale and self._alive(work, work.stale[identity]) for identity in new):
            return False
        work.have |= {identity: work.stale[identity] for identity in new}
        work.row.outcome, work.row.reason = "stale", "upstream failed"
        return True

    def _whole(self, work: _Work) -> Response:
        """The answer to the batch, put together."""
        row = work.row
        entries = [work.have[identity] for identity in work.order]
        known = [entry.usage["prompt"] for entry in entries if "prompt" in entry.usage]
        tokens = sum(known) if len(known) == len(entries) else None
        body = assemble([entry.message for entry in entries], tokens)
        row.usage = read_only(tokens) or None
        if row.outcome == "miss":
            detail = b'"%d/%d items"' % (work.recalled, len(work.wanted))
            fwd = b"partial" if work.recalled else work.fwd.encode()
            stored = b"; stored" if work.stored else b""
            status = b"warmgate; fwd=%s%s; detail=%s" % (fwd, stored, detail)
            upstream = (b"x-warmgate-upstream", row.upstream.encode())
            return Response(200, [JSON, (b"cache-status", status), upstream], body)
        row.upstream = entries[0].upstream
        if work.joined and row.outcome != "stale":
            row.outcome = "coalesced"
            return Response(200, [JSON, (b"cache-status", b"warmgate; fwd=uri-miss; collapsed")], body)
        times = [self._times(entry) for entry in entries]
        expires = min(expires_in for _, expires_in in times)
        if row.outcome != "stale":
            row.outcome = "exact" if expires > 0 else "stale"
        age = max(age for age, _ in times)
        return Response(200, [JSON, *hit_headers(row.outcome, age, expires)], body)


def _identity(plan: Plan, request: Request, item: Item) -> Identity:
    """The identity of one item: that of the request, had it asked for this item only."""
    vary = varying(request, plan.dialect)
    scope = Scope(_ITEM, plan.caller.tenant, plan.namespace, plan.model.target, plan.model.revision, vary)
    body = {**plan.body, "input": item, "model": plan.model.target}
    return identify(scope, body, plan.dialect.excluded)
