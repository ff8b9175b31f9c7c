"""Sharing upstream calls with other gateways: the producer of a flight leads it, or follows the gateway that does."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from hashlib import sha256
from typing import Any

import orjson

from cache.response.shared_flights import Follow, Lead, LeaderLost, SharedFlights, Stored
from gateway.dialects.base import Answer
from gateway.plan import Plan
from gateway.reading import CallFlight, Head, Landed, Reading
from gateway.runtime import Runtime
from gateway.upstreams.client import UpstreamError
from policies.cacheability import Outcome
from policies.freshness import freshness

ATTEMPTS = 3
"""Leaders that may be lost one after another before a call is made without asking any more."""


class _TooOld(Exception):
    """What another gateway is being told began too long ago for this caller."""


class Sharing:
    """See `cache.response.shared_flights`."""

    def __init__(self, runtime: Runtime, shared: SharedFlights) -> None:
        self._runtime = runtime
        self._shared = shared

    async def fly(self, plan: Plan, flight: CallFlight, call: Callable[[], Coroutine[Any, Any, Landed]]) -> Landed:
        """The producer of ``flight``: what ``call`` brings, or the same call of another gateway."""
        anew = not self._runtime.trust.believes(plan)
        for _ in range(ATTEMPTS):
            seat = await self._shared.board(self._name(plan), anew=anew)
            if isinstance(seat, Stored):
                landed = await self._stored(plan, flight)
                if landed is not None:
                    return landed
                anew = True
            elif isinstance(seat, Follow):
                try:
                    return await self._follow(plan, flight, seat)
                except (LeaderLost, UpstreamError):
                    if flight.opened:
                        raise
                except _TooOld:
                    break
            else:
                if seat is not None:
                    self._runtime.background(self._lead(plan, flight, seat))
                break
        return await call()

    async def _lead(self, plan: Plan, flight: CallFlight, seat: Lead) -> None:
        born = self._runtime.clock.time()

        async def stored(landed: Landed) -> bool:
            await self._runtime.keeper.written(plan.identity.key)
            return landed.stored

        await seat.share(flight, lambda head: _packed(head, born), lambda piece: piece.asked, stored)

    async def _follow(self, plan: Plan, flight: CallFlight, seat: Follow) -> Landed:
        """Reads what the leader tells as if an upstream did; raises `LeaderLost`, `UpstreamError`, `_TooOld`."""
        try:
            head, born = _unpacked(await seat.head())
            generations, max_age = self._runtime.generations, plan.directives.max_age
            purged = not generations.alive({}, born) or generations.fresh_until({}, born, math.inf) < math.inf
            if purged or (max_age is not None and self._runtime.clock.time() - born > max_age):
                raise _TooOld
            await _feed(
                seat, flight, self._runtime.relay.reading(plan, head, flight, lambda landed: landed, wanted=True)
            )
            return flight.outcome
        finally:
            await seat.leave()

    async def _stored(self, plan: Plan, flight: CallFlight) -> Landed | None:
        """The answer that has just been put into the store."""
        runtime = self._runtime
        found = await runtime.recall.below(plan.identity, runtime.clock.time(), plan.tag_scopes)
        if found is None:
            return None
        entry, now = found.entry, runtime.clock.time()
        expires = runtime.generations.fresh_until(entry.generations, entry.born, entry.expires)
        if freshness(max(0.0, now - entry.born), expires - now, 0.0, plan.directives) == "expired":
            return None
        head = Head(200, [], entry.upstream, stream=False, whole=True, elsewhere=entry.born, kept=True)
        flight.open(head)
        return Landed(head, Answer(entry.message, Outcome(), entry.usage), False, "")

    def _name(self, plan: Plan) -> bytes:
        """Gateways share a call when they agree on the request and on what was purged."""
        name = plan.identity.fingerprint.hex().encode()
        purges = sorted((scope, made) for scope, made in self._runtime.generations.stamp(plan.scopes).items() if made)
        return name + b"-" + sha256(repr(purges).encode()).hexdigest()[:16].encode() if purges else name


async def _feed(seat: Follow, flight: CallFlight, reading: Reading) -> None:
    """Gives a reading what the leader tells; raises UpstreamError where it breaks off."""
    try:
        async for data in seat.pieces():
            reading.feed(data)
            if reading.done:
                return
            await flight.room()
        reading.end()
    except LeaderLost:
        reading.fail(UpstreamError("reset", "the gateway that made this call is gone", sent=True))


def _packed(head: Head, born: float) -> bytes:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
    told = (head.status, headers, head.upstream, head.stream, head.whole, head.fallback, born, head.echo.decode())
    return orjson.dumps(told)


def _unpacked(data: bytes) -> tuple[Head, float]:
    """Raises `LeaderLost` for what no gateway of this version has said."""
    try:
        status, headers, upstream, stream, whole, fallback, born, echo = orjson.loads(data)
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        began, stood_in, own = float(born), str(fallback), str(echo).encode()
        head = Head(int(status), pairs, str(upstream), bool(stream), bool(whole), began, fallback=stood_in, echo=own)
        return head, began
    except (ValueError, TypeError, AttributeError):
        raise LeaderLost from None
