"""What is owed to a caller when an upstream fails: another one, another model, another round; never two answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from email.utils import formatdate
from typing import Any, ClassVar

import pytest

from gateway.ledger.counters import CALLS
from gateway.ledger.query import Scope, sums
from gateway.upstreams.headers import retry_after
from loadtest.stub_upstream import Reply, StubUpstream, answer, error, raw
from tests.field.conftest import B, Bench
from tests.field.reading import ASKS, json_events, text_of, text_of_stream
from tests.gateway.conftest import Start
from tests.harness import FakeClock, running_gateway, upstream

STREAMED = B | {"stream": True}
QUICK = {"rounds": 2, "base": "50ms", "longest": "2s"}
Pair = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
async def v() -> AsyncIterator[StubUpstream]:
    """A second upstream of the same model."""
    async with StubUpstream(models=("m1",)) as made:
        yield made


@pytest.fixture
def pair(u: StubUpstream, v: StubUpstream, clock: FakeClock) -> Pair:
    """A gateway over ``u`` (which is asked first) and ``v``."""

    @contextlib.asynccontextmanager
    async def begin(**config: Any) -> AsyncIterator[Bench]:
        whole = {
            "upstreams": [upstream(u.url, "u", models=["m1"], weight=100), upstream(v.url, "v", models=["m1"])],
            "routing": {"policy": "load", "probe": 0},
            "retry": QUICK,
            **config,
        }
        async with running_gateway(whole, clock) as gateway:
            yield Bench(gateway, u, clock, whole)

    return begin


BEFORE_THE_FIRST_BYTE: dict[str, Reply] = {
    "429": error(429),
    "502": error(502),
    "503": error(503),
    "529": error(529),
    "reset": raw(b"", then="reset"),
    "closed": raw(b"", then="close"),
    "half a head": raw(b"HTTP/1.1 200 OK\r\ncontent-le", then="close"),
    "no body": answer().cut(after=0, then="reset"),
}


class TestAnotherUpstream:
    @pytest.mark.parametrize("body", [B, STREAMED], ids=["plain", "stream"])
    @pytest.mark.parametrize("failure", BEFORE_THE_FIRST_BYTE)
    async def test_whatever_fails_before_the_first_byte_the_next_one_answers(
        self, pair: Pair, u: StubUpstream, v: StubUpstream, failure: str, body: dict[str, Any]
    ) -> None:
        u.always(BEFORE_THE_FIRST_BYTE[failure])
        async with pair() as bench:
            response = await bench.gateway.chat(body)
            assert response.status_code == 200
            assert response.headers["x-warmgate-upstream"] == "v"
            assert (u.n, v.n) == (1, 1)
            await bench.hit(B)

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 500])
    async def test_what_another_would_say_as_well_is_passed_on(
        self, pair: Pair, u: StubUpstream, v: StubUpstream, status: int
    ) -> None:
        u.always(error(status))
        async with pair() as bench:
            assert (await bench.gateway.chat(B)).status_code == status
            assert (u.n, v.n) == (1, 0)

    async def test_after_the_first_byte_nobody_else_is_asked(
        self, pair: Pair, u: StubUpstream, v: StubUpstream
    ) -> None:
        u.always(answer(deltas=["Hel", "lo"]).cut(after=2, then="reset"))
        async with pair() as bench:
            response = await bench.gateway.chat(STREAMED)
            assert len([event for event in json_events(response.content) if "error" in event]) == 1
            assert (u.n, v.n) == (1, 0)

    async def test_when_all_fail_the_last_refusal_is_passed_on(
        self, pair: Pair, u: StubUpstream, v: StubUpstream
    ) -> None:
        u.always(error(503, "u is tired"))
        v.always(error(503, "v is tired"))
        async with pair() as bench:
            response = await bench.gateway.chat(B)
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "v is tired"
            assert (u.n, v.n) == (1, 1), "without being asked to come back nobody does"

    async def test_one_that_fails_again_and_again_is_left_alone_for_a_while(
        self, pair: Pair, u: StubUpstream, v: StubUpstream
    ) -> None:
        u.always(error(503))
        async with pair() as bench:
            for number in range(10):
                assert (await bench.gateway.chat(B | {"seed": number})).status_code == 200
            assert u.n < 5
            assert v.n == 10

    async def test_one_that_asks_for_a_rest_gets_it(
        self, pair: Pair, u: StubUpstream, v: StubUpstream, clock: FakeClock
    ) -> None:
        u.reply(error(429).header("retry-after", "30"))
        async with pair() as bench:
            for number in range(5):
                assert (await bench.gateway.chat(B | {"seed": number})).status_code == 200
            assert (u.n, v.n) == (1, 5)
            clock.advance(30)
            await bench.gateway.chat(B | {"seed": 5})
            assert (u.n, v.n) == (2, 5)

    async def test_the_only_upstream_is_asked_however_often_it_failed(self, start: Start, u: StubUpstream) -> None:
        u.always(error(503).header("retry-after", "60"))
        async with start() as bench:
            for number in range(6):
                assert (await bench.gateway.chat(B)).status_code == 503
                assert u.n == number + 1


class TestAnotherRound:
    async def test_an_upstream_that_is_away_for_a_moment_is_waited_for(self, start: Start, u: StubUpstream) -> None:
        async with start(retry={"rounds": 6, "base": "400ms"}) as bench:
            await bench.miss(B)
            await u.stop()
            asking = asyncio.create_task(bench.gateway.chat(B | {"seed": 1}))
            await asyncio.sleep(0.05)
            assert not asking.done()
            await u.start()
            assert (await asking).status_code == 200

    async def test_one_that_stays_away_is_given_up(self, start: Start, u: StubUpstream) -> None:
        async with start(retry=QUICK) as bench:
            await u.stop()
            async with asyncio.timeout(1):
                response = await bench.gateway.chat(B)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")

    @pytest.mark.parametrize("status", [429, 503])
    async def test_one_that_asks_to_come_back_soon_is_asked_again(
        self, start: Start, u: StubUpstream, status: int
    ) -> None:
        u.reply(error(status).header("retry-after-ms", "200"))
        async with start(retry=QUICK) as bench:
            began = time.monotonic()
            assert text_of((await bench.gateway.chat(B)).json()) == "ans-2"
            assert time.monotonic() - began >= 0.2

    async def test_one_that_asks_to_come_back_later_is_passed_on_as_it_is(self, start: Start, u: StubUpstream) -> None:
        u.always(error(429).header("retry-after", "30"))
        async with start(retry=QUICK) as bench:
            response = await bench.gateway.chat(B)
            assert (response.status_code, response.headers["retry-after"], u.n) == (429, "30", 1)

    async def test_what_may_have_been_computed_is_not_computed_again(self, start: Start, u: StubUpstream) -> None:
        u.always(raw(b"", then="reset"))
        async with start(upstreams=[upstream(u.url, models=["m1"])], retry=QUICK) as bench:
            assert (await bench.gateway.chat(B)).status_code == 502
            assert u.n == 1

    async def test_rounds_can_be_switched_off(self, start: Start, u: StubUpstream) -> None:
        u.always(error(503).header("retry-after-ms", "10"))
        async with start(retry={"rounds": 0}) as bench:
            assert (await bench.gateway.chat(B)).status_code == 503
            assert u.n == 1

    async def test_a_caller_who_leaves_ends_the_waiting(self, start: Start, u: StubUpstream) -> None:
        u.always(error(503).header("retry-after-ms", "1500"))
        async with start(retry=QUICK) as bench:
            asking = asyncio.create_task(bench.gateway.chat(B))
            await u.wait_calls(1)
            asking.cancel()
            await bench.at_rest()
            await asyncio.sleep(0.1)
            assert u.n == 1


class TestSideEffects:
    EFFECTS = (
        ("/v1/chat/completions", B | {"store": True}),
        ("/v1/responses", ASKS["responses"][1] | {"store": True}),
        ("/v1/responses", ASKS["responses"][1] | {"background": True}),
    )

    @pytest.mark.parametrize(("path", "body"), EFFECTS)
    @pytest.mark.parametrize("failure", ["reset", "503"])
    async def test_what_may_have_arrived_is_never_sent_twice(
        self, pair: Pair, u: StubUpstream, v: StubUpstream, path: str, body: dict[str, Any], failure: str
    ) -> None:
        u.always(BEFORE_THE_FIRST_BYTE[failure].header("retry-after-ms", "10"))
        async with pair() as bench:
            response = await bench.gateway.client.post(path, json=body)
            assert response.status_code >= 502
            assert (u.n, v.n) == (1, 0)

    async def test_no_kept_connection_is_relied_on(self, start: Start, u: StubUpstream) -> None:
        """One that turns out to be stale would have to be replaced, and the request sent again."""
        async with start() as bench:
            await bench.miss(B)
            u.always(raw(b"", then="reset"))
            assert (await bench.gateway.chat(B | {"store": True})).status_code == 502
            assert u.n == 2

    @pytest.mark.parametrize(("path", "body"), EFFECTS)
    async def test_what_surely_did_not_arrive_is(
        self, pair: Pair, u: StubUpstream, v: StubUpstream, path: str, body: dict[str, Any]
    ) -> None:
        await u.stop()
        async with pair() as bench:
            assert (await bench.gateway.client.post(path, json=body)).status_code == 200
            assert v.n == 1


class TestAnotherModel:
    MODELS: ClassVar = {"models": {"m1": {"fallback": ["nowhere", "m2"]}}}

    @pytest.mark.parametrize("body", [B, STREAMED], ids=["plain", "stream"])
    async def test_a_fallback_answers_says_so_and_is_not_kept(
        self, start: Start, u: StubUpstream, body: dict[str, Any]
    ) -> None:
        u.always(lambda call: error(503) if call.json["model"] == "m1" else answer())
        async with start(**self.MODELS) as bench:
            response = await bench.gateway.chat(body)
            assert response.status_code == 200
            assert [call.json["model"] for call in u.calls] == ["m1", "m2"]
            assert u.calls[0].json | {"model": "m2"} == u.calls[1].json
            assert response.headers["x-warmgate-upstream"] == "u; model=m2"
            assert 'detail="not stored: the model m2 stood in"' in response.headers["cache-status"]
            await bench.at_rest()
            assert bench.stored == 0
            u.always(answer())
            assert (await bench.miss(B)).text == "ans-3"
            await bench.miss(B | {"model": "m2"})

    async def test_it_is_taken_before_a_pause_is(self, start: Start, u: StubUpstream) -> None:
        u.always(lambda call: error(429).header("retry-after", "2") if call.json["model"] == "m1" else answer())
        async with start(**self.MODELS) as bench:
            async with asyncio.timeout(1):
                assert (await bench.gateway.chat(B)).status_code == 200

    async def test_when_it_fails_too_its_refusal_is_passed_on(self, start: Start, u: StubUpstream) -> None:
        u.always(lambda call: error(503, f"no {call.json['model']}"))
        async with start(**self.MODELS) as bench:
            response = await bench.gateway.chat(B)
            assert (response.status_code, response.json()["error"]["message"]) == (503, "no m2")

    async def test_it_stands_in_for_a_model_that_nobody_serves_now(self, start: Start, u: StubUpstream) -> None:
        async with start(models={"best": {"target": "gone", "fallback": ["m2"]}}) as bench:
            response = await bench.gateway.chat(B | {"model": "best"})
            assert (response.status_code, u.calls[0].json["model"]) == (200, "m2")
            assert bench.stored == 0

    async def test_what_was_refused_for_itself_is_not_asked_of_another_model(
        self, start: Start, u: StubUpstream
    ) -> None:
        u.always(error(400))
        async with start(**self.MODELS) as bench:
            assert (await bench.gateway.chat(B)).status_code == 400
            assert u.n == 1

    async def test_vectors_and_token_counts_are_not_those_of_another_model(self, start: Start, u: StubUpstream) -> None:
        u.always(error(503))
        async with start(**self.MODELS) as bench:
            for path, body in (
                ("/v1/embeddings", {"model": "m1", "input": ["a"]}),
                ("/v1/messages/count_tokens", {"model": "m1", "messages": []}),
            ):
                before = u.n
                assert (await bench.gateway.client.post(path, json=body)).status_code == 503
                assert u.n == before + 1

    async def test_its_cost_is_counted_under_its_own_name(self, start: Start, u: StubUpstream) -> None:
        u.always(lambda call: error(503) if call.json["model"] == "m1" else answer())
        async with start(**self.MODELS) as bench:
            await bench.gateway.chat(B)
            calls = await bench.gateway.app.runtime.ledger.read(
                lambda open_: {line.key[0]: line.counts[CALLS] for line in sums(open_, Scope(), ("model",))}
            )
            assert calls == {"m1": 1, "m2": 1}

    async def test_those_who_joined_get_it_as_well(self, start: Start, u: StubUpstream, gate: asyncio.Event) -> None:
        u.always(lambda call: error(503).held(gate) if call.json["model"] == "m1" else answer())
        async with start(**self.MODELS) as bench:
            asking = asyncio.gather(*(bench.gateway.chat(body) for body in (B, B, STREAMED)))
            await bench.gateway.joined(3)
            gate.set()
            replies = await asking
            assert {reply.headers["x-warmgate-upstream"] for reply in replies} == {"u; model=m2"}
            assert [text_of(reply.json()) for reply in replies[:2]] == ["ans-2"] * 2
            assert text_of_stream(replies[2].content) == "ans-2"
            assert u.n == 2


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 7 "}, 7.0),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": formatdate(1_700_000_060, usegmt=True)}, 60.0),
        ({"retry-after": formatdate(1_699_999_000, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after-ms": "x"}, None),
        ({"retry-after-ms": "100.5"}, 0.1005),
        ({"retry-after-ms": "9" * 5000}, math.inf),
    ],
)
def test_reading_how_long_an_upstream_wants_to_be_left_alone(headers: dict[str, str], expected: float | None) -> None:
    raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert retry_after(raw_headers, now=1_700_000_000) == expected
