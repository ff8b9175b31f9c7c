"""Leaders that die and a Redis in trouble: no caller waits in vain, and none is told half an answer as a whole one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import httpx
import orjson
import pytest

from cache.response import shared_flights as shared_flights_module
from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B, Bench
from tests.field.gateway_process import ROOT
from tests.field.reading import events_of, json_events, text_of_stream
from tests.gateway.shared_flights.conftest import (
    STREAMED,
    Gateway,
    at_rest,
    chunk,
    collapsed,
    following,
    leader_elsewhere,
    opened,
    shared_flights,
    spoken,
    text,
    words,
)
from tests.harness import upstream
from tests.services import RedisServer, redis_server
from tests.waiting import until


class TestALeaderDies:
    @pytest.mark.parametrize("told", ["nothing", "the head"])
    async def test_before_anything_was_passed_on_another_takes_over(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event, redis_cache: dict[str, Any], told: str
    ) -> None:
        u.always(answer().held(gate))
        async with (
            gateway() as one,
            gateway() as two,
            leader_elsewhere(one, redis_cache) as leader,
        ):
            asking = [asyncio.create_task(bench.gateway.chat(STREAMED)) for bench in (one, two) for _ in range(3)]
            if told == "the head":
                await leader.head(stream=True)
            await following(one, two)
            await asyncio.sleep(0.3)
            assert u.n == 0, "as long as it has its lease it is waited for"
            heard = [shared_flights(bench).store.counters["hear"] for bench in (one, two)]
            await leader.die()
            await u.wait_calls(1)
            so_far = [counted["ok"] for counted in heard]
            await until(
                lambda: any(counted["ok"] > before + 1 for counted, before in zip(heard, so_far, strict=True)),
                "one of the two takes over and the other follows",
            )
            gate.set()
            assert {text(await task) for task in asking} == {"ans-1"}
            assert u.n == 1

    async def test_in_mid_stream_the_callers_are_told_so(
        self, gateway: Gateway, u: StubUpstream, redis_cache: dict[str, Any]
    ) -> None:
        async with gateway() as one, leader_elsewhere(one, redis_cache) as leader:
            asking = asyncio.create_task(one.gateway.chat(STREAMED))
            await leader.head(stream=True)
            await leader.tell(b"p", chunk("Hel"))
            await leader.tell(b"p", chunk("lo"))
            await opened(one)
            await leader.die()
            events = events_of((await asking).content)
            assert text_of_stream((await asking).content) == "Hello"
            assert [bool(event.json.get("error")) for event in events] == [False, False, True]
            await at_rest(one)
            assert await one.outcomes() == {"error": 1}
            assert (one.stored, u.n) == (0, 0)
            assert text(await one.gateway.chat(B)) == "ans-1"

    async def test_with_a_plain_answer_half_told_another_takes_over(
        self, gateway: Gateway, u: StubUpstream, redis_cache: dict[str, Any]
    ) -> None:
        async with gateway() as one, leader_elsewhere(one, redis_cache) as leader:
            asking = asyncio.create_task(one.gateway.chat(B))
            await leader.head(stream=False)
            await leader.tell(b"p", b'{"choices": [{"ind')
            await following(one)
            await leader.die()
            assert text(await asking) == "ans-1"

    async def test_a_leader_that_gives_up_is_replaced_at_once(
        self, gateway: Gateway, redis_cache: dict[str, Any]
    ) -> None:
        async with gateway() as one, leader_elsewhere(one, redis_cache) as leader:
            asking = asyncio.create_task(one.gateway.chat(B))
            await following(one)
            await leader.end()
            async with asyncio.timeout(0.3):
                assert text(await asking) == "ans-1"

    async def test_a_part_that_redis_has_evicted_is_noticed(
        self, gateway: Gateway, redis_cache: dict[str, Any], redis_process: RedisServer
    ) -> None:
        async with gateway() as one, leader_elsewhere(one, redis_cache) as leader:
            asking = asyncio.create_task(one.gateway.chat(STREAMED))
            await leader.head(stream=True)
            await leader.tell(b"p", chunk("Hel"))
            await opened(one)
            await leader.tell(b"p", chunk("lo"))
            with redis_process.client() as client:
                client.delete(*client.scan_iter(f"{redis_cache['prefix']}:f:*:elsewhere"))
            await leader.tell(b"p", chunk(" Anna"))
            await leader.tell(b"e", b"")
            content = (await asking).content
            assert text_of_stream(content) in ("Hel", "Hello")
            assert b"[DONE]" not in content and b'"error"' in content

    async def test_what_no_gateway_would_say_is_not_listened_to(
        self, gateway: Gateway, redis_cache: dict[str, Any]
    ) -> None:
        async with gateway() as one, leader_elsewhere(one, redis_cache) as leader:
            asking = asyncio.create_task(one.gateway.chat(B))
            await following(one)
            await leader.tell(b"h", b'{"not": "ours"}')
            await leader.tell(b"p", b"x")
            assert text(await asking) == "ans-1"

    async def test_whoever_asks_just_after_the_end_looks_into_the_store_again(
        self, gateway: Gateway, u: StubUpstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_flights_module, "STORED_FOR", 60.0)
        async with gateway() as one, gateway() as two:
            await one.miss(B)
            recall = two.gateway.app.runtime.recall
            monkeypatch.setattr(recall, "find", nothing_found)
            for body in (B, STREAMED):
                late = await two.gateway.chat(body)
                assert text(late) == "ans-1"
                assert collapsed(late)
            assert u.n == 1


async def nothing_found(*_: object) -> None:
    """A lookup just before the answer was stored."""


class TestRedisInTrouble:
    @pytest.fixture
    def own_redis(self):
        with redis_server() as server:
            yield server

    async def ask_both(self, u: StubUpstream, one: Bench, two: Bench, body: dict[str, Any]) -> list[asyncio.Task[Any]]:
        """The second follows the first."""
        first = asyncio.create_task(one.gateway.chat(body))
        await u.wait_calls(1)
        second = asyncio.create_task(two.gateway.chat(body))
        await following(two)
        return [first, second]

    @pytest.mark.parametrize("trouble", ["pause", "kill"])
    async def test_while_waiting_each_gateway_calls_for_itself(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event, own_redis: RedisServer, trouble: str
    ) -> None:
        u.always(answer().held(gate))
        async with gateway(url=own_redis.url) as one, gateway(url=own_redis.url) as two:
            asking = await self.ask_both(u, one, two, B)
            getattr(own_redis, trouble)()
            await u.wait_calls(2)
            gate.set()
            assert sorted([text(await task) for task in asking]) == ["ans-1", "ans-2"]
            if trouble == "pause":
                own_redis.resume()
            await at_rest(one, two)

    @pytest.mark.parametrize("trouble", ["pause", "kill"])
    async def test_in_mid_stream_the_follower_is_told_and_the_leader_goes_on(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event, own_redis: RedisServer, trouble: str
    ) -> None:
        u.always(spoken(gate, 10, 20))
        async with gateway(url=own_redis.url) as one, gateway(url=own_redis.url, lease=0.3) as two:
            leading, asking = await self.ask_both(u, one, two, STREAMED)
            await opened(two)
            getattr(own_redis, trouble)()
            followed = await asking
            gate.set()
            led = await leading
            assert text(led) == words(20)
            got = text_of_stream(followed.content)
            assert got and text(led).startswith(got)
            assert b"[DONE]" not in followed.content
            assert [event for event in json_events(followed.content) if "error" in event]
            if trouble == "pause":
                own_redis.resume()
            await at_rest(one, two)

    async def test_a_redis_that_never_was_there_changes_nothing(self, gateway: Gateway, u: StubUpstream) -> None:
        async with gateway(url="redis://127.0.0.1:1/0") as one, gateway(url="redis://127.0.0.1:1/0") as two:
            replies = await asyncio.gather(one.gateway.chat(B), two.gateway.chat(STREAMED))
            assert sorted(map(text, replies)) == ["ans-1", "ans-2"]

    async def test_a_hiccup_in_mid_stream_is_waited_out(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event, own_redis: RedisServer
    ) -> None:
        """Shorter than a lease: what was told before and after it is heard."""
        last = asyncio.Event()
        u.always(answer(deltas=["w0 ", "w1 ", "w2 "]).held(gate, before=2).held(last, before=3))
        async with gateway(url=own_redis.url, timeout="10s") as one, gateway(url=own_redis.url, timeout="50ms") as two:
            asking = await self.ask_both(u, one, two, STREAMED)
            await opened(two)
            own_redis.pause()
            gate.set()
            heard = shared_flights(two).store.counters["hear"]
            await until(lambda: heard["timeout"], "the follower asks Redis in vain")
            own_redis.resume()
            last.set()
            assert [text(await task) for task in asking] == ["w0 w1 w2 "] * 2
            assert u.n == 1


class TestAGatewayIsKilled:
    """A whole process, by SIGKILL, while another follows it."""

    @pytest.mark.parametrize("said", [0, 10], ids=["before", "midway"])
    async def test_while_it_leads(
        self, gateway: Gateway, u: StubUpstream, gate: asyncio.Event, redis_cache: dict[str, Any], said: int
    ) -> None:
        u.reply(spoken(gate, said) if said else answer().held(gate))
        config = {"upstreams": [upstream(u.url)], "cache": {"redis": redis_cache}}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.field.gateway_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(orjson.dumps(config) + b"\n")
        url = (await process.stdout.readline()).decode().strip()
        async with gateway() as other, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            led = asyncio.create_task(client.post("/v1/chat/completions", json=STREAMED))
            await u.wait_calls(1)
            followed = asyncio.create_task(other.gateway.chat(STREAMED))
            await following(other)
            if said:
                await opened(other)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            with pytest.raises(httpx.HTTPError):
                await led
            response = await followed
            if said:
                got = text_of_stream(response.content)
                assert got and words(said).startswith(got)
                assert b"[DONE]" not in response.content and b'"error"' in response.content
                assert u.n == 1
                assert other.stored == 0
            else:
                assert (text(response), u.n) == ("ans-2", 2)
