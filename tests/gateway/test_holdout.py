"""The hold-out: a share of hits really goes upstream, costs nobody an answer, and measures what hits save."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.holdout import HoldOut, agreement
from loadtest.stub_upstream import StubUpstream, answer, error
from tests.harness import FakeClock, Running, running_gateway, upstream

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}
BODY = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "q"}]}


@asynccontextmanager
async def gateway(u: StubUpstream, share: float = 1.0, **more: Any) -> AsyncIterator[Running]:
    config = {"upstreams": [upstream(u.url, models=["m1"])], "cache": {"holdout": share}, **more}
    async with running_gateway(config) as running:
        yield running


async def ask(running: Running, **more: Any) -> tuple[str, str]:
    """The answer's text and its Cache-Status."""
    response = await running.chat({**BODY, **more})
    await running.app.runtime.keeper.drain()
    assert response.status_code == 200, response.text
    text = response.text if more.get("stream") else response.json()["choices"][0]["message"]["content"]
    return text, response.headers["cache-status"]


async def totals(running: Running) -> dict[str, Any]:
    (line,) = (await running.client.get("/admin/ledger?by=endpoint")).json()["groups"]
    return line


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_about_the_share_is_picked_and_never_the_very_first(share: float) -> None:
    hold_out = HoldOut(share, random.Random(3))
    picks = [number for number in range(100_000) if hold_out.due()]
    assert len(picks) == pytest.approx(share * 100_000, rel=0.05)
    assert picks[0] >= 0.5 / share - 1
    assert len({later - sooner for sooner, later in pairwise(picks)}) > 1  # no fixed beat


def test_all_or_none_can_be_picked() -> None:
    assert all(HoldOut(1.0).due() for _ in range(100))
    none = HoldOut(0.0)
    assert not any(none.due() for _ in range(100))


@pytest.mark.parametrize(
    ("kept", "new", "verdict"),
    [
        ({"a": "x", "usage": 1}, {"usage": 2, "a": "x"}, "agrees"),
        ({"choices": [{"message": {"id": "1", "text": "x"}}]}, {"choices": [{"message": {"text": "x"}}]}, "agrees"),
        ({"a": "x", "refusal": None}, {"a": "x"}, "agrees"),
        ({"a": "x"}, {"a": "y"}, "differs"),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}, "differs"),
        ({"a": 1}, None, "unjudged"),
    ],
)
def test_agreement_is_about_what_is_said(kept: Any, new: Any, verdict: str) -> None:
    assert agreement(orjson.dumps(kept), orjson.dumps(new) if new is not None else None) == verdict


def test_what_is_not_json_agrees_only_byte_by_byte() -> None:
    assert agreement(b"x\ny", b"x\ny") == "agrees"
    assert agreement(b"x\ny", b"x\nz") == "unjudged"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_held_out_hit_goes_upstream_and_changes_nothing_that_is_kept(stream: bool) -> None:
    async with StubUpstream() as u, gateway(u) as running:
        u.always(answer("same", usage=USAGE))
        await ask(running)
        expires = [entry.expires for entry in _entries(running)]
        for _ in range(3):
            text, status = await ask(running, stream=stream)
            assert "same" in text or "sa" in text
            assert "fwd=request" in status
            assert "stored" not in status
        assert u.n == 4
        assert [entry.expires for entry in _entries(running)] == expires
        line = await totals(running)
        assert (line["hits"], line["held_out"], line["held_out_judged"], line["held_out_agreed"]) == (0, 3, 3, 3)
        rows = (await running.client.get("/admin/ledger/rows")).json()["rows"]
        assert [row["held_out"] for row in rows] == ["agrees"] * 3 + [""]
        assert rows[0]["reason"] == "held out"


async def test_answers_that_differ_are_noticed() -> None:
    async with StubUpstream() as u, gateway(u) as running:
        for _ in range(4):  # the stub's answers have numbers
            await ask(running)
        line = await totals(running)
        assert (line["held_out_judged"], line["held_out_agreed"]) == (3, 0)


async def test_sampled_answers_are_measured_and_not_judged() -> None:
    async with StubUpstream() as u, gateway(u, cache={"holdout": 1.0, "sampled": "always"}) as running:
        for _ in range(3):
            await ask(running, temperature=1)
        line = await totals(running)
        assert (line["held_out"], line["held_out_judged"]) == (2, 0)


@pytest.mark.parametrize("failure", [error(500), error(429), error(401), answer().cut(after=0, then="reset")])
async def test_the_kept_answer_serves_when_the_upstream_does_not(failure: Any) -> None:
    async with StubUpstream() as u, gateway(u) as running:
        first, _ = await ask(running)
        u.reply(failure)
        text, status = await ask(running)
        assert text == first
        assert "hit" in status
        line = await totals(running)
        assert (line["requests"], line["hits"], line["held_out"]) == (2, 1, 0)
        await u.stop()
        for _ in range(10):
            assert (await ask(running))[0] == first


async def test_an_upstream_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.PATIENCE", 0.1)
    async with StubUpstream() as u, gateway(u) as running:
        first, _ = await ask(running)
        u.reply(answer().delayed(30))
        assert (await ask(running))[0] == first
        await u.wait_calls(2)


def test_while_the_upstream_fails_hits_are_left_alone_more_and_more() -> None:
    hold_out = HoldOut(0.1, random.Random(1))
    distances = []
    for _ in range(10):
        hold_out.went(well=False)
        distances.append(hold_out.left)
    assert distances[0] < 40 < 100 < distances[5]
    assert max(distances) < 1000
    hold_out.went(well=True)
    while not hold_out.due():
        pass
    assert hold_out.left < 20


async def test_neither_curated_answers_nor_those_asked_for_from_the_cache_are_held_out(tmp_path: Path) -> None:
    faq = tmp_path / "faq.yaml"
    faq.write_text('- ask: ["q"]\n  answer: "curated"\n')
    async with StubUpstream() as u, gateway(u, faq={"path": str(faq)}) as running:
        for _ in range(3):
            assert (await ask(running))[0] == "curated"
        assert u.n == 0
    async with StubUpstream() as u, gateway(u) as running:
        await ask(running)
        response = await running.chat(BODY, cache_control="only-if-cached")
        assert response.status_code == 200
        assert u.n == 1


@pytest.mark.parametrize("short_path", [True, False])
async def test_both_paths_hold_out_alike(short_path: bool) -> None:
    config = {"cache": {"holdout": 0.1}}
    async with (
        StubUpstream() as u,
        running_gateway({"upstreams": [upstream(u.url, models=["m1"])], **config}, short_path=short_path) as running,
    ):
        for _ in range(201):
            await ask(running)
        line = await totals(running)
        assert line["hits"] + line["held_out"] == 200
        assert 10 <= line["held_out"] <= 30
        assert u.n == 1 + line["held_out"]


async def test_the_measured_savings_hold_the_truth_in_their_interval(tmp_path: Path) -> None:
    """Upstream answers take 1 s on average and a hit nothing; the script knows, the gateway finds out."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("models: {m1: {input: 1, output: 2}}")
    rng, clock = random.Random(5), FakeClock()
    config = {"prices": str(prices), "cache": {"holdout": 0.2, "memory": {"max_bytes": "64MiB"}}}
    async with (
        StubUpstream() as u,
        running_gateway({"upstreams": [upstream(u.url, models=["m1"])], **config}, clock) as running,
    ):
        runtime = running.app.runtime
        real = runtime.relay._send

        async def slow(*args: Any) -> Any:
            clock.advance(rng.gauss(1.0, 0.2))
            return await real(*args)

        runtime.relay._send = slow  # type: ignore[method-assign]
        u.always(answer("same", usage=USAGE))
        for _ in range(151):
            await ask(running)
        seen = (await running.client.get("/dashboard/api/overview?range=1h")).json()["savings"]
        assert seen["hits"] + seen["held_out"] == 150
        assert seen["held_out"] > 15
        per_hit = seen["per_hit"]
        assert per_hit["seconds"]["low"] <= 1.0 <= per_hit["seconds"]["high"]
        assert per_hit["seconds"]["high"] - per_hit["seconds"]["low"] < 0.4
        assert per_hit["tokens"] == {"value": 110, "low": 110, "high": 110}
        assert per_hit["usd"]["value"] == pytest.approx(120e-6)
        assert seen["in_all"]["tokens"]["value"] == 110 * seen["hits"]
        assert seen["agreement"]["value"] == 1.0
        assert seen["agreement"]["low"] < 1.0


def _entries(running: Running) -> list[Any]:
    memory = running.app.runtime.memory
    assert memory is not None
    return [entry for entry, _ in memory._items.values()]


def test_the_short_path_leaves_exactly_the_held_out_hit_to_the_full_path() -> None:
    """However many hits come before the full path gets to run."""
    hold_out = HoldOut(0.1, random.Random(1))
    left_over = sum(not hold_out.passes() for _ in range(10_000))
    assert 900 < left_over < 1100
    assert sum(hold_out.due() for _ in range(left_over)) == left_over
