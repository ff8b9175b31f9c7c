"""Upstreams that lie, babble, or turn into something else: the caller gets a clear answer, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.config import ConfigError
from gateway.config.load import load_config
from gateway.upstreams.pool import LIST_FOR
from loadtest.stub_upstream import StubUpstream, answer, body
from policies.health import FAILURES
from tests.field.reading import ASKS, json_events
from tests.harness import FakeClock, Running, running_gateway, upstream

LONG = "A long prompt that many share. " * 60


@contextlib.asynccontextmanager
async def two(**more: Any) -> AsyncIterator[tuple[StubUpstream, StubUpstream, Running, FakeClock]]:
    """The first of two upstreams is asked first, whatever is known of them."""
    clock = FakeClock()
    async with StubUpstream() as bad, StubUpstream() as good:
        known = {"models": ["m1"], **more}
        config = {
            "upstreams": [upstream(bad.url, "bad", weight=1000, **known), upstream(good.url, "good", **known)],
            "routing": {"policy": "load", "probe": 0},
            "retry": {"rounds": 0},
        }
        async with running_gateway(config, clock) as gateway:
            yield bad, good, gateway, clock


async def at_rest(gateway: Running) -> None:
    async with asyncio.timeout(5):
        while any(m.in_flight or m.engine.running or m.engine.pending for m in gateway.app.runtime.pool.members):
            await asyncio.sleep(0.01)
    assert not gateway.app.runtime.flights


LIES: list[Any] = [
    {"prompt_tokens": -5, "completion_tokens": -1},
    {"prompt_tokens": 10**18, "completion_tokens": 10**18},
    {"prompt_tokens": 2**39, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2**39}},
    {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": -3}},
    {"prompt_tokens": "many", "completion_tokens": "few"},
    {"prompt_tokens": 1.5, "completion_tokens": 1e300},
    {"prompt_tokens": True, "prompt_tokens_details": [1]},
    {"prompt_tokens": None},
    {},
    [],
    "usage",
    7,
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_lie_in_usage_moves_no_figure_out_of_bounds(stream: bool) -> None:
    async with StubUpstream() as liar, StubUpstream() as honest:
        upstreams = [upstream(liar.url, "liar", models=["m1"]), upstream(honest.url, "honest", models=["m1"])]
        async with running_gateway({"upstreams": upstreams, "routing": {"probe": 0}}, FakeClock()) as gateway:
            for asked, lie in enumerate(LIES * 2):
                liar.always(answer(usage=lie))
                ask = {"model": "m1", "stream": stream, "messages": [{"role": "user", "content": f"{LONG}{asked}"}]}
                assert (await gateway.chat(ask)).status_code == 200
            await at_rest(gateway)
            runtime = gateway.app.runtime
            for member in runtime.pool.members:
                assert math.isfinite(member.engine.work(runtime.clock.monotonic()))
            told = runtime.router.told_of()
            assert 0 <= told["told"] <= told["expected"] + 2**40
            ask = {"model": "m1", "messages": [{"role": "user", "content": "short"}]}
            replies = [await gateway.chat(ask | {"seed": n}) for n in range(10)]
            assert {reply.status_code for reply in replies} == {200}
            assert (await gateway.client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_an_end_is_ended(stream: bool) -> None:
    async with two(timeouts={"total": "500ms"}) as (bad, _, gateway, _):
        bad.always(answer(deltas=["more "] * 5000).regroup(every=64).paced(0.005))
        response = await asyncio.wait_for(gateway.chat(ASKS["chat"][1] | {"stream": stream}), 10)
        if stream:
            assert len([event for event in json_events(response.content) if "error" in event]) == 1
            assert b"[DONE]" not in response.content
        else:
            assert response.headers["x-warmgate-upstream"] == "good"
        await at_rest(gateway)
        await bad.wait_idle()


PAGE = body(b"<!doctype html><title>Sign in</title>", "Text/HTML; charset=utf-8")


class TestWebPages:
    @pytest.mark.parametrize("api", ASKS)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_next_one_answers(self, api: str, stream: bool) -> None:
        path, ask = ASKS[api]
        async with two() as (bad, _, gateway, _):
            bad.always(PAGE)
            response = await gateway.client.post(path, json=ask | {"stream": stream})
            assert (response.status_code, response.headers["x-warmgate-upstream"]) == (200, "good")
            await at_rest(gateway)

    @pytest.mark.parametrize("api", ASKS)
    async def test_alone_it_is_an_error_in_the_form_of_the_api(self, api: str) -> None:
        path, ask = ASKS[api]
        async with StubUpstream() as u:
            u.always(PAGE)
            async with running_gateway({"upstreams": [upstream(u.url)]}) as gateway:
                response = await gateway.client.post(path, json=ask)
                assert response.status_code == 502
                assert "web page" in response.json()["error"]["message"]

    async def test_it_is_left_alone_though_it_is_so_quick(self) -> None:
        async with two() as (bad, good, gateway, _):
            bad.always(PAGE)
            for n in range(3 * FAILURES):
                assert (await gateway.chat(ASKS["chat"][1] | {"seed": n})).status_code == 200
            assert (bad.n, good.n) == (FAILURES, 3 * FAILURES)


class TestAnotherModelAtTheSameAddress:
    async def test_who_still_has_it_answers_and_it_is_asked_what_it_has(self) -> None:
        async with two(models=None) as (bad, good, gateway, _):
            assert (await gateway.chat(ASKS["chat"][1])).headers["x-warmgate-upstream"] == "bad"
            bad.models = ("m2",)
            bad.always(lambda call: answer() if call.json["model"] == "m2" else body(b'{"error": {}}', status=404))
            for n in range(3):
                response = await gateway.chat(ASKS["chat"][1] | {"seed": n})
                assert (response.status_code, response.headers["x-warmgate-upstream"]) == (200, "good")
            assert [call.json["model"] for call in bad.calls] == ["m1", "m1"], "it is doubted once"
            response = await gateway.chat(ASKS["chat"][1] | {"model": "m2"})
            assert (response.status_code, response.headers["x-warmgate-upstream"]) == (200, "bad")
            assert good.n == 3
            await at_rest(gateway)

    async def test_when_nobody_has_it_any_more_the_caller_is_told_so(self) -> None:
        async with StubUpstream() as u:
            clock = FakeClock()
            async with running_gateway({"upstreams": [upstream(u.url)]}, clock) as gateway:
                assert (await gateway.chat(ASKS["chat"][1])).status_code == 200
                u.models = ("m2",)
                clock.advance(LIST_FOR)
                response = await gateway.chat(ASKS["chat"][1] | {"seed": 1})
                assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
                assert u.n == 1


@pytest.mark.parametrize("role", ["prefil", "any", "1", "[both]"])
def test_an_unknown_role_is_one_sentence_that_names_the_right_ones(tmp_path: Any, role: str) -> None:
    path = tmp_path / "warmgate.yaml"
    path.write_text(f"upstreams: [{{name: u, url: 'http://127.0.0.1:9', role: {role}}}]")
    with pytest.raises(ConfigError) as refused:
        load_config(path, {}, {})
    (sentence,) = str(refused.value).splitlines()
    assert "upstreams[0].role" in sentence
    assert "prefill" in sentence
