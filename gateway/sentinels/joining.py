"""Coalescing: two equal requests at the same time must make one call, here and, with Redis, across gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cache.response.shared_flights import SharedFlights
from cache.stores.breaker import GuardedStore
from cache.stores.redis import RedisStore
from gateway.runtime import Runtime
from gateway.sentinels.aside import ONE, Aside
from gateway.sentinels.keeping import question
from gateway.sentinels.lights import Light, green, grey, red
from gateway.sentinels.patience import comes_true

PATIENCE = 1.0
"""Seconds in which the second request must have joined."""


async def coalescing(runtime: Runtime) -> Light:
    """Within this worker."""
    name, aside, body = "coalescing", Aside(runtime), question()
    plan = aside.plan(ONE, body)
    if not plan.may_join:
        return grey(name, "only what may be kept is shared", "cache.ttl, cache.rules")

    def joined() -> bool:
        flight = aside.runtime.flights.get(key)
        return flight is not None and flight.followers == 2

    key = plan.identity.fingerprint
    calls = await _both(aside, aside, body, joined)
    return green(name) if calls == 1 else red(name, f"two equal requests made {calls} calls", "cache")


async def across(runtime: Runtime, store: GuardedStore | None) -> Light:
    """Between gateways; ``store``: Redis, in working order."""
    name = "shared coalescing"
    if store is None or not isinstance(store.store, RedisStore):
        return grey(name, "needs Redis", "cache.redis")
    shared = SharedFlights(store, store.store.leases)
    here, there = (Aside(runtime, store=store, flights=shared) for _ in range(2))
    body = question()
    plan = here.plan(ONE, body)
    if not plan.may_join:
        return grey(name, "only what may be kept is shared", "cache.ttl, cache.rules")
    boarded = store.counters["board"]["ok"]
    calls = await _both(here, there, body, lambda: store.counters["board"]["ok"] >= boarded + 2)
    await here.runtime.keeper.drain()
    await there.runtime.keeper.drain()
    await store.delete(plan.identity.key)
    if calls == 1:
        return green(name)
    return red(name, f"two equal requests to two gateways made {calls} calls", "cache.redis.timeout")


async def _both(here: Aside, there: Aside, body: dict[str, Any], joined: Callable[[], bool]) -> int:
    """The calls that two requests made; answers wait until they have ``joined``, made a call each, or waited long."""
    standins = {here.standin, there.standin}
    for standin in standins:
        standin.go.clear()
    asking = [asyncio.ensure_future(aside.ask(ONE, body)) for aside in (here, there)]

    async def settled() -> bool:
        return joined() or sum(standin.calls for standin in standins) == 2

    await comes_true(settled, PATIENCE)
    for standin in standins:
        standin.go.set()
    await asyncio.gather(*asking)
    return sum(standin.calls for standin in standins)
