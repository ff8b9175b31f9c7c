"""Load gauges return to zero, and what routing reckons with stays a number: whatever happens, in whatever order."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Config, Routing, Upstream
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.pool import Member, Pool
from gateway.upstreams.router import Asked, Route, Router
from loadtest.stub_upstream import Reply, StubUpstream, answer, error, raw
from policies.routing import Ask, Engine, PrefixPolicy, expected_costs
from tests.harness import FakeClock, Running, running_gateway, upstream
from tests.waiting import until

ASK = {"model": "m1", "temperature": 1, "messages": [{"role": "user", "content": "Say A"}]}
ODD = st.one_of(st.integers(-(2**63), 2**64), st.integers(0, 5000), st.sampled_from([0, 1, 2**40]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("route"), st.integers(0, 10**7), st.integers(0, 40)),
        st.tuples(st.sampled_from(["begun", "failed", "close"]), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("refused"), st.integers(0, 50), st.sampled_from([None, 0.0, 1e9])),
        st.tuples(
            st.just("learn"), st.integers(0, 50), st.fixed_dictionaries({"prompt": ODD}, optional={"cached": ODD})
        ),
        st.tuples(st.just("reports"), st.integers(0, 2), st.integers(0, 10**9)),
        st.tuples(st.just("time"), st.floats(0, 1e5), st.none()),
    ),
    max_size=60,
)


def pool_of(count: int, clock: FakeClock) -> list[Member]:
    upstreams = tuple(Upstream(name=f"w{i}", url="http://127.0.0.1:9", models=("m1",)) for i in range(count))
    return Pool(Config(upstreams=upstreams), UpstreamClient(), clock).members


def take(step: tuple[str, Any, Any], router: Router, members: Sequence[Member], open_: list[Route]) -> None:
    kind, which, what = step
    if kind == "route":
        open_.append(router.route(Asked("m1", which, tuple(range(what)), which), members))
    elif kind == "reports":
        members[which].reports(what)
    elif open_:
        route = open_[which % len(open_)]
        if kind == "begun":
            route.begun(first_token=what)
        elif kind == "close":
            route.close()
        else:
            getattr(route, kind)(*((503, what) if kind == "refused" else (what,) if kind == "learn" else ()))


@settings(max_examples=150)
@given(steps=STEPS, policy=st.sampled_from(["prefix", "load", "round_robin", "sticky"]))
def test_gauges_return_to_zero_and_every_figure_stays_a_number(steps: list[Any], policy: Any) -> None:
    clock = FakeClock()
    members, router = pool_of(3, clock), Router(clock)
    router.apply(Routing(policy=policy), members)
    open_: list[Route] = []
    for step in steps:
        if step[0] == "time":
            clock.advance(step[1])
        else:
            take(step, router, members, open_)
    for route in open_:
        route.close()
    for member in members:
        member.reports(0)
        engine = member.engine
        assert (member.in_flight, engine.running, engine.pending) == (0, 0, 0)
        assert math.isfinite(engine.work(clock.monotonic()))
        assert 0 < engine.prefill_rate < math.inf
        assert 0 < engine.weight < math.inf


FLEETS = st.lists(
    st.builds(
        Engine,
        name=st.sampled_from("abcdefgh"),
        weight=st.floats(1e-3, 1e3),
        prefill_rate=st.floats(1e-2, 1e9),
        pending=st.floats(0, 1e13),
        running=st.integers(0, 10**9),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=150)
@given(
    fleet=FLEETS,
    work=st.floats(0, 1e13),
    prompt=st.integers(0, 2**40),
    held=st.dictionaries(st.integers(0, 7), st.lists(st.tuples(st.integers(1, 2**40), st.floats(0, 1e3)), max_size=3)),
    session=st.integers(0, 2**64),
    shared=st.integers(0, 2**40),
)
def test_no_cost_is_ever_infinite_or_no_number(
    fleet: list[Engine], work: float, prompt: int, held: Any, session: int, shared: int
) -> None:
    fleet[0].add_work(work, 5.0)
    ask = Ask(prompt, held, session, shared)
    works = [engine.work(10.0) for engine in fleet]
    fair_work = sum(works) / sum(engine.weight for engine in fleet)
    assert all(map(math.isfinite, expected_costs(fleet, ask, works, fair_work, session % 8)))
    assert 0 <= PrefixPolicy(random.Random(0).randrange).choose(fleet, ask, 10.0).index < len(fleet)


ENDS: dict[str, Callable[[], Reply]] = {
    "success": answer,
    "error": lambda: error(500),
    "refusal, failover": lambda: error(503),
    "too many, failover": lambda: error(429).header("retry-after", "60"),
    "reset": lambda: raw(b"", then="reset"),
    "no HTTP": lambda: raw(b"hello", then="close"),
    "cut": lambda: answer(deltas=["a", "b", "c"]).cut(after=2, then="reset"),
    "stalls": lambda: answer().cut(after=0, then="stall"),
    "silence": lambda: answer().delayed(60),
    "client leaves": lambda: answer(deltas=["a", "b", "c"]).paced(0.05),
}


async def _one(gateway: Running, end: str, streamed: bool, number: int) -> None:
    asking = asyncio.create_task(gateway.chat(ASK | {"stream": streamed, "seed": number}))
    if end == "client leaves":
        await asyncio.sleep(0.01 * (number % 8))
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _run(ends: list[tuple[str, bool]]) -> None:
    async with StubUpstream() as a, StubUpstream() as b:
        times = {"timeouts": {"first_byte": "200ms", "idle": "200ms"}, "models": ["m1"]}
        config = {
            "upstreams": [upstream(a.url, "a", **times), upstream(b.url, "b", **times)],
            "routing": {"probe": 0},
            "retry": {"rounds": 0},
        }
        script = [ENDS[end] for end, _ in ends]
        for stub in (a, b):
            stub.always(lambda call: script[call.json["seed"]]())
        async with running_gateway(config, FakeClock()) as gateway:
            await asyncio.gather(*(_one(gateway, end, streamed, n) for n, (end, streamed) in enumerate(ends)))
            members = gateway.app.runtime.pool.members
            await until(
                lambda: not any(m.in_flight or m.engine.running or m.engine.pending for m in members),
                "nothing is under way",
            )
            assert not gateway.app.runtime.flights
            await a.wait_idle()
            await b.wait_idle()


@settings(max_examples=8)
@given(ends=st.lists(st.tuples(st.sampled_from(sorted(ENDS)), st.booleans()), min_size=1, max_size=12))
def test_through_the_gateway_too(ends: list[tuple[str, bool]]) -> None:
    asyncio.run(_run(ends))


@pytest.mark.parametrize("end", ENDS)
def test_every_end_alone(end: str) -> None:
    asyncio.run(_run([(end, False), (end, True)]))
