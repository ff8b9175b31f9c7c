"""Purging by every scope, hard and soft, here and in every other process that shares the store."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B, Bench
from tests.gateway.conftest import Start, refreshed
from tests.harness import FakeClock
from tests.waiting import SOON

OTHER = B | {"messages": [{"role": "user", "content": "Say B"}]}
ROOT = Path(__file__).parents[2]
BUMP = """
import asyncio, sys
from cache.stores.disk import DiskStore

async def bump(folder, scope):
    store = DiskStore(folder, 64 << 20)
    await store.open()
    await store.bump(scope)
    await store.close()

asyncio.run(bump(*sys.argv[1:]))
"""
"""A purge by another process."""


def bench_scope(order: dict[str, Any]) -> str:
    """The scope that a purge order of `ORDERS` stands for."""
    name, value = next(iter(order.items()))
    return {"all": "all", "namespace": "namespace:default/n"}.get(name, f"{name}:{value}")


async def purge(bench: Bench, **order: Any) -> dict[str, Any]:
    response = await bench.gateway.client.post("/admin/purge", json=order)
    assert response.status_code == 200, response.text
    return response.json()


async def key_of(bench: Bench, body: dict[str, Any]) -> str:
    return (await bench.gateway.client.post("/admin/explain", json=body)).json()["key"]


async def soon_a_miss(bench: Bench, **steering: str) -> None:
    async with asyncio.timeout(SOON):
        while (reply := await bench.send(B, **steering)).rose == 0:
            assert reply.is_hit
            await asyncio.sleep(0.01)
    assert "hit" not in reply.cache_status


ORDERS: list[dict[str, Any]] = [
    {"model": "m1"},
    {"tenant": "default"},
    {"namespace": "n"},
    {"tag": "t"},
    {"all": True},
]


class TestPurging:
    @pytest.mark.parametrize("order", ORDERS, ids=lambda order: next(iter(order)))
    async def test_a_hard_purge_forgets_and_what_is_computed_after_it_lives(
        self, start: Start, clock: FakeClock, order: dict[str, Any]
    ) -> None:
        async with start(cache={"stale_while_revalidate": "1h", "stale_if_error": "1h"}) as bench:
            steering = {"x_warmgate_namespace": "n", "x_warmgate_tags": "s, t"}
            await bench.miss(B, **steering)
            assert await purge(bench, **order) == {"purged": bench_scope(order), "soft": False, "everywhere": True}
            assert (await bench.miss(B, **steering)).cache_status == "warmgate; fwd=uri-miss; stored"
            await bench.hit(B, **steering)

    async def test_purging_a_key_and_nothing_else(self, start: Start) -> None:
        async with start() as bench:
            await bench.miss(B)
            await bench.miss(OTHER)
            await purge(bench, key=await key_of(bench, B))
            await bench.miss(B)
            await bench.hit(OTHER)

    @pytest.mark.parametrize(
        "order",
        [{"model": "m2"}, {"tenant": "t2"}, {"namespace": "other"}, {"namespace": "n", "tenant": "t2"}, {"tag": "x"}],
    )
    async def test_a_purge_of_something_else_leaves_it(self, start: Start, order: dict[str, Any]) -> None:
        async with start() as bench:
            await bench.miss(B, x_warmgate_namespace="n", x_warmgate_tags="t")
            await purge(bench, **order)
            await bench.hit(B, x_warmgate_namespace="n")

    @pytest.mark.parametrize("soft", [False, True])
    async def test_what_was_made_without_the_tag_is_not_for_those_who_name_it(
        self, start: Start, clock: FakeClock, soft: bool
    ) -> None:
        async with start() as bench:
            await bench.miss(B)
            await bench.hit(B, x_warmgate_tags="t")
            clock.advance(1)
            await purge(bench, tag="t", soft=soft)
            clock.advance(1)
            await bench.hit(B)
            assert (await bench.miss(B, x_warmgate_tags="t")).text == "ans-2"
            assert (await bench.hit(B, x_warmgate_tags="t, s")).text == "ans-2"

    @pytest.mark.parametrize(
        ("order", "word"),
        [
            ({"tag": "my tag"}, "letters"),
            ({"tag": "x\x00"}, "letters"),
            ({"namespace": ".n"}, "first"),
            ({"key": "AB"}, "32 digits"),
        ],
    )
    async def test_a_name_that_nothing_can_have_is_an_error(
        self, start: Start, order: dict[str, Any], word: str
    ) -> None:
        async with start() as bench:
            refused = await bench.gateway.client.post("/admin/purge", json=order)
            assert refused.status_code == 400 and word in refused.json()["detail"]
            for header in ("x-warmgate-tags", "x-warmgate-namespace"):
                asked = await bench.send(B, **{header: next(iter(order.values())).replace("\x00", " ") + " !"})
                assert asked.status == 400 and "letters" in asked.response.json()["error"]["message"]

    async def test_everything_older_than_a_moment(self, start: Start, clock: FakeClock) -> None:
        async with start() as bench:
            await bench.miss(B)
            clock.advance(10)
            moment = clock.time()
            await bench.miss(OTHER)
            clock.advance(10)
            await purge(bench, before=moment)
            await bench.miss(B)
            await bench.hit(OTHER)

    @pytest.mark.parametrize("order", [*ORDERS, {"before": 0}], ids=lambda order: next(iter(order)))
    async def test_a_soft_purge_makes_stale(self, start: Start, clock: FakeClock, order: dict[str, Any]) -> None:
        steering = {"x_warmgate_namespace": "n", "x_warmgate_tags": "t"}
        async with start(cache={"ttl": "1h", "stale_while_revalidate": "20s"}) as bench:
            await bench.miss(B, **steering)
            clock.advance(100)
            await purge(bench, **(order if "before" not in order else {"before": clock.time()}), soft=True)
            clock.advance(5)
            stale = await bench.gateway.chat(B, **steering)
            assert stale.headers["cache-status"] == "warmgate; hit; ttl=-5; detail=stale", "stale since the purge"
            await refreshed(bench, 2)
            assert (await bench.hit(B, **steering)).text == "ans-2"

    async def test_a_soft_purge_without_leave_to_serve_stale_is_a_miss(self, start: Start, clock: FakeClock) -> None:
        async with start() as bench:
            await bench.miss(B)
            await purge(bench, model="m1", soft=True)
            clock.advance(1)
            assert (await bench.miss(B)).cache_status == "warmgate; fwd=stale; stored"
            await bench.hit(B)

    @pytest.mark.parametrize(
        ("order", "steering"),
        [({"model": "m1"}, {}), ({"tag": "t"}, {"x_warmgate_tags": "t"})],
        ids=["under its model", "under a tag that only those who come later name"],
    )
    async def test_a_call_under_way_when_the_purge_comes_is_neither_kept_nor_joined(
        self,
        start: Start,
        u: StubUpstream,
        clock: FakeClock,
        gate: asyncio.Event,
        order: dict[str, str],
        steering: dict[str, str],
    ) -> None:
        u.reply(answer().held(gate))
        async with start() as bench:
            before = asyncio.create_task(bench.gateway.chat(B))
            await u.wait_calls(1)
            clock.advance(1)
            await purge(bench, **order)
            after = await bench.gateway.chat(B, **steering)
            assert after.json()["choices"][0]["message"]["content"] == "ans-2"
            gate.set()
            await before
            assert (await bench.hit(B, **steering)).text == "ans-2"

    @pytest.mark.parametrize(
        "order",
        [{}, {"model": "m1", "tag": "t"}, {"modle": "m1"}, {"model": 5}, {"before": 9e12}, {"before": True}],
    )
    async def test_an_order_that_is_not_clear_is_refused(self, start: Start, order: dict[str, Any]) -> None:
        async with start() as bench:
            assert (await bench.gateway.client.post("/admin/purge", json=order)).status_code == 400

    async def test_an_alias_is_purged_by_either_name(self, start: Start) -> None:
        async with start(models={"fast": {"target": "m1"}}) as bench:
            for name in ("fast", "m1"):
                await bench.miss(B | {"model": "fast"})
                await purge(bench, model=name)
            await bench.miss(B | {"model": "fast"})


class TestPurgingInOtherProcesses:
    @pytest.mark.parametrize("soft", [False, True])
    @pytest.mark.parametrize("order", [*ORDERS, {"before": 0}], ids=lambda order: next(iter(order)))
    async def test_within_a_second_every_gateway_that_shares_redis_obeys(
        self, start: Start, clock: FakeClock, redis_cache: dict[str, Any], order: dict[str, Any], soft: bool
    ) -> None:
        steering = {"x_warmgate_namespace": "n", "x_warmgate_tags": "t"}
        async with start(cache={"redis": redis_cache}) as one, start(cache={"redis": redis_cache}) as two:
            await one.miss(B, **steering)
            await two.hit(B, **steering)
            clock.advance(10)
            done = await purge(one, **(order if "before" not in order else {"before": clock.time()}), soft=soft)
            assert done["everywhere"]
            clock.advance(1)
            await soon_a_miss(two, **steering)

    @pytest.mark.parametrize("scope", ["model:m1", "~model:m1"])
    async def test_within_a_second_a_gateway_obeys_another_process_on_the_same_disk(
        self, start: Start, clock: FakeClock, tmp_path: Path, scope: str
    ) -> None:
        folder = tmp_path / "cache"
        async with start(cache={"disk": {"path": str(folder), "max_bytes": "64MiB"}}) as bench:
            await bench.miss(B)
            await bench.hit(B)
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", BUMP, str(folder), scope, cwd=ROOT)
            assert await other.wait() == 0
            clock.advance(1)
            await soon_a_miss(bench)

    async def test_a_gateway_that_starts_later_knows_of_it(self, start: Start, redis_cache: dict[str, Any]) -> None:
        async with start(cache={"redis": redis_cache}) as one:
            await one.miss(B)
            await purge(one, model="m1")
        async with start(cache={"redis": redis_cache}) as two:
            await two.miss(B)

    async def test_without_a_shared_store_several_workers_are_told_that_it_is_not_everywhere(
        self, start: Start
    ) -> None:
        async with start(listen={"workers": 2}) as bench:
            assert (await purge(bench, model="m1"))["everywhere"] is False
