"""Many upstreams: a decision looks at few of them, and still finds who holds the prompt and keeps the load even."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.config import Config, Routing, Upstream
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.pool import Member, Pool
from gateway.upstreams.prefix_index import Depths, deepest
from gateway.upstreams.router import HOLDERS, MANY, SAMPLE, Asked, Router
from policies.health import FAILURES
from tests.harness import FakeClock

COUNT = 64
CHAIN = tuple(range(1000, 1100))


def fleet(count: int = COUNT) -> tuple[Router, list[Member], FakeClock]:
    clock = FakeClock()
    upstreams = tuple(Upstream(name=f"w{i}", url="http://127.0.0.1:9", models=("m1",)) for i in range(count))
    members = Pool(Config(upstreams=upstreams), UpstreamClient(), clock).members
    router = Router(clock)
    router.apply(Routing(), members)
    return router, members, clock


def holds(router: Router, member: Member, depth: int) -> None:
    router.index.add(member.slot, CHAIN[:depth])


def asked(session: int = 0) -> Asked:
    return Asked("m1", 256 * len(CHAIN), CHAIN, session)


@pytest.mark.parametrize("which", [0, 31, 63])
def test_who_holds_the_prompt_is_found_among_all(which: int) -> None:
    router, members, _ = fleet()
    holds(router, members[which], 90)
    for _ in range(20):
        with router.route(asked(), members) as route:
            assert route.member is members[which]
        router.index.discard(route.member.slot, CHAIN[90:])


def test_a_beginning_that_all_hold_hides_nobody_who_holds_more() -> None:
    router, members, _ = fleet()
    for member in members:
        holds(router, member, 30)
    holds(router, members[40], 95)
    with router.route(asked(), members) as route:
        assert route.member is members[40]


def test_new_prompts_spread_evenly() -> None:
    router, members, _ = fleet()
    routes = [router.route(Asked("m1", 4000), members) for _ in range(10 * COUNT)]
    loads = Counter(route.member.name for route in routes)
    assert len(loads) == COUNT
    assert max(loads.values()) <= 13
    for route in routes:
        route.close()
    assert {(member.in_flight, member.engine.running, member.engine.pending) for member in members} == {(0, 0, 0)}


def test_a_session_that_nobody_holds_goes_home() -> None:
    router, members, _ = fleet()
    found: set[str] = set()
    for _ in range(30):
        with router.route(Asked("m1", 4000, session=77), members) as route:
            found.add(route.member.name)
        route.member.engine.add_work(-1e9, router.now())
    assert len(found) == 1


def test_those_left_alone_are_passed_over_even_if_all_but_one_are() -> None:
    router, members, clock = fleet()
    for member in members[:-1]:
        for _ in range(FAILURES):
            member.health.failed(clock.monotonic())
    for _ in range(20):
        with router.route(asked(), members) as route:
            assert route.member is members[-1]


def test_those_that_left_are_not_chosen_by_those_who_still_know_them() -> None:
    """A request that began before a change may choose among upstreams that the router has dropped since."""
    router, members, _ = fleet(MANY + 8)
    holds(router, members[3], 50)
    router.apply(Routing(), members[8:])
    with router.route(asked(), members) as route:
        assert route.member in members


def test_those_put_in_the_place_of_others_are_not_chosen_by_who_knows_the_others() -> None:
    router, members, _ = fleet()
    _, others, _ = fleet()
    router.apply(Routing(), others)
    holds(router, others[40], 95)
    with router.route(asked(), members) as route:
        assert route.member is members[40]


@pytest.mark.parametrize(
    ("depths", "found"),
    [
        ([], []),
        ([(3, 0b1)], [0]),
        ([(3, 0b0011), (9, 0b100)], [2, 0, 1]),
        ([(3, (1 << 20) - 1), (9, 1 << 30)], [30]),
        ([(3, (1 << 20) - 1)], list(range(HOLDERS))),
    ],
)
def test_the_deepest_are_those_that_hold_most_and_never_too_many(depths: Depths, found: list[int]) -> None:
    assert deepest(depths, HOLDERS) == found


def test_up_to_so_many_all_are_looked_at() -> None:
    assert MANY >= HOLDERS + SAMPLE
