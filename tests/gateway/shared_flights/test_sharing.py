"""Equal requests at several gateways share one upstream call, by way of Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.stub_upstream import StubUpstream, answer, error
from tests.field.conftest import B
from tests.field.reading import json_events, text_of_stream
from tests.gateway.shared_flights.conftest import (
    STREAMED,
    WORDS,
    Gateway,
    at_rest,
    collapsed,
    following,
    left,
    opened,
    spoken,
    text,
)
from tests.harness import FakeClock
from tests.services import RedisServer

GONE = -2
"""What Redis says of a name that has just ceased to be."""


class TestSharing:
    @pytest.mark.parametrize("led", [B, STREAMED], ids=["plain", "stream"])
    @pytest.mark.parametrize("followed", [B, STREAMED], ids=["plain", "stream"])
    async def test_one_call_serves_two_gateways_in_whichever_form(
        self,
        gateway: Gateway,
        u: StubUpstream,
        gate: asyncio.Event,
        led: dict[str, Any],
        followed: dict[str, Any],
    ) -> None:
        u.always(answer().held(gate))
        async with gateway() as one, gateway() as two:
            first = asyncio.create_task(one.gateway.chat(led))
            await u.wait_calls(1)
            asking = [asyncio.create_task(two.gateway.chat(followed)) for _ in range(5)]
            await two.gateway.joined(5)
            await following(two)
            gate.set()
            others = await asyncio.gather(*asking)
            assert {text(response) for response in others} == {text(await first)} == {"ans-1"}
            assert not collapsed(await first)
            assert all(map(collapsed, others))
            assert {response.headers["x-warmgate-upstream"] for response in others} == {"u"}
            await at_rest(one, two)
            assert u.n == 1
            assert await two.outcomes() == {"coalesced": 5}
            assert (await two.spent())["calls"] == 0, "the leader's gateway counts the call"
            await two.hit(B)

    async def test_pieces_reach_the_other_gateway_as_they_come(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(spoken(gate, 3))
        async with gateway() as one, gateway() as two:
            leading = asyncio.create_task(one.gateway.chat(STREAMED))
            await u.wait_calls(1)
            async with two.streaming(STREAMED) as response:
                pieces = response.aiter_raw()
                got = await anext(pieces)
                assert not leading.done()
                assert u.running == 1
                gate.set()
                async for piece in pieces:
                    got += piece
            assert text_of_stream(got) == text(await leading) == WORDS
            assert got.count(b"data: [DONE]") == 1
            assert u.n == 1

    async def test_a_late_joiner_gets_it_from_the_beginning(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(spoken(gate, 6))
        async with gateway() as one, gateway() as two:
            late = None
            async with one.streaming(STREAMED) as response:
                async for piece in response.aiter_raw():
                    if late is None and b"w5" in piece:
                        late = asyncio.create_task(two.gateway.chat(STREAMED))
                        await following(two)
                        gate.set()
            assert late is not None
            assert text(await late) == WORDS
            assert u.n == 1

    async def test_usage_is_for_those_who_asked_for_it(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(answer().held(gate))
        async with gateway() as one, gateway() as two:
            first = asyncio.create_task(one.gateway.chat(STREAMED))
            await u.wait_calls(1)
            with_usage = STREAMED | {"stream_options": {"include_usage": True}}
            asking = [asyncio.create_task(two.gateway.chat(body)) for body in (with_usage, STREAMED)]
            await two.gateway.joined(2)
            await following(two)
            gate.set()
            asked, unasked = await asyncio.gather(*asking)
            assert [e["usage"]["completion_tokens"] for e in json_events(asked.content) if e.get("usage")] == [5]
            assert not [event for event in json_events(unasked.content) if event.get("usage")]
            await first

    async def test_an_error_is_told_as_it_is_and_not_kept(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.reply(error(400, "no such thing").held(gate))
        async with gateway() as one, gateway() as two:
            first = asyncio.create_task(one.gateway.chat(B))
            await u.wait_calls(1)
            asking = asyncio.create_task(two.gateway.chat(B))
            await following(two)
            gate.set()
            second = await asking
            assert (second.status_code, second.json()) == (400, (await first).json())
            assert text(await two.gateway.chat(B)) == "ans-2"

    async def test_sampled_requests_and_no_cache_are_not_shared(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(answer().held(gate))
        sampled = {name: value for name, value in B.items() if name != "temperature"}
        async with gateway() as one, gateway() as two:
            asking = [
                *(bench.gateway.chat(sampled, x_warmgate_ttl="60") for bench in (one, two)),
                *(bench.gateway.chat(B, cache_control="no-cache") for bench in (one, two)),
                *(bench.gateway.chat(B, cache_control="no-store") for bench in (one, two)),
            ]
            replies = asyncio.gather(*asking)
            await u.wait_calls(6)
            gate.set()
            assert sorted(map(text, await replies)) == [f"ans-{n}" for n in range(1, 7)]

    async def test_nobody_is_told_what_was_purged_before_he_asked(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.reply(answer().held(gate))
        async with gateway() as one, gateway() as two:
            before = asyncio.create_task(one.gateway.chat(B))
            await u.wait_calls(1)
            assert (await two.gateway.client.post("/admin/purge", json={"model": "m1"})).json()["everywhere"]
            assert text(await two.gateway.chat(B)) == "ans-2"
            gate.set()
            assert text(await before) == "ans-1"

    async def test_a_caller_who_wants_it_younger_makes_a_call_of_his_own(
        self, gateway: Gateway, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        u.reply(spoken(gate, 3))
        async with gateway() as one, gateway() as two:
            first = asyncio.create_task(one.gateway.chat(STREAMED))
            await u.wait_calls(1)
            clock.advance(10)
            assert text(await two.gateway.chat(B, cache_control="max-age=9")) == "ans-2"
            gate.set()
            assert text(await first) == WORDS

    async def test_who_joins_a_call_here_minds_when_it_began_there(
        self, gateway: Gateway, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        u.reply(answer().held(gate))
        async with gateway() as one, gateway() as two:
            first = asyncio.create_task(one.gateway.chat(B))
            await u.wait_calls(1)
            clock.advance(10)
            second = asyncio.create_task(two.gateway.chat(B))
            await following(two)
            third = asyncio.create_task(two.gateway.chat(B, cache_control="max-age=9"))
            await two.gateway.joined(2)
            gate.set()
            assert [text(await told) for told in (first, second, third)] == ["ans-1", "ans-1", "ans-2"]

    async def test_a_stale_entry_is_renewed_once_for_all_gateways(
        self, gateway: Gateway, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        cache = {"ttl": "10s", "stale_while_revalidate": "1m"}
        async with gateway(cache=cache) as one, gateway(cache=cache) as two:
            await one.miss(B)
            await two.hit(B)
            clock.advance(11)
            u.always(answer().held(gate))
            stale = [await one.gateway.chat(B) for _ in range(5)]
            await u.wait_calls(2)
            stale += [await two.gateway.chat(B) for _ in range(5)]
            await following(two)
            gate.set()
            assert {text(reply) for reply in stale} == {"ans-1"}
            await at_rest(one, two)
            assert u.n == 2
            assert [(await bench.hit(B)).text for bench in (one, two)] == ["ans-2", "ans-2"]

    async def test_nothing_is_left_behind(
        self,
        gateway: Gateway,
        u: StubUpstream,
        gate: asyncio.Event,
        redis_process: RedisServer,
        redis_cache: dict[str, Any],
    ) -> None:
        u.always(answer().held(gate))
        async with gateway() as one, gateway() as two:
            leading = asyncio.create_task(one.gateway.chat(B))
            await u.wait_calls(1)
            asking = asyncio.create_task(two.gateway.chat(B))
            await following(two)
            gate.set()
            await asyncio.gather(leading, asking)
            await at_rest(one, two)
        with redis_process.client() as client:
            lives = [client.pttl(name) for name in client.scan_iter(f"{redis_cache['prefix']}:f:*")]
            assert all(life == GONE or 0 < life <= 10_000 for life in lives)


class TestLeaving:
    async def test_the_leaders_caller_leaves_and_the_other_gateway_gets_it_all(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(spoken(gate, 3))
        async with gateway() as one, gateway() as two:
            async with one.streaming(STREAMED) as response:
                pieces = response.aiter_raw()
                await anext(pieces)
                other = asyncio.create_task(two.gateway.chat(STREAMED))
                await opened(two)
            await one.gateway.joined(1)
            gate.set()
            assert text(await other) == WORDS
            assert (u.n, u.closed_by_peer) == (1, [])

    @pytest.mark.parametrize("who", ["the leader alone", "the follower first", "the leader first"])
    async def test_when_all_have_left_the_upstream_call_ends_within_a_second(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event, who: str
    ) -> None:
        u.always(answer().held(gate))
        async with gateway() as one, gateway() as two:
            leader = asyncio.create_task(one.gateway.chat(B))
            await u.wait_calls(1)
            if who != "the leader alone":
                follower = asyncio.create_task(two.gateway.chat(B))
                await following(two)
                await one.gateway.joined(2)
                if who == "the follower first":
                    follower.cancel()
                    await left(two)
                else:
                    leader.cancel()
                    await one.gateway.joined(1)
                    follower.cancel()
            leader.cancel()
            await u.wait_closed(u.calls[0], timeout=1)
            await at_rest(one, two)
            assert u.n == 1

    async def test_the_follower_leaves_and_the_leader_is_undisturbed(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event
    ) -> None:
        u.always(spoken(gate, 3))
        async with gateway() as one, gateway() as two:
            leading = asyncio.create_task(one.gateway.chat(STREAMED))
            await u.wait_calls(1)
            async with two.streaming(STREAMED) as response:
                pieces = response.aiter_raw()
                await anext(pieces)
            await left(two)
            gate.set()
            assert text(await leading) == WORDS
            await at_rest(one, two)
