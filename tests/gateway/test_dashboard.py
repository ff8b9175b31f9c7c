"""The dashboard's numbers: true, of one moment, and each only to whom it belongs."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.dashboard import live, overview, routes
from gateway.ledger import Row
from gateway.ledger import counters as c
from gateway.ledger.book import Pages
from gateway.ledger.store import ROWS_KEPT
from loadtest.stub_upstream import StubUpstream
from tests.gateway.known_traffic import COST, HITS, REQUESTS, TOLD_CALLS, after_known_traffic
from tests.harness import FakeClock, Running, running_gateway, upstream

NOTHING: dict[str, Any] = {"upstreams": [], "engine": "off"}


def keyed(monkeypatch: pytest.MonkeyPatch, admin: bool = True) -> dict[str, Any]:
    """A configuration with two tenants (keys key-1, key-2) and, with ``admin``, an admin key (key-0)."""
    for number in range(3):
        monkeypatch.setenv(f"KEY_{number}", f"key-{number}")
    tenants = [{"name": f"t{number}", "keys": [f"env:KEY_{number}"]} for number in (1, 2)]
    return {**NOTHING, "tenants": tenants, **({"admin": {"key": "env:KEY_0"}} if admin else {})}


def row(gateway: Running, **more: Any) -> Row:
    made = Row(at=gateway.app.runtime.clock.time(), tenant="default", model="m1", endpoint="/v1/chat/completions")
    made.outcome, made.status, made.usage = "exact", 200, {"prompt": 10, "output": 5, "cached": 0}
    for name, value in more.items():
        setattr(made, name, value)
    return made


async def get(gateway: Running, path: str = "overview", key: str | None = None, **headers: str) -> Any:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return await gateway.client.get(f"/dashboard/api/{path}", headers=headers)


async def test_the_page_needs_nothing_from_elsewhere_and_holds_no_numbers() -> None:
    async with running_gateway(NOTHING) as gateway:
        page = await gateway.client.get("/dashboard")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert not re.search(r"<script(?![^>]*src=)|\sstyle=|\son\w+=", page.text)  # nothing that the policy would stop
        assets = set(re.findall(r'"/dashboard/assets/([^"]+)"', page.text))
        scripts = {name for name in routes._FILES if name.endswith((".js", ".css"))}
        assert {"style.css", "main.js", "uPlot.iife.min.js", "uPlot.min.css"} <= assets
        for name in assets | scripts:
            asset = await gateway.client.get(f"/dashboard/assets/{name}")
            assert asset.status_code == 200
            assert asset.headers["content-type"].partition(";")[0] in ("text/css", "text/javascript", "image/svg+xml")
        for name in scripts | {"index.html"}:
            text = routes._FILES[name].read_text()
            hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"www.w3.org", "github.com"}
            assert not hosts, f"{name} names {hosts}"
        assert (await gateway.client.get("/dashboard/")).headers["location"] == "/dashboard"


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes.py", "README.md", "LICENSE.uPlot", "%2e%2e/overview.py"])
async def test_nothing_else_is_served(name: str) -> None:
    async with running_gateway(NOTHING) as gateway:
        assert (await gateway.client.get(f"/dashboard/assets/{name}")).status_code == 404


async def test_the_numbers_are_the_truth(tmp_path: Path) -> None:
    async with after_known_traffic(tmp_path) as gateway:
        clock = gateway.app.runtime.clock
        assert isinstance(clock, FakeClock)
        clock.advance(3 * 3600 + 60)  # to where it was before it was set back
        seen = (await get(gateway, "overview?range=6h")).json()
        total = seen["total"]
        assert {line["outcome"]: line["requests"] for line in seen["outcomes"] if line["requests"]} == REQUESTS
        assert total["requests"] == sum(REQUESTS.values())
        assert total["hit_rate"] == 10 / sum(REQUESTS.values())
        assert total["saved_tokens"] == 110 * HITS
        assert total["token_hit_rate"] == total["saved_tokens"] / total["served_tokens"]
        assert total["provider_cached_tokens"] == 40 * TOLD_CALLS
        assert total["cost_usd"] == pytest.approx(COST * (TOLD_CALLS - 1), rel=1e-12)
        assert total["saved_usd"] == pytest.approx(COST * (HITS - 1), rel=1e-12)
        series = seen["series"]
        assert {outcome: sum(values) for outcome, values in series["requests"].items()} == {
            "semantic": 0,
            **REQUESTS,
        }
        for name in ("saved_tokens", "served_tokens", "provider_cached_tokens", "upstream_output_tokens"):
            assert sum(value or 0 for value in series[name]) == total[name]
        assert sum(line["requests"] for line in seen["models"]) == total["requests"]
        assert seen["hits"]["requests"] == 10
        assert Counter(line["outcome"] for line in seen["recent"]) == REQUESTS
        reasons = {(line["outcome"], line["reason"]): line["count"] for line in seen["reasons"]}
        assert reasons["error", "caller left"] == 1
        assert sum(count for (outcome, _), count in reasons.items() if outcome == "error") == REQUESTS["error"]
        (served_by,) = seen["upstreams"]
        assert (served_by["name"], served_by["calls"], served_by["in_flight"]) == ("u", 13, 0)
        (level,) = seen["slo"]
        assert (level["model"], level["judged"], level["met"]) == ("m1", 19, 16)
        assert seen["workers"] == 1
        assert seen["tiers"]["memory"]["entries"] == 2
        assert seen["ledger"] == {"problem": "", "shared": True}


async def test_filters_narrow_everything() -> None:
    async with running_gateway(NOTHING) as gateway:
        for tenant, model, times in (("a", "m1", 3), ("a", "m2", 2), ("b", "m1", 1)):
            for _ in range(times):
                gateway.app.runtime.ledger.record(row(gateway, tenant=tenant, model=model))
        cases = {"": 6, "&tenant=a": 5, "&model=m1": 4, "&tenant=a&model=m2": 2, "&model=x": 0}
        for query, requests in cases.items():
            seen = (await get(gateway, f"overview?range=15m{query}")).json()
            assert seen["total"]["requests"] == requests
            assert len(seen["recent"]) == requests
            assert sum(seen["series"]["requests"]["exact"]) == requests
            assert seen["choices"] == {"tenants": ["a", "b"], "models": ["m1", "m2"]}
        assert (await get(gateway, "overview?range=2y")).status_code == 400


async def test_steps_without_traffic_are_there_and_say_what_can_be_said() -> None:
    clock = FakeClock()
    async with running_gateway(NOTHING, clock) as gateway:
        gateway.app.runtime.ledger.record(row(gateway, latency=0.5))
        for name, (length, step, _) in overview.RANGES.items():
            seen = (await get(gateway, f"overview?range={name}")).json()
            at = seen["series"]["at"]
            assert len(at) == length // step
            assert at[0] == seen["range"]["since"]
            assert at[-1] <= clock.time() < at[-1] + step
            assert sum(seen["series"]["requests"]["exact"]) == 1
            assert [rate for rate in seen["series"]["hit_rate"] if rate is not None] == [1.0]
            assert seen["series"]["times"]["latency_upstream_p50"] == [None] * len(at)


@pytest.mark.parametrize("stored", [False, True])
async def test_prompts_are_kept_only_when_the_operator_says_so(tmp_path: Path, stored: bool) -> None:
    ledger = {"path": str(tmp_path / "ledger.db"), "store_prompts": stored}
    async with (
        StubUpstream() as u,
        running_gateway({"upstreams": [upstream(u.url, models=["m1"])], "ledger": ledger}) as gateway,
    ):
        for question in ("often", "often", "often", "once"):
            content = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
            await gateway.chat({"model": "m1", "temperature": 0, "messages": content})
            await gateway.app.runtime.keeper.drain()
        seen = (await get(gateway)).json()
        assert [line["prompt"] for line in seen["questions"]] == (["often", "once"] if stored else [])
        assert seen["recent"][0]["prompt"] == ("once" if stored else "")
        if stored:
            assert seen["questions"][0]["count"] == 3
        else:
            assert all(b"often" not in file.read_bytes() for file in _files(tmp_path))


async def test_an_empty_ledger_is_an_answer_too() -> None:
    async with running_gateway(NOTHING) as gateway:
        seen = (await get(gateway)).json()
        assert seen["total"]["requests"] == 0
        assert seen["total"]["hit_rate"] is None
        assert seen["choices"] == {"tenants": [], "models": []}


async def test_on_this_machine_the_operator_needs_no_key_but_a_foreign_page_gets_nothing() -> None:
    async with running_gateway(NOTHING) as gateway:
        port = gateway.url.rpartition(":")[2]
        assert (await get(gateway)).status_code == 200
        assert (await get(gateway, host=f"localhost:{port}")).status_code == 200
        assert (await get(gateway, host="evil.example")).status_code == 403  # its name was made to point here
        assert (await get(gateway, origin="https://evil.example")).status_code == 403
        assert (await get(gateway, **{"sec-fetch-site": "cross-site"})).status_code == 403
        for path in ("/admin/status", "/admin/ledger"):
            answer = await gateway.client.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 403


async def test_with_an_admin_key_nobody_is_the_operator_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gateway(keyed(monkeypatch)) as gateway:
        for path in ("overview", "live", "ledger", "rows"):
            assert (await get(gateway, path)).status_code == 401
            assert (await get(gateway, path, key="wrong")).status_code == 401
        assert (await get(gateway, key="key-0")).json()["viewer"] == {"tenant": None}
        assert (await gateway.client.get("/dashboard")).status_code == 200


@pytest.mark.parametrize("admin", [True, False])
async def test_a_tenant_sees_its_own_and_nothing_else(monkeypatch: pytest.MonkeyPatch, admin: bool) -> None:
    async with running_gateway(keyed(monkeypatch, admin)) as gateway:
        ledger = gateway.app.runtime.ledger
        for tenant, model, times in (("t1", "mine", 3), ("t2", "secret", 5)):
            for _ in range(times):
                ledger.record(row(gateway, tenant=tenant, model=model, reason="why " + model))
        for query in ("", "?tenant=t2", "?tenant="):
            answer = await get(gateway, f"overview{query}", key="key-1")
            seen = answer.json()
            assert seen["viewer"] == {"tenant": "t1"}
            assert seen["total"]["requests"] == 3
            assert "t2" not in answer.text
            assert "secret" not in answer.text
            assert not {"tiers", "upstreams", "tenants", "workers"} & seen.keys()
            assert answer.headers["cache-control"] == "no-store"
        assert len((await get(gateway, "rows", key="key-1")).json()["rows"]) == 3
        assert (await get(gateway, "ledger?by=tenant", key="key-1")).json()["groups"][0]["tenant"] == "t1"
        for path in ("ledger?tenant=t2", "rows?tenant=t2"):
            assert (await get(gateway, path, key="key-1")).status_code == 403
        assert (await gateway.client.get("/admin/ledger", headers={"authorization": "Bearer key-1"})).status_code in (
            (401,) if admin else (200,)  # without an admin key, whoever is on this machine is the operator
        )


async def test_the_stream_tells_at_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(overview.RANGES, "15m", (900, 60, 0.05))
    monkeypatch.setattr(routes, "_FRESH", 0.0)
    async with running_gateway(NOTHING) as gateway:
        seen: list[int] = []
        async with gateway.client.stream("GET", "/dashboard/api/live?range=15m") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line:
                    seen.append(orjson.loads(line.removeprefix("data: "))["total"]["requests"])
                    gateway.app.runtime.ledger.record(row(gateway))
                if len(seen) == 3:
                    break
        assert seen == [0, 1, 2]


async def test_the_stream_ends_when_the_gateway_is_to_end() -> None:
    async with running_gateway(NOTHING) as gateway, gateway.client.stream("GET", "/dashboard/api/live") as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        gateway.app.runtime.closing.set()
        assert [line async for line in lines if line] == []


async def test_no_stream_lasts_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LONGEST", 0.0)
    async with running_gateway(NOTHING) as gateway:
        assert (await get(gateway, "live")).text == ""


async def test_viewers_of_the_same_share_one_look_at_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = routes.overview

    async def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await real(*args)

    monkeypatch.setattr(routes, "overview", counted)
    async with running_gateway(NOTHING) as gateway:
        await asyncio.gather(*(get(gateway) for _ in range(10)))
        assert looks == 1
        await get(gateway, "overview?range=15m")
        assert looks == 2


async def test_a_ledger_that_cannot_be_read_is_said_and_nothing_breaks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = {**NOTHING, "ledger": {"path": str(tmp_path / "file" / "ledger.db")}}
    async with running_gateway(config) as gateway:
        answer = await get(gateway)
        assert answer.status_code == 503
        assert "cannot be read" in answer.json()["detail"]
        metrics = (await gateway.client.get("/metrics")).text
        assert re.search(r"^warmgate_ledger_ok\{.*\} 0", metrics, re.MULTILINE)
        async with gateway.client.stream("GET", "/dashboard/api/live") as stream:
            assert (await anext(stream.aiter_lines())).startswith(": ")


@pytest.mark.slow
async def test_a_million_rows_are_read_in_under_a_second(tmp_path: Path) -> None:
    """A month, every minute of it with 23 groups; the counters are written as they are by SQL, for speed. Counted is
    this process's own time, so that a busy machine does not matter.
    """
    clock = FakeClock()
    config = {**NOTHING, "ledger": {"path": str(tmp_path / "ledger.db")}}
    async with running_gateway(config, clock) as gateway:
        store = gateway.app.runtime.ledger._store
        await asyncio.to_thread(_fill, store, int(clock.time()))
        for name in overview.RANGES:
            began = time.process_time()
            seen = (await get(gateway, f"overview?range={name}")).json()
            took = time.process_time() - began
            assert seen["total"]["requests"] > 0
            assert took < 1, f"{name} took {took:.2f} s"
        began = time.process_time()  # whose rows are hard to find among all that are kept
        seen = (await get(gateway, "overview?range=30d&tenant=rare")).json()
        assert len(seen["recent"]) == 1
        assert time.process_time() - began < 1


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()]


def _fill(store: Any, now: int) -> None:
    first = (now // 86_400 - 29) * 86_400
    groups = [
        (tenant, model, "/v1/chat/completions", "u", outcome, True)
        for tenant in ("a", "b")
        for model in ("m1", "m2", "m3")
        for outcome in ("exact", "miss", "error", "coalesced")
    ][:23]
    store.add(Pages({now // 60 * 60: {group: [1] * len(c.COLUMNS) for group in groups}}), "w", now, "{}")
    columns = ", ".join(["1"] * 6 + ["0"] * (len(c.COLUMNS) - 6))
    for span in (60, 900, 3600):
        store._writer.execute(
            f"WITH RECURSIVE n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {30 * 86_400 // span - 1}) "
            f"INSERT OR IGNORE INTO rollups SELECT {span}, {first} + n * {span}, g.id, {columns} FROM n JOIN groups g"
        )
    row = "t, 'm1', '/v1/chat/completions', 'u', 'miss', 1, 200, 0.1, 0.1, 9, 0, 9, 'reason', 'id', 'q', '', NULL"
    store._writer.execute(
        f"WITH RECURSIVE n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {ROWS_KEPT - 1}) INSERT INTO rows "
        f"SELECT NULL, {first} + n, {row} FROM (SELECT n, CASE n WHEN 0 THEN 'rare' ELSE 'a' END AS t FROM n)"
    )
    assert store._writer.execute("SELECT count(*) FROM rollups").fetchone()[0] > 1_000_000
