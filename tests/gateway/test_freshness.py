"""How long an answer lives, and who may have it when it is old: HTTP's words, end to end."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B
from tests.gateway.conftest import Start
from tests.harness import FakeClock

SAMPLED = {name: value for name, value in B.items() if name != "temperature"}


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class TestWhatTheCallerSays:
    async def test_no_cache_computes_anew_and_its_answer_replaces_the_old_one(self, start: Start) -> None:
        async with start() as bench:
            await bench.miss(B)
            anew = await bench.miss(B, cache_control="no-cache")
            assert anew.cache_status == "warmgate; fwd=request; stored"
            assert (await bench.hit(B)).text == anew.text == "ans-2"

    async def test_no_store_leaves_nothing_and_takes_nothing(self, start: Start) -> None:
        async with start() as bench:
            for _ in range(2):
                assert (await bench.miss(B, cache_control="no-store")).cache_status == "warmgate; fwd=request"
            assert bench.stored == 0
            await bench.miss(B)
            await bench.miss(B, cache_control="no-store")
            assert (await bench.hit(B)).text == "ans-3", "what others stored stays"

    async def test_max_age_takes_nothing_older(self, start: Start, clock: FakeClock) -> None:
        async with start() as bench:
            await bench.miss(B)
            clock.advance(10)
            assert (await bench.hit(B, cache_control="max-age=10")).response.headers["age"] == "10"
            younger = await bench.miss(B, cache_control="max-age=9")
            assert younger.cache_status == "warmgate; fwd=request; stored", "it was fresh, but not for this caller"
            assert (await bench.hit(B, cache_control="max-age=9")).text == "ans-2"
            clock.advance(1)
            await bench.miss(B, cache_control="max-age=0")

    async def test_max_age_above_zero_and_a_ttl_ask_for_a_sampled_answer_to_be_kept(self, start: Start) -> None:
        async with start() as bench:
            assert "bypass" in (await bench.miss(SAMPLED)).cache_status
            await bench.miss(SAMPLED, cache_control="max-age=60")
            await bench.hit(SAMPLED, cache_control="max-age=60")
            await bench.hit(SAMPLED, x_warmgate_ttl="60")
            await bench.miss(SAMPLED)

    async def test_max_stale_takes_what_is_past_its_time(self, start: Start, clock: FakeClock) -> None:
        async with start(cache={"ttl": "10s", "keep_stale": "1m"}) as bench:
            await bench.miss(B)
            clock.advance(30)
            assert (await bench.send(B, cache_control="max-stale=19, only-if-cached")).status == 504
            old = await bench.hit(B, cache_control="max-stale=20")
            assert old.cache_status == "warmgate; hit; ttl=-20; detail=stale"
            assert old.response.headers["age"] == "30"
            await bench.hit(B, cache_control="max-stale")
            clock.advance(41)
            await bench.miss(B, cache_control="max-stale")

    async def test_only_if_cached_never_goes_upstream(self, start: Start, clock: FakeClock) -> None:
        async with start(cache={"ttl": "10s"}) as bench:
            refused = await bench.send(B, cache_control="only-if-cached")
            assert (refused.status, refused.rose) == (504, 0)
            assert refused.response.json()["error"]["code"] == "not_cached"
            assert refused.cache_status == "warmgate; fwd=uri-miss"
            await bench.miss(B)
            await bench.hit(B, cache_control="only-if-cached")
            clock.advance(11)
            refused = await bench.send(B, cache_control="only-if-cached")
            assert (refused.status, refused.rose, refused.cache_status) == (504, 0, "warmgate; fwd=stale")

    async def test_only_if_cached_does_not_wait_for_a_call_under_way(
        self, start: Start, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(answer().held(gate))
        async with start() as bench:
            asking = asyncio.create_task(bench.send(B))
            await u.wait_calls(1)
            assert (await bench.send(B, cache_control="only-if-cached")).status == 504
            gate.set()
            await asking

    async def test_a_call_under_way_is_joined_only_if_it_is_young_enough(
        self, start: Start, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        u.always(answer().held(gate))
        async with start() as bench:
            first = asyncio.create_task(bench.gateway.chat(B))
            await u.wait_calls(1)
            clock.advance(10)
            asking = [asyncio.create_task(bench.gateway.chat(B, cache_control=f"max-age={age}")) for age in (10, 9)]
            await bench.gateway.joined(2)
            await u.wait_calls(2)
            gate.set()
            joined, own = await asyncio.gather(*asking)
            assert "collapsed" in joined.headers["cache-status"]
            assert "collapsed" not in own.headers["cache-status"]
            await first
            assert u.n == 2

    async def test_the_callers_ttl_counts_up_to_the_operators_ceiling(self, start: Start, clock: FakeClock) -> None:
        async with start(cache={"ttl": "1h", "max_ttl": "2h", "keep_stale": 0}) as bench:
            for asked, lives in (("60", 60), ("10m", 600), ("1d", 7200)):
                await bench.miss(B, cache_control="no-cache", x_warmgate_ttl=asked)
                clock.advance(lives - 1)
                await bench.hit(B)
                clock.advance(1)
                assert (await bench.send(B, cache_control="only-if-cached")).status == 504

    async def test_a_ttl_of_nothing_stores_nothing(self, start: Start) -> None:
        async with start() as bench:
            await bench.miss(B, x_warmgate_ttl="0")
            assert bench.stored == 0

    async def test_namespaces_are_caches_of_their_own(self, start: Start) -> None:
        async with start() as bench:
            await bench.miss(B)
            await bench.miss(B, x_warmgate_namespace="a")
            await bench.miss(B, x_warmgate_namespace="b")
            texts = [(await bench.hit(B, x_warmgate_namespace=name)).text for name in ("a", "b")]
            assert texts == ["ans-2", "ans-3"]

    @pytest.mark.parametrize(
        ("header", "value"),
        [
            ("x_warmgate_ttl", "soon"),
            ("x_warmgate_ttl", "-1"),
            ("x_warmgate_namespace", "a b"),
            ("x_warmgate_namespace", ""),
            ("x_warmgate_tags", "a b"),
            ("x_warmgate_tags", ",".join(f"t{n}" for n in range(17))),
        ],
    )
    async def test_a_header_that_cannot_be_meant_is_a_400_that_names_it(
        self, start: Start, header: str, value: str
    ) -> None:
        async with start() as bench:
            refused = await bench.send(B, **{header: value})
            assert (refused.status, refused.rose) == (400, 0)
            assert header.replace("_", "-") in refused.response.json()["error"]["message"]

    async def test_none_of_it_reaches_the_upstream(self, start: Start) -> None:
        async with start() as bench:
            await bench.miss(
                B, cache_control="max-age=5", x_warmgate_ttl="60", x_warmgate_namespace="n", x_warmgate_tags="a"
            )
            assert not [n for n in bench.u.calls[0].headers if n == "cache-control" or n.startswith("x-warmgate")]


class TestWhatTheOperatorSays:
    @pytest.mark.parametrize(
        ("rule", "asked", "lives"),
        [
            ({"match": {"model": "m1"}, "ttl": "60s"}, {}, 60),
            ({"match": {"model": "m*"}, "ttl": "60s"}, {}, 60),
            ({"match": {"model": "m2"}, "ttl": "60s"}, {}, 100),
            ({"match": {"tenant": "t1"}, "ttl": "60s"}, {}, 60),
            ({"match": {"tenant": "t2"}, "ttl": "60s"}, {}, 100),
            ({"match": {"path": "/v1/chat/*"}, "ttl": "60s"}, {}, 60),
            ({"match": {"path": "/v1/messages"}, "ttl": "60s"}, {}, 100),
            ({"match": {"model": "m1", "tenant": "t2"}, "ttl": "60s"}, {}, 100),
            ({"match": {"model": "m1"}, "ttl": "60s"}, {"x_warmgate_ttl": "80"}, 80),
        ],
    )
    async def test_a_ttl_by_model_tenant_and_path(
        self, start: Start, clock: FakeClock, rule: dict[str, Any], asked: dict[str, str], lives: int
    ) -> None:
        tenants = [{"name": "t1", "keys": [hashed("k1")]}]
        async with start(cache={"ttl": "100s", "rules": [rule]}, tenants=tenants) as bench:
            await bench.miss(B, key="k1", **asked)
            clock.advance(lives - 1)
            await bench.hit(B, key="k1")
            clock.advance(1)
            await bench.miss(B, key="k1")

    async def test_the_first_rule_that_matches_counts(self, start: Start, clock: FakeClock) -> None:
        rules = [{"match": {"model": "m1"}, "ttl": "10s"}, {"match": {"model": "m*"}, "ttl": "20s"}]
        async with start(cache={"rules": rules}) as bench:
            await bench.miss(B)
            await bench.miss(B | {"model": "m2"})
            clock.advance(10)
            await bench.miss(B)
            await bench.hit(B | {"model": "m2"})

    async def test_a_rule_of_nothing_stores_nothing_whatever_the_caller_asks(self, start: Start) -> None:
        async with start(cache={"rules": [{"match": {"model": "m1"}, "ttl": 0}]}) as bench:
            await bench.miss(B, x_warmgate_ttl="60")
            assert bench.stored == 0

    async def test_a_tenant_has_a_ceiling_of_its_own(self, start: Start, clock: FakeClock) -> None:
        tenants = [
            {"name": "t1", "keys": [hashed("k1")], "cache": {"max_ttl": "30s"}},
            {"name": "t2", "keys": [hashed("k2")]},
        ]
        async with start(cache={"ttl": "1h"}, tenants=tenants) as bench:
            await bench.miss(B, key="k1", x_warmgate_ttl="1d")
            await bench.miss(B, key="k2")
            clock.advance(30)
            await bench.miss(B, key="k1")
            await bench.hit(B, key="k2")


async def test_a_slow_call_that_was_overtaken_does_not_put_the_older_answer_back(
    start: Start, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
) -> None:
    u.reply(answer().held(gate))
    async with start() as bench:
        slow = asyncio.create_task(bench.gateway.chat(B))
        await u.wait_calls(1)
        clock.advance(1)
        await bench.miss(B, cache_control="no-cache")
        gate.set()
        await slow
        assert (await bench.hit(B)).text == "ans-2"
