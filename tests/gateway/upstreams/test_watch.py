"""The watch over upstreams: health, load, restarts, ejection and slow return, against stubs that answer anything."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loadtest.stub_upstream import StubUpstream, body, error, json_body
from policies.health import FAILURES, FIRST_BREAK, RETURN
from tests.harness import FakeClock, Running, running_gateway, upstream

METRICS = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{model_name="m1",engine="0"} 7.0
vllm:num_requests_running{model_name="m1",engine="1"} 3.0
vllm:num_requests_waiting{model_name="m1"} 2.0
vllm:kv_cache_usage_perc{model_name="m1"} 0.25
process_start_time_seconds 1000.0
"""
ASK = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "Say A"}]}


@contextlib.asynccontextmanager
async def scene(**more: Any) -> AsyncIterator[tuple[list[StubUpstream], Running, FakeClock]]:
    clock = FakeClock()
    async with StubUpstream() as a, StubUpstream() as b:
        config = {"upstreams": [upstream(a.url, "a"), upstream(b.url, "b")], "routing": {"probe": 0}, **more}
        async with running_gateway(config, clock) as gateway:
            yield [a, b], gateway, clock


async def ask(gateway: Running, text: str) -> str:
    response = await gateway.chat({**ASK, "messages": [{"role": "user", "content": text}]})
    assert response.status_code == 200, response.text
    return response.headers["x-warmgate-upstream"]


async def test_load_is_read_from_vllms_metrics():
    async with scene() as ((a, _), gateway, _):
        a.on("/metrics", body(METRICS, "text/plain"))
        await gateway.app.runtime.watch.look()
        first, second = gateway.app.runtime.pool.members
        assert (first.elsewhere, first.engine.running, first.kv_use) == (12, 12, 0.25)
        assert (second.elsewhere, second.engine.running) == (0, 0)
        assert await ask(gateway, "where to?") == "b"


async def test_load_that_is_no_longer_reported_is_no_longer_counted():
    async with scene() as ((a, _), gateway, _):
        a.on("/metrics", body(METRICS, "text/plain"))
        await gateway.app.runtime.watch.look()
        await a.stop()
        await gateway.app.runtime.watch.look()
        assert gateway.app.runtime.pool.members[0].engine.running == 0


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>no</html>",
        b"vllm:num_requests_running NaN\n",
        b"vllm:num_requests_running 1e300\n",
        b"vllm:num_requests_running -5\n",
        b"vllm:num_requests_running 1e\n",
        b"\xff\xfe" * 1000,
    ],
)
async def test_a_page_that_makes_no_sense_is_no_load(page):
    async with scene() as ((a, _), gateway, _):
        a.on("/metrics", body(page, "text/plain"))
        await gateway.app.runtime.watch.look()
        member = gateway.app.runtime.pool.members[0]
        assert (member.engine.running, member.health.available(0)) == (0, True)


async def test_a_dead_upstream_is_ejected_and_comes_back_by_degrees():
    async with scene() as ((a, _), gateway, clock):
        watch, (first, _) = gateway.app.runtime.watch, gateway.app.runtime.pool.members
        await a.stop()
        for _ in range(FAILURES):
            await watch.look()
        assert first.health.ejected
        assert {await ask(gateway, f"{n}") for n in range(10)} == {"b"}
        await a.start()
        clock.advance(FIRST_BREAK)
        await watch.look()
        assert first.health.share(clock.monotonic()) < 0.2
        some = [await ask(gateway, f"again {n}") for n in range(40)]
        assert some.count("a") < 15
        clock.advance(RETURN)
        assert first.health.share(clock.monotonic()) == 1.0


async def test_without_a_health_page_the_list_of_models_will_do():
    async with scene() as ((a, b), gateway, _):
        a.on("/health", error(404))
        b.on("/health", error(404))
        b.on("/v1/models", error(503))
        for _ in range(FAILURES):
            await gateway.app.runtime.watch.look()
        assert [member.health.ejected for member in gateway.app.runtime.pool.members] == [False, True]


async def test_an_upstream_that_is_still_loading_is_not_used():
    async with scene() as ((a, _), gateway, _):
        a.on("/health", json_body({"status": "loading"}, status=503))
        for _ in range(FAILURES):
            await gateway.app.runtime.watch.look()
        assert {await ask(gateway, f"{n}") for n in range(6)} == {"b"}


async def test_when_all_are_ejected_they_are_tried_all_the_same():
    async with scene() as ((a, b), gateway, _):
        for one in (a, b):
            one.on("/health", error(500))
        for _ in range(FAILURES):
            await gateway.app.runtime.watch.look()
        assert await ask(gateway, "anybody?") in ("a", "b")


async def test_the_only_upstream_of_a_model_is_never_ejected():
    async with StubUpstream() as a, StubUpstream(models=("m2",)) as b:
        config = {"upstreams": [upstream(a.url, "a"), upstream(b.url, "b")], "routing": {"probe": 0}}
        async with running_gateway(config) as gateway:
            a.on("/health", error(500))
            for _ in range(FAILURES):
                await gateway.app.runtime.watch.look()
            assert await ask(gateway, "you?") == "a"


async def test_a_restart_seen_in_the_metrics_ends_the_credit():
    async with scene() as ((a, b), gateway, clock):
        for one in (a, b):
            one.on("/metrics", body(METRICS, "text/plain"))
        watch, router = gateway.app.runtime.watch, gateway.app.runtime.router
        await watch.look()
        where = await ask(gateway, "long " * 1000)
        assert len(router.index) > 10
        for one in (a, b):
            one.on("/metrics", body(METRICS.replace(b" 1000.0", b" 2000.0"), "text/plain"))
        clock.advance(1)
        await watch.look()
        assert where in ("a", "b")
        assert len(router.index) == 0
