"""Where lights are seen: in `/metrics`, as JSON, and by `warmgate doctor`; of several workers, all of them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.sentinels import Board, Light
from gateway.sentinels.doctor import prescription
from gateway.sentinels.lights import MEANS
from gateway.sentinels.report import report
from gateway.sentinels.rounds import Sentinels
from loadtest.stub_upstream import StubUpstream
from tests.gateway.sentinels.conftest import Watched, watched
from tests.harness import upstream

CUT_OFF = Light("events", "red", "none arrive", "upstreams[].kv_events", upstream="e")
SPENT = Counter(requests=4, prompt=760, cached=256, output=4)


def board(*lights: Light, at: float = 1000.0) -> dict[str, Any]:
    """The vitals of a worker whose last round has found this."""
    made = Board()
    made.be_due_every(60.0)
    made.show(lights, SPENT, at)
    return {"sentinels": made.told()}


async def doctor(gateway: Watched, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `warmgate doctor`."""

    def run() -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    monkeypatch.setattr(sys, "argv", ["warmgate", "doctor", "--url", gateway.running.url, *words])
    return await asyncio.to_thread(run)


async def test_red_is_seen_everywhere(
    u: StubUpstream, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = upstream("http://127.0.0.1:9", "gone", models=["m1"], sentinel="on")
    async with watched(upstreams=[gone]) as gateway:
        assert await doctor(gateway, monkeypatch=monkeypatch) == 0
        assert "first round" in capsys.readouterr().out
        for _ in range(3):
            await gateway.round()
        told = (await gateway.running.client.get("/admin/sentinels")).json()
        assert told["state"] == "red"
        worst = told["lights"][0]
        assert (worst["name"], worst["upstream"], worst["setting"]) == ("prefix", "gone", "upstreams[].url")
        assert "does not answer" in worst["cause"]
        text = (await gateway.running.client.get("/metrics")).text
        worker = gateway.runtime.ledger.worker
        assert f'warmgate_sentinel_ok{{light="prefix",tier="",upstream="gone",worker="{worker}"}} 0.0' in text
        assert f'warmgate_sentinel_ok{{light="memory",tier="",upstream="",worker="{worker}"}} 1.0' in text
        assert 'light="salt"' not in text  # grey: nothing is known
        assert await doctor(gateway, monkeypatch=monkeypatch) == 1
        out = capsys.readouterr().out
        assert "red    prefix gone" in out
        assert "look at: upstreams[].url" in out
        assert await doctor(gateway, "--json", monkeypatch=monkeypatch) == 1
        assert json.loads(capsys.readouterr().out)["lights"][0] == worst


async def test_without_sentinels_the_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with watched(sentinels="off", engine="off") as gateway:
        await gateway.running.app.sentinels.round()
        assert await doctor(gateway, monkeypatch=monkeypatch) == 0
        assert "The sentinels are off" in capsys.readouterr().out
        assert (await gateway.running.client.get("/admin/sentinels")).json()["lights"] == []


async def test_rounds_are_made_by_the_clock(u: StubUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.sentinels.rounds.FIRST", 5.0)
    monkeypatch.setattr("gateway.sentinels.rounds.TICK", 0.01)
    rounds = 0

    async def count(_: Sentinels) -> None:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(Sentinels, "round", count)
    async with watched(upstreams=[upstream(u.url)], sentinels={"every": "60s"}) as gateway:
        for seconds, made in ((4, 0), (2, 1), (30, 1), (31, 2), (600, 3), (1, 3)):
            gateway.clock.advance(seconds)
            await asyncio.sleep(0.1)
            assert rounds == made


async def test_of_several_workers_one_asks_the_upstreams_until_it_is_gone(u: StubUpstream) -> None:
    several = {"upstreams": [upstream(u.url, sentinel="on")], "listen": {"workers": 2, "port": 1}}
    async with watched(**several) as two:
        async with watched(**several) as one:
            assert "prefix u" in await one.round()
            assert "prefix u" not in await two.round()
            assert u.n == 2
        assert "prefix u" in await two.round()


def test_what_is_red_for_one_worker_is_red() -> None:
    good, bad = board(Light("memory", "green"), Light("salt", "grey", "none")), board(Light("memory", "red", "why"))
    told = report({"a": good, "b": bad, "c": good}, now=1010.0)
    assert told["state"] == "red"
    first, second = told["lights"]
    assert (first["name"], first["state"], first["workers"]) == ("memory", "red", ["b"])
    assert (second["name"], second["state"], second["workers"]) == ("salt", "grey", ["a", "c"])
    assert told["cost"]["per_hour"] == {"requests": 720, "prompt": 136_800, "cached": 46_080, "output": 720}


def test_a_worker_that_makes_no_rounds_is_red_itself() -> None:
    workers = {"a": board(Light("memory", "green"), at=1000.0), "b": board(Light("memory", "green"), at=1170.0)}
    assert report(workers, now=1179.0)["state"] == "green"
    told = report(workers, now=1181.0)
    assert [(light["name"], light["state"]) for light in told["lights"]] == [("rounds", "red"), ("memory", "green")]


def test_a_light_remembers_since_when_it_is_as_it_is() -> None:
    made = Board()
    made.be_due_every(60.0)
    assert made.show([CUT_OFF], SPENT, 1000.0) == [CUT_OFF]
    assert made.show([CUT_OFF], SPENT, 1060.0) == []
    assert made.told()["lights"][0]["since"] == 1000.0
    assert made.told()["spent"]["prompt"] == 1520
    assert len(made.show([Light("events", "green", upstream="e")], SPENT, 1120.0)) == 1
    assert made.told()["lights"][0]["since"] == 1120.0


def test_what_an_upstream_says_cannot_move_the_cursor() -> None:
    told = report({"a": board(Light("prefix", "red", "\x1b[2J\nboo", "", "u\x1b[1m"))}, now=1010.0)
    assert "\x1b" not in prescription(told, 1010.0)
    assert "\nboo" not in prescription(told, 1010.0)


def test_every_light_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "sentinels.md").read_text()
    assert [name for name in MEANS if f"`{name}`" not in text] == []
