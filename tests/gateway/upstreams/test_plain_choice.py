"""What the router decides with bits and halving is what a plain reading of each upstream by itself decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Config, Routing, Upstream
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.exact import Told
from gateway.upstreams.pool import Member, Pool
from gateway.upstreams.prefix_index import TIERS
from gateway.upstreams.prompt import CHUNK
from gateway.upstreams.router import FETCH, HOLDERS, MANY, SAMPLE, Asked, Router
from policies.health import FAILURES
from policies.routing import Ask, Decision, PrefixPolicy, Share, home_of
from tests.harness import FakeClock

CHAINS = {16: range(1000, 1100), 32: range(2000, 2050), 0: range(3000, 3025)}
"""By tokens in a block, of those who tell in blocks of that size; 0: of those who do not tell."""


class Fleet:
    """Upstreams in any state. ``kinds``: the size of the blocks that each tells of; ``depths``: the links of its chain
    that each holds, by tier.
    """

    def __init__(self, rng: random.Random) -> None:
        self.clock = FakeClock()
        count = rng.choice([2, 5, MANY, MANY + 1, 64])
        upstreams = tuple(
            Upstream(
                name=f"w{i}",
                url="http://127.0.0.1:9",
                weight=rng.choice([0.5, 1, 3]),
                models=("m1",) if rng.random() < 0.9 else None,
            )
            for i in range(count)
        )
        members = Pool(Config(upstreams=upstreams), UpstreamClient(), self.clock).members
        self.router = Router(self.clock)
        self.router.apply(Routing(), members)
        sizes, tiers, common = rng.choice([[16], [0], [16, 32], [16, 32, 0]]), rng.randint(1, TIERS), rng.choice([0, 7])
        self.kinds = {member.name: rng.choice(sizes) for member in members}
        self.depths = {
            member.name: [max(common, rng.choice([0, 0, rng.randint(0, 25)])) for _ in range(tiers)]
            for member in members
        }
        down = rng.choice([0, 0, 0.3, 1])
        for member in members:
            for tier, depth in enumerate(self.depths[member.name]):
                self.router.index.add(member.slot, CHAINS[self.kinds[member.name]][:depth], tier)
            if self.kinds[member.name]:
                self.router.index.add(member.slot, CHAINS[0][:20])  # of no account in one who tells
            member.engine.pending, member.engine.running = rng.choice([0, 900, 90_000]), rng.choice([0, 0, 3, 30])
            member.engine.prefill_rate = rng.choice([1000, 5000])
            member.engine.add_work(rng.choice([0, 1e3, 1e6]), self.clock.monotonic())
            if rng.random() < down:
                rng.choice([self._fails, self._rests, self._returns])(member)
        self.clock.advance(rng.choice([0, 1, 100]))
        left = rng.choice([count, count - 1, (count + 1) // 2])
        self.left = members if left == count else rng.sample(members, left)

    def asked(self, rng: random.Random) -> Asked:
        told = {size: sum(member.bit for member in self.left if self.kinds[member.name] == size) for size in (16, 32)}
        blocks = [Told(CHAINS[size], size, slots) for size, slots in told.items() if slots]
        size, common, session = CHUNK * len(CHAINS[0]), rng.choice([0, 1500]), rng.choice([0, 77])
        return Asked("m1", size, CHAINS[0], session, rng.choice([0, 1650]), blocks, common)

    def _fails(self, member: Member) -> None:
        for _ in range(FAILURES):
            member.health.failed(self.clock.monotonic())

    def _returns(self, member: Member) -> None:
        self._fails(member)
        member.health.succeeded(self.clock.monotonic() + 60)

    def _rests(self, member: Member) -> None:
        member.health.rest(self.clock.monotonic(), 50)


def plainly(fleet: Fleet, asked: Asked, rng: random.Random) -> tuple[Member, Decision]:
    """The decision, made by looking at each upstream."""
    now, prompt = fleet.clock.monotonic(), asked.tokens or asked.size // 4
    few = candidates(fleet, asked, rng) if len(fleet.left) > MANY else fleet.left
    well = [one for one in few if one.known_models is not None and one.health.available(now)]
    if not well:
        known = [one for one in fleet.left if one.known_models is not None] or fleet.left
        well = [one for one in known if one.health.available(now)] or known
    for one in well:
        one.engine.weight = one.config.weight * one.health.share(now)
    held = {i: shares for i, one in enumerate(well) if (shares := held_by(fleet, one, asked, prompt))}
    ask = Ask(prompt, held, asked.session, prompt * asked.common // asked.size)
    decision = PrefixPolicy(rng.randrange).choose([one.engine for one in well], ask, now)
    return well[decision.index], decision


def candidates(fleet: Fleet, asked: Asked, rng: random.Random) -> Sequence[Member]:
    few: dict[str, Member] = {}
    for size in CHAINS:
        alike = sorted((one for one in fleet.left if fleet.kinds[one.name] == size), key=lambda one: one.slot)
        alike.sort(key=lambda one: -max(fleet.depths[one.name]))
        most: list[Member] = []
        for depth, those in groupby(alike, key=lambda one: max(fleet.depths[one.name])):
            more = list(those)
            if not depth or (most and len(most) + len(more) > HOLDERS):
                break
            most += more[:HOLDERS]
        few |= {one.name: one for one in most[:HOLDERS]}
    if not few and asked.session:
        own = fleet.left[home_of([one.engine for one in fleet.left], asked.session)]
        few[own.name] = own
    start = int(rng.random() * len(fleet.left))
    for step in range(SAMPLE):
        one = fleet.left[(start + step) % len(fleet.left)]
        few[one.name] = one
    return list(few.values())


def held_by(fleet: Fleet, member: Member, asked: Asked, prompt: int) -> list[Share]:
    each = fleet.kinds[member.name] or prompt * CHUNK / asked.size
    shares, above = [], 0.0
    for tier, depth in enumerate(fleet.depths[member.name]):
        tokens = min(depth * each, prompt)
        if tokens > above:
            shares.append((int(tokens - above), FETCH[tier] / member.engine.prefill_rate))
            above = tokens
    return shares


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_the_router_decides_what_a_plain_reading_decides(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(rng)
    asked = fleet.asked(rng)
    expected = plainly(fleet, asked, random.Random(seed))
    fleet.router._random.seed(seed)
    with fleet.router.route(asked, list(fleet.left)) as route:
        assert (route.member.name, route.decision) == (expected[0].name, expected[1])
