"""What sentinels leave alone: every figure but their own, everybody's limits, and whatever is paid by the token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Config
from gateway.sentinels.computing import is_watched
from loadtest.stub_upstream import StubUpstream
from tests.gateway.sentinels.conftest import Engine, Watched, watched
from tests.harness import upstream
from tests.services import RedisServer

OWN = re.compile(r"warmgate_sentinel_|warmgate_kv_events|warmgate_route_index_blocks")
"""Its own, and what the engine truly told and holds."""


async def figures(gateway: Watched) -> dict[Any, float]:
    """Every sample of `/metrics`, all rollups and rows, limits and what is held out."""
    text = (await gateway.running.client.get("/metrics")).text
    found: dict[Any, float] = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not OWN.match(sample.name)
    }
    runtime = gateway.runtime
    for what in ("ledger?by=tenant,model,outcome,upstream", "ledger/rows"):
        found[(await gateway.running.client.get(f"/admin/{what}")).text] = 1
    usage = runtime.usages.of("default")
    found["usage"] = usage.concurrent
    found["held out in"] = runtime.holdout.left
    found["in flight"] = sum(member.in_flight for member in runtime.pool.members)
    found["router"] = runtime.router.expected + runtime.router.told + runtime.router.decisions.total()
    return found


async def test_no_figure_moves_but_their_own(engine: Engine, in_redis: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "upstreams": [engine.upstream()],
        "cache": {**in_redis, "holdout": 0.5},
        "ledger": {"path": str(tmp_path / "ledger.db")},
    }
    body = {"model": "tiny", "temperature": 0, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    async with watched(**config) as gateway:
        for _ in range(2):
            assert (await gateway.running.chat(body)).status_code == 200
        before = await figures(gateway)
        for _ in range(3):
            assert await gateway.reds() == {}
        after = await figures(gateway)
        assert after == before
        (told,) = [gateway.runtime.board.told()["spent"]]
        assert 3 * 3 <= told["requests"] <= 3 * 4
        assert told["prompt"] > told["cached"] > 0


async def test_what_is_paid_by_the_token_is_not_asked(u: StubUpstream) -> None:
    async with watched(upstreams=[upstream(u.url)]) as gateway:
        await gateway.round()
        assert u.n == 0
        assert not any(light.upstream for light in gateway.runtime.board.lights)
    async with watched(upstreams=[upstream(u.url, sentinel="on")]) as gateway:
        await gateway.round()
        assert u.n == 2
        assert {light.upstream for light in gateway.runtime.board.lights} == {"", "u"}
        assert not any(b"~sentinel" in call.body or "authorization" in call.headers for call in u.calls)


@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        ({}, False),
        ({"sentinel": "on"}, True),
        ({"kv_events": {"bind": "tcp://127.0.0.1:1"}}, True),
        ({"kv_events": {"bind": "tcp://127.0.0.1:1"}, "sentinel": "off"}, False),
        ({"name": "engine"}, True),
        ({"name": "engine", "sentinel": "off"}, False),
    ],
)
def test_which_upstreams_are_sent_canaries(settings: dict[str, Any], watched: bool) -> None:
    config = Config.model_validate({"engine": {}, "upstreams": [{"name": "a", "url": "http://h", **settings}]})
    assert is_watched(config.upstreams[0], config) is watched


async def test_memory_is_as_it_was(u: StubUpstream) -> None:
    async with watched(upstreams=[upstream(u.url)]) as gateway:
        memory = gateway.runtime.memory
        assert memory is not None
        await gateway.round()
        assert (len(memory), memory.bytes, memory.evictions) == (0, 0, 0)


async def test_the_store_does_not_fill_up(
    u: StubUpstream, in_redis: dict[str, Any], redis_process: RedisServer
) -> None:
    async with watched(upstreams=[upstream(u.url)], cache=in_redis) as gateway:
        kept = []
        for _ in range(5):
            await gateway.round()
            kept.append(len(redis_process.client().keys(f"{in_redis['redis']['prefix']}:r:*")))  # type: ignore[arg-type]
        assert set(kept[2:]) == {kept[2]}
        assert kept[2] <= 5
