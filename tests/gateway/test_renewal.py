"""An answer that somebody had renewed (``no-cache``, ``max-age``) is what everybody is given from then on, in every
process that shares the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.stub_upstream import StubUpstream
from tests.field.conftest import B, Bench, World
from tests.field.gateway_process import gateway_process
from tests.gateway.conftest import Start
from tests.harness import FakeClock, upstream
from tests.services import redis_server
from tests.waiting import SOON, until

EMBEDDINGS = "/v1/embeddings"
ITEM = {"model": "m1", "input": ["a"]}


async def soon_given(bench: Bench, text: str) -> None:
    """Waits until the cache gives this answer; nothing is computed meanwhile."""
    async with asyncio.timeout(SOON):
        while (await bench.hit(B)).text != text:
            await asyncio.sleep(0.01)


def looked_up(bench: Bench) -> int:
    shared = bench.gateway.app.runtime.shared
    assert shared is not None
    return sum(shared.counters["get"].values())


@pytest.mark.parametrize("directive", ["no-cache", "max-age=0"])
@pytest.mark.parametrize("short_path", [True, False], ids=["wire", "full"])
async def test_gateways_on_one_redis_give_the_new_answer_from_memory(
    redis_cache: dict[str, Any], tmp_path: Path, directive: str, short_path: bool
) -> None:
    world, clock = World("redis", short_path, {"redis": redis_cache}, tmp_path), FakeClock()
    async with StubUpstream() as u, world.bench(u, clock) as one, world.bench(u, clock) as other:
        await one.miss(B)
        for bench in (one, other, one, other):
            assert (await bench.hit(B)).text == "ans-1"
        clock.advance(1)
        assert (await one.miss(B, cache_control=directive)).text == "ans-2"
        await soon_given(other, "ans-2")
        for bench in (one, other):
            await soon_given(bench, "ans-2")
            before = looked_up(bench)
            for _ in range(3):
                assert (await bench.hit(B)).text == "ans-2"
            assert looked_up(bench) == before, "asked once, the store is not asked again"


async def test_items_of_embeddings_are_renewed_alike(start: Start, redis_cache: dict[str, Any]) -> None:
    async with start(cache={"redis": redis_cache}) as one, start(cache={"redis": redis_cache}) as other:
        first = (await one.miss(ITEM, EMBEDDINGS)).response.json()["data"]
        assert (await other.hit(ITEM, EMBEDDINGS)).response.json()["data"] == first
        before = other.gateway.app.runtime.generations.renewed
        await one.miss(ITEM, EMBEDDINGS, cache_control="no-cache")
        await until(lambda: other.gateway.app.runtime.generations.renewed > before, "the other has heard of it")
        lookups = looked_up(other)
        await other.hit(ITEM, EMBEDDINGS)
        assert looked_up(other) == lookups + 1


@pytest.mark.parametrize(("body", "path"), [(B, "/v1/chat/completions"), (ITEM, EMBEDDINGS)], ids=["chat", "batch"])
async def test_an_answer_that_takes_the_place_of_none_is_not_told(
    start: Start, clock: FakeClock, redis_cache: dict[str, Any], body: dict[str, Any], path: str
) -> None:
    async with start(cache={"redis": redis_cache}) as one:
        runtime = one.gateway.app.runtime
        assert runtime.shared is not None
        await one.miss(body, path, cache_control="max-age=60")
        await runtime.keeper.drain()
        assert not runtime.shared.counters["bump"]
        clock.advance(1)
        await one.miss(body, path, cache_control="max-age=0")
        await runtime.keeper.drain()
        assert runtime.shared.counters["bump"] == {"ok": 1}


async def test_a_store_that_was_away_is_asked_once_it_is_back(
    start: Start, redis_cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(cache={"redis": redis_cache}) as one, start(cache={"redis": redis_cache}) as other:
        await one.miss(B)
        await other.hit(B)
        runtime = other.gateway.app.runtime
        assert runtime.shared is not None
        before = runtime.generations.renewed
        await one.miss(B, cache_control="no-cache")
        await until(lambda: runtime.generations.renewed > before, "the other has heard of it")

        async def find(*_: object) -> None:
            raise AssertionError("the short path leaves to the full one what memory can answer")

        with monkeypatch.context() as patch:
            patch.setattr(runtime.recall, "find", find)
            patch.setattr(runtime.shared.store, "_behind", True)
            assert (await other.hit(B)).text == "ans-1"
            patch.setattr(runtime.shared, "begin_get", lambda _: None)
            assert (await other.hit(B)).text == "ans-1"
        assert (await other.hit(B)).text == "ans-2"


async def test_what_memory_holds_still_serves_when_the_store_is_gone(start: Start) -> None:
    with redis_server() as server:
        cache = {"redis": {"url": server.url, "timeout": "1s"}}
        async with start(cache=cache) as one, start(cache=cache) as other:
            await one.miss(B)
            await other.hit(B)
            before = other.gateway.app.runtime.generations.renewed
            await one.miss(B, cache_control="no-cache")
            await until(lambda: other.gateway.app.runtime.generations.renewed > before, "the other has heard of it")
            server.kill()
            assert (await other.hit(B)).text == "ans-1"
            assert (await one.hit(B)).text == "ans-2"


async def test_gateways_on_one_disk_give_the_new_answer(tmp_path: Path) -> None:
    async with StubUpstream() as u, contextlib.AsyncExitStack() as stack:
        config = {"upstreams": [upstream(u.url)], "cache": {"disk": {"path": str(tmp_path / "cache")}}}
        starting = [gateway_process(config) for _ in range(2)]
        one, other = await asyncio.gather(*map(stack.enter_async_context, starting))

        async def text(client: httpx.AsyncClient, directive: str) -> str | None:
            reply = await client.post("/v1/chat/completions", json=B, headers={"cache-control": directive})
            return reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else None

        async def soon(client: httpx.AsyncClient, expected: str) -> None:
            async with asyncio.timeout(SOON):
                while await text(client, "only-if-cached") != expected:
                    await asyncio.sleep(0.01)

        assert await text(one, "max-stale") == "ans-1"
        await soon(other, "ans-1")
        assert await text(one, "no-cache") == "ans-2"
        for client in (other, one):
            await soon(client, "ans-2")
