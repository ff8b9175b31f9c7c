"""Stale answers: while they are renewed, and when the upstream fails (RFC 5861)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.stub_upstream import StubUpstream, answer, error
from tests.field.conftest import B
from tests.gateway.conftest import Start, refreshed
from tests.harness import FakeClock


class TestStaleWhileRevalidate:
    async def test_it_serves_at_once_and_refreshes_once_however_many_ask(
        self, start: Start, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_while_revalidate": "20s"}) as bench:
            await bench.miss(B)
            clock.advance(15)
            u.always(answer().held(gate))
            stale = await asyncio.gather(*(bench.gateway.chat(B) for _ in range(20)))
            assert {reply.headers["cache-status"] for reply in stale} == {"warmgate; hit; ttl=-5; detail=stale"}
            assert {reply.json()["choices"][0]["message"]["content"] for reply in stale} == {"ans-1"}
            gate.set()
            await refreshed(bench, 2)
            assert (await bench.hit(B)).text == "ans-2"
            assert u.n == 2

    async def test_after_the_window_it_is_a_miss(self, start: Start, clock: FakeClock) -> None:
        async with start(cache={"ttl": "10s", "stale_while_revalidate": "20s"}) as bench:
            await bench.miss(B)
            clock.advance(30)
            assert (await bench.miss(B)).cache_status == "warmgate; fwd=stale; stored"

    async def test_whoever_needs_it_new_joins_the_refresh(
        self, start: Start, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_while_revalidate": "20s"}) as bench:
            await bench.miss(B)
            clock.advance(15)
            u.always(answer().held(gate))
            await bench.gateway.chat(B)
            await u.wait_calls(2)
            joining = asyncio.create_task(bench.gateway.chat(B, cache_control="max-age=1"))
            await bench.gateway.joined(1)
            gate.set()
            assert "collapsed" in (await joining).headers["cache-status"]
            assert u.n == 2

    async def test_a_refresh_that_fails_leaves_what_there_is(
        self, start: Start, u: StubUpstream, clock: FakeClock
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_while_revalidate": "20s"}) as bench:
            await bench.miss(B)
            clock.advance(15)
            u.reply(error(500))
            assert (await bench.gateway.chat(B)).json()["choices"][0]["message"]["content"] == "ans-1"
            await refreshed(bench, 2)
            assert (await bench.gateway.chat(B)).json()["choices"][0]["message"]["content"] == "ans-1"
            await refreshed(bench, 3)
            assert (await bench.hit(B)).text == "ans-3"

    async def test_the_refresh_goes_on_when_the_caller_leaves(
        self, start: Start, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_while_revalidate": "20s"}) as bench:
            await bench.miss(B)
            clock.advance(15)
            u.always(answer().held(gate))
            async with bench.streaming(B | {"stream": True}):
                pass
            gate.set()
            await refreshed(bench, 2)
            assert (await bench.hit(B)).text == "ans-2"


class TestStaleIfError:
    @pytest.mark.parametrize(
        ("cache", "header"), [({"stale_if_error": "1m"}, {}), ({}, {"cache_control": "stale-if-error=60"})]
    )
    @pytest.mark.parametrize("failure", ["status", "dead"])
    async def test_when_the_upstream_fails_the_old_answer_serves(
        self,
        start: Start,
        u: StubUpstream,
        clock: FakeClock,
        cache: dict[str, Any],
        header: dict[str, str],
        failure: str,
    ) -> None:
        async with start(cache={"ttl": "10s", **cache}) as bench:
            await bench.miss(B)
            clock.advance(70)
            if failure == "status":
                u.always(error(503))
            else:
                await u.stop()
            served = await bench.send(B, **header)
            assert (served.status, served.text) == (200, "ans-1")
            assert served.cache_status == "warmgate; hit; ttl=-60; detail=stale"
            clock.advance(1)
            assert (await bench.send(B, **header)).status in (502, 503)

    async def test_it_is_a_last_resort(self, start: Start, clock: FakeClock) -> None:
        async with start(cache={"ttl": "10s", "stale_if_error": "1m"}) as bench:
            await bench.miss(B)
            clock.advance(11)
            assert (await bench.miss(B)).text == "ans-2"

    async def test_a_refusal_of_the_request_itself_is_passed_on(
        self, start: Start, u: StubUpstream, clock: FakeClock
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_if_error": "1m"}) as bench:
            await bench.miss(B)
            clock.advance(11)
            u.reply(error(400))
            assert (await bench.send(B)).status == 400

    async def test_the_callers_word_goes_before_the_operators(
        self, start: Start, u: StubUpstream, clock: FakeClock
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_if_error": "1h"}) as bench:
            await bench.miss(B)
            clock.advance(30)
            u.always(error(503))
            assert (await bench.send(B, cache_control="stale-if-error=10")).status == 503
            assert (await bench.send(B, cache_control="stale-if-error=20")).status == 200
            assert (await bench.send(B)).status == 200

    async def test_an_answer_that_is_only_too_old_for_this_caller_needs_leave_too(
        self, start: Start, u: StubUpstream, clock: FakeClock
    ) -> None:
        async with start() as bench:
            await bench.miss(B)
            clock.advance(30)
            u.always(error(503))
            assert (await bench.send(B, cache_control="max-age=10")).status == 503
            assert (await bench.send(B, cache_control="max-age=10, stale-if-error=20")).status == 200

    async def test_everyone_who_joined_a_call_that_fails_is_served(
        self, start: Start, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        async with start(cache={"ttl": "10s", "stale_if_error": "1m"}) as bench:
            await bench.miss(B)
            clock.advance(11)
            u.always(error(503).held(gate))
            asking = asyncio.gather(*(bench.gateway.chat(B) for _ in range(5)))
            await bench.gateway.joined(5)
            gate.set()
            replies = await asking
            assert [reply.status_code for reply in replies] == [200] * 5
            assert u.n == 2
