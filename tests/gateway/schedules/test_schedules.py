"""Thousands of random schedules in which purges, expiry, refreshes, joining, leaving and dying meet: nobody is told
what the reference model does not permit, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from cache.response.flights import Flight, Flights
from cache.response.shared_flights import LeaderLost
from cache.response.tags import Generations
from gateway import pipeline, relay
from gateway.coalescing import Coalescing
from gateway.sharing import Sharing
from policies.cacheability import Verdict
from tests.gateway.schedules.simulated_loop import SimulatedLoop
from tests.gateway.schedules.world import World


def lived_through(seeds: range, gateways: int) -> Counter[str]:
    """Runs schedules; tells how often what happened in them, and fails at the first that goes wrong."""
    seen: Counter[str] = Counter()
    loop = SimulatedLoop()
    asyncio.set_event_loop(loop)

    async def live(seed: int) -> Counter[str]:
        random.seed(seed)  # the jitter of retries
        world = World(seed, loop, gateways)
        happened = await world.run()
        assert not world.faults, f"schedule {seed}: " + "\n".join(world.faults)
        return happened

    try:
        for seed in seeds:
            seen += loop.run_until_complete(live(seed))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        loop.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("gateways", "schedules"), [(1, 1200), (2, 800)])
def test_nobody_is_told_what_the_model_does_not_permit(gateways: int, schedules: int) -> None:
    seen = lived_through(range(schedules), gateways)
    for kind in ("computed", "hit", "stale", "joined", "failed", "refused", "left"):
        assert seen[kind] > schedules / 4, f"too few to mean anything: {seen}"


# That it can fail


def _whatever_flies(self: Flights[Any], key: bytes, oldest: float | None = None) -> Any:
    found = self._under_way.get(key)
    return found.flight if found is not None and found.flight.joinable else None


def _the_first_ends_it(flight: Flight[Any, Any, Any], follower: Any) -> None:
    if flight._followers[:1] == [follower] and flight._task is not None and not flight.landed:
        flight._task.cancel()
    _leave(flight, follower)


async def _lost_with_its_leader(self: Sharing, plan: Any, flight: Any, seat: Any) -> Any:
    try:
        return await _follow(self, plan, flight, seat)
    except LeaderLost as lost:
        raise RuntimeError("the leader is gone") from lost


_leave, _follow = Flight.leave, Sharing._follow
FAULTS: dict[str, tuple[int, object, str, object]] = {
    "flights in the air ignore purges": (1, Flights, "get", _whatever_flies),
    "stored answers outlive purges": (1, Generations, "alive", lambda *_: True),
    "soft purges do nothing": (1, Generations, "fresh_until", lambda _self, _stamped, _born, expires: expires),
    "nobody looks at the time": (1, pipeline, "freshness", lambda *_: "fresh"),
    "any failure lets anything serve": (1, pipeline, "serves_after_error", lambda *_: True),
    "whoever began a call ends it for all": (1, Flight, "leave", _the_first_ends_it),
    "everyone refreshes": (1, Coalescing, "_under_way", lambda *_: False),
    "answers that were cut off are stored": (1, relay, "storable", lambda *_: Verdict(True, "")),
    "calls of other gateways have no age": (2, Coalescing, "_oldest", lambda *_: None),
    "a leader's death ends its followers": (2, Sharing, "_follow", _lost_with_its_leader),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_sees_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    gateways, where, name, faulty = FAULTS[fault]
    monkeypatch.setattr(where, name, faulty)
    with pytest.raises(AssertionError, match="schedule"):
        lived_through(range(800), gateways)
