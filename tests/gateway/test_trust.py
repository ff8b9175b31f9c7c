"""Kept answers that disagree with new ones: doubted on proof, disarmed where the operator wants it, by all, until they
agree again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cache.response.tags import Generations, arming, parts_of, place_of
from gateway.judging import judge
from gateway.sentinels.rounds import Sentinels
from gateway.trust import FEWEST, REMEMBERED, RESTORED, Trust
from loadtest.stub_upstream import StubUpstream, answer, error
from policies.savings import surely_below
from tests.harness import Running, running_gateway, upstream
from tests.waiting import until

BODY = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "q"}]}
HERE = place_of("default", "", "m1")
DISARMS = {"holdout": 0, "disarm": True}


@asynccontextmanager
async def gateway(u: StubUpstream, **more: Any) -> AsyncIterator[Running]:
    cache = {**DISARMS, **more.pop("cache", {})}
    async with running_gateway(
        {"upstreams": [upstream(u.url, models=["m1", "m2"])], "cache": cache, **more}
    ) as running:
        yield running


async def ask(running: Running, body: dict[str, Any] | None = None, **headers: str) -> tuple[str, str]:
    """The answer's text and its Cache-Status."""
    response = await running.chat(body or BODY, **headers)
    await running.app.runtime.keeper.drain()
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"], response.headers["cache-status"]


async def line(running: Running) -> dict[str, Any]:
    (only,) = (await running.client.get("/admin/agreement")).json()
    return only


# How sure one must be


def test_a_share_is_surely_below_a_bound_when_luck_would_hardly_explain_it() -> None:
    assert surely_below(0, 4, 0.9, 1e-3)
    assert not surely_below(0, 2, 0.9, 1e-3)
    assert not surely_below(16, 20, 0.9, 1e-3)
    assert surely_below(12, 20, 0.9, 1e-3)
    assert not surely_below(20, 20, 1.0, 1e-3)
    assert surely_below(19, 20, 1.0, 1e-3)  # all must agree, and one does not
    assert not surely_below(0, 20, 0.0, 1e-3)  # all may differ
    assert surely_below(5_000, 12_800, 0.5, 1e-3)


@pytest.mark.parametrize("bound", [0.5, 0.8, 0.95])
def test_on_the_bound_luck_is_taken_for_proof_as_seldom_as_promised(bound: float) -> None:
    rng = random.Random(4)
    alarms = sum(surely_below(sum(rng.random() < bound for _ in range(100)), 100, bound, 0.01) for _ in range(5_000))
    assert 0.002 < alarms / 5_000 < 0.013  # never more than 0.01 but for the luck of this sample


def trust(most: float = 0.1) -> Trust:
    made = Trust(Generations())
    made.most, made.disarms = most, True
    return made


def test_few_answers_are_no_proof_however_they_differ() -> None:
    made = trust()
    assert made.verdict(HERE, 0, 3) == "armed"
    assert made.verdict(HERE, 0, FEWEST - 1) == "armed"
    assert made.verdict(HERE, 0, FEWEST) == "doubted"
    assert made.verdict(HERE, FEWEST - 3, FEWEST) == "armed"  # 15 % differ; it may be chance


def test_only_the_latest_answers_count_and_none_from_before_the_place_was_armed() -> None:
    generations = Generations()
    made = Trust(generations)
    made.most, made.disarms = 0.1, True
    for _ in range(REMEMBERED):
        made.compared(HERE, False)
    for _ in range(REMEMBERED):
        made.compared(HERE, True)
    assert made.told()["seen"] == [(HERE, 0, REMEMBERED, REMEMBERED)]
    generations.learn(arming(HERE, armed=False), 7)
    made.compared(HERE, False)
    assert made.told() == {"seen": [(HERE, 7, 1, 0)], "disarmed": [HERE]}


def test_callers_cannot_fill_it_with_namespaces() -> None:
    made = trust()
    for number in range(3_000):
        made.compared(place_of("t", f"n{number}", "m"), True)
    assert len(made._seen) == 1_000
    assert parts_of(made.told()["seen"][0][0]) == ("t", "n2999", "m")


def test_of_arming_and_disarming_the_later_counts_in_whatever_order_they_are_heard() -> None:
    off, on = arming(HERE, armed=False), arming(HERE, armed=True)
    for heard in ([(off, 5), (on, 6)], [(on, 6), (off, 5)]):
        known = Generations()
        for scope, generation in heard:
            known.learn(scope, generation)
        assert known.disarmed == set()
        assert known.knows(off, 5)
        assert not known.knows(on, 7)
        known.purge(off, 0.0)  # by whom no store numbers
        assert known.disarmed == {HERE}
        assert known.alive({"all": 0}, born=1.0)  # nothing was purged


# What callers see


async def test_three_unlucky_answers_disarm_nothing() -> None:
    async with StubUpstream() as u, gateway(u, cache={"holdout": 1.0}) as running:
        for _ in range(4):
            await ask(running)  # the stub's answers have numbers: each differs
        await judge(running.app.runtime, set())
        found = await line(running)
        assert (found["model"], found["state"], found["judged"], found["agreed"]) == ("m1", "armed", 3, 0)
        assert not running.app.runtime.generations.disarmed


async def test_a_place_that_surely_disagrees_is_disarmed_and_armed_again_once_it_agrees() -> None:
    async with StubUpstream() as u, gateway(u, cache={"holdout": 1.0}) as running:
        runtime = running.app.runtime
        for _ in range(FEWEST + 1):
            await ask(running)
        assert await judge(runtime, set()) == {HERE}
        assert runtime.generations.disarmed == {HERE}
        text, status = await ask(running)
        assert status == "warmgate; fwd=miss; stored; detail=disarmed"
        newer, _ = await ask(running)
        assert newer != text  # computed anew
        other = {**BODY, "model": "m2"}
        await ask(running, other)
        runtime.holdout._left = 1_000
        assert "hit" in (await ask(running, other))[1]  # another place
        u.always(answer("the same"))
        for _ in range(RESTORED - 2):  # two have differed
            await judge(runtime, set())
            assert HERE in runtime.generations.disarmed
            assert "disarmed" in (await ask(running))[1]
        await judge(runtime, set())
        assert not runtime.generations.disarmed
        assert "hit" in (await ask(running))[1]
        found = (await running.client.get("/admin/ledger?by=outcome")).json()["groups"]
        assert sum(group["held_out"] for group in found) == FEWEST  # what was disarmed measures no savings


@pytest.mark.parametrize("short_path", [True, False])
async def test_nothing_kept_answers_where_it_is_disarmed(short_path: bool, tmp_path: Path) -> None:
    faq = tmp_path / "faq.yaml"
    faq.write_text('- ask: ["curated"]\n  answer: "by hand"\n')
    cache = {**DISARMS, "stale_if_error": "1d", "disk": {"path": str(tmp_path / "cache")}}
    config = {"upstreams": [], "cache": cache, "faq": {"path": str(faq)}}
    async with StubUpstream() as u:
        config["upstreams"] = [upstream(u.url, models=["m1"])]
        async with running_gateway(config, short_path=short_path) as running:
            runtime = running.app.runtime
            for _ in range(3):
                await ask(running)
            await runtime.arm(HERE, armed=False)
            texts = {(await ask(running))[0] for _ in range(3)}
            assert len(texts) == 3
            assert u.n == 4
            streamed = await running.chat({**BODY, "stream": True})
            assert streamed.headers["cache-status"] == "warmgate; fwd=miss; detail=disarmed"
            refused = await running.chat(BODY, cache_control="only-if-cached")
            assert refused.status_code == 504
            assert refused.headers["cache-status"] == "warmgate; fwd=miss; detail=disarmed"
            u.reply(error(500))
            assert (await running.chat(BODY)).status_code == 500  # no kept answer stands in
            gate = asyncio.Event()
            u.reply(answer("one").held(gate))
            asking = asyncio.gather(ask(running), ask(running))
            await running.joined(2)
            gate.set()
            both = await asking
            assert [text for text, _ in both] == ["one", "one"]  # a call under way may be shared
            curated = {**BODY, "messages": [{"role": "user", "content": "curated"}]}
            assert (await ask(running, curated))[0] == "by hand"
            explained = (await running.client.post("/admin/explain", json=BODY)).json()
            assert explained["would"] == "miss"
            assert "disarmed" in explained["reason"]
            reasons = {row["reason"] for row in (await running.client.get("/admin/ledger/rows")).json()["rows"]}
            assert "disarmed" in reasons
            ladder = (await running.client.get("/admin/ladder")).json()
            assert {one["to"]: one["requests"] for one in ladder["lost"] if one["requests"]} == {"disarmed": 5}
            assert ladder["unexplained"] == 0  # only-if-cached declined


async def test_embeddings_too_are_computed_anew() -> None:
    async with StubUpstream() as u, gateway(u) as running:
        body = {"model": "m1", "input": ["a", "b"]}
        for _ in range(2):
            assert (await running.client.post("/v1/embeddings", json=body)).status_code == 200
            await running.app.runtime.keeper.drain()
        calls = u.n
        await running.app.runtime.arm(HERE, armed=False)
        again = await running.client.post("/v1/embeddings", json=body)
        assert "hit" not in again.headers["cache-status"]
        assert u.n == calls + 1


async def test_what_was_disarmed_answers_again_once_disarming_is_turned_off() -> None:
    async with StubUpstream() as u, gateway(u) as running:
        runtime = running.app.runtime
        await ask(running)
        await runtime.arm(HERE, armed=False)
        assert "disarmed" in (await ask(running))[1]
        cache = runtime.config.cache.model_copy(update={"disarm": False})
        runtime.apply(runtime.config.model_copy(update={"cache": cache}))
        assert "hit" in (await ask(running))[1]
        assert (await running.client.get("/admin/agreement")).json()[0]["state"] == "armed"


# Over workers and replicas


async def test_replicas_hear_of_it_and_so_do_those_that_start_later(redis_cache: dict[str, Any]) -> None:
    cache = {**DISARMS, "redis": redis_cache}
    async with StubUpstream() as u, gateway(u, cache=cache) as one, gateway(u, cache=cache) as other:
        await ask(one)
        assert "hit" in (await ask(other))[1]
        await one.app.runtime.arm(HERE, armed=False)
        await until(lambda: other.app.runtime.generations.disarmed, "the other is disarmed")
        first, status = await ask(other)
        assert "disarmed" in status
        assert (await ask(one))[0] != first  # also not what the other has just stored
        async with gateway(u, cache=cache) as late:
            assert "disarmed" in (await ask(late))[1]
            told = await late.client.post("/admin/arm", json={"model": "m1"})
            assert told.json() == {"armed": HERE, "was_disarmed": True, "everywhere": True}
        await until(lambda: not one.app.runtime.generations.disarmed, "the first is armed again")
        assert "hit" in (await ask(one))[1]


async def test_what_workers_of_one_machine_have_seen_is_judged_together(tmp_path: Path) -> None:
    shared = {"ledger": {"path": str(tmp_path / "ledger.db")}, "cache": {"disk": {"path": str(tmp_path / "cache")}}}
    async with StubUpstream() as u, gateway(u, **shared) as one, gateway(u, **shared) as other:
        for running in (one, other):
            for _ in range(FEWEST // 2):
                running.app.runtime.trust.compared(HERE, False)
            await judge(running.app.runtime, set())
            await running.app.runtime.ledger.flush()
        assert one.app.runtime.generations.disarmed == set()  # ten alone are too few
        await judge(one.app.runtime, set())
        await until(lambda: other.app.runtime.generations.disarmed, "the other is disarmed")


# Where it is seen


async def test_it_is_seen_in_metrics_on_the_dashboard_and_by_the_doctor() -> None:
    async with StubUpstream() as u, gateway(u, sentinels={"every": "1h"}) as running:
        runtime = running.app.runtime
        sentinels = Sentinels(runtime)

        async def light() -> dict[str, Any]:
            await sentinels.round()
            lights = (await running.client.get("/admin/sentinels")).json()["lights"]
            return next(one for one in lights if one["name"] == "agreement")

        assert (await light())["state"] == "grey"
        runtime.trust.compared(HERE, True)
        assert (await light())["state"] == "green"
        for _ in range(40):
            runtime.trust.compared(HERE, False)
        assert (await light())["state"] == "red"
        await judge(runtime, set())
        red = await light()
        assert "model m1 of default (disarmed: 0 of 0 agree)" in red["cause"]
        assert "/admin/agreement" in red["setting"]
        seen = (await running.client.get("/dashboard/api/overview")).json()
        assert [(one["model"], one["state"]) for one in seen["agreement"]] == [("m1", "disarmed")]
        metrics = (await running.client.get("/metrics")).text
        worker = runtime.ledger.worker
        assert f'warmgate_disarmed{{model="m1",namespace="",tenant="default",worker="{worker}"}} 1.0' in metrics


async def test_a_tenant_sees_its_own_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K1", "key-1")
    tenants = [{"name": "t1", "keys": ["env:K1"]}]
    async with StubUpstream() as u, gateway(u, tenants=tenants) as running:
        for tenant in ("t1", "t2"):
            running.app.runtime.trust.compared(place_of(tenant, "n", "m1"), True)
        seen = await running.client.get("/dashboard/api/overview", headers={"authorization": "Bearer key-1"})
        assert [one["tenant"] for one in seen.json()["agreement"]] == ["t1"]


@pytest.mark.parametrize("order", ["[]", "{", "{}", '{"model": 1}', '{"model": "m1", "tag": "x"}'])
async def test_an_order_that_names_no_place_is_refused(order: str) -> None:
    async with running_gateway({"upstreams": [], "engine": "off"}) as running:
        refused = await running.client.post("/admin/arm", content=order)
        assert refused.status_code == 400
        assert "Name what to arm" in refused.json()["detail"]
