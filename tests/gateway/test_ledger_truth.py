"""Scripted traffic of which everything is known beforehand: every number the gateway tells of it must be that number.

Time stands still but where the script moves it, so even latencies are exact.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.stub_upstream import StubUpstream, answer, error
from tests.harness import FakeClock, Running, running_gateway, upstream

PRICES = "models:\n  m1: {input: 1, cached_input: 0.25, output: 4}\n"
FAQ = '- ask: ["What is Warmgate?"]\n  answer: "A gateway."\n'
TOLD = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
"""What a call uses: 100 prompt tokens, 40 of them in the provider's cache, 10 of output."""
COST = (60 * 1 + 40 * 0.25 + 10 * 4) / 1e6
"""Dollars that such a call costs."""


class Script:
    """The traffic, and what is true of it."""

    def __init__(self, folder: Path, u: StubUpstream) -> None:
        self.u = u
        self.clock = FakeClock()
        self.clock._time = 1_796_040_000.0
        (folder / "prices.yaml").write_text(PRICES)
        (folder / "faq.yaml").write_text(FAQ)
        self.config: dict[str, Any] = {
            "upstreams": [upstream(u.url, models=["m1", "unpriced"])],
            "ledger": {"path": str(folder / "ledger.db")},
            "prices": str(folder / "prices.yaml"),
            "faq": {"path": str(folder / "faq.yaml")},
            "cache": {"ttl": "1h", "stale_while_revalidate": "1d"},
            "models": {"m1": {"faq": True, "slo": {"ttft": "1s"}}},
        }

    async def ask(self, gateway: Running, question: str, **more: Any) -> int:
        body = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": question}], **more}
        response = await gateway.chat(body)
        await gateway.app.runtime.keeper.drain()
        return response.status_code

    async def first(self, gateway: Running) -> None:
        """Before the restart."""
        u, clock = self.u, self.clock
        u.always(answer(usage=TOLD))
        for stream in (False, False, True):  # a miss and two hits, one of them streamed
            await self.ask(gateway, "q1", stream=stream)
        await self.ask(gateway, "q2", stream=True)  # a miss
        await self.ask(gateway, "q2")  # a hit
        u.reply(answer(usage=TOLD).delayed(0.1))
        await asyncio.gather(*(self.ask(gateway, "q3") for _ in range(3)))  # a miss and two that share its call
        assert u.n == 3
        await self.ask(gateway, "What is Warmgate?")  # curated
        await self.ask(gateway, "q4", temperature=1)  # not cacheable
        u.reply(answer(usage={"prompt_tokens": 7, "completion_tokens": 1}))
        await self.ask(gateway, "q5")  # a miss; cached or not, nobody said
        u.reply(answer(usage={"prompt_tokens": -3, "completion_tokens": 10**15}))
        await self.ask(gateway, "q6")  # a miss with an absurd report
        await self.ask(gateway, "q7", model="unpriced")  # a miss
        await self.ask(gateway, "q7", model="unpriced")  # a hit
        u.reply(error(500))
        assert await self.ask(gateway, "q8") == 500
        assert await self.ask(gateway, "q9", model="nobody's") == 404
        assert (await gateway.client.post("/v1/chat/completions", content=b"{")).status_code == 400
        u.reply(answer(usage=TOLD).cut(after=2, then="reset"))
        await self.ask(gateway, "q10", stream=True)  # breaks in mid-stream
        await self.leave(gateway, "q11")
        clock.advance(60)  # the next minute
        await self.ask(gateway, "q1")
        clock.advance(2 * 3600)
        await self.ask(gateway, "q1")  # stale, and renewed behind the caller's back
        async with asyncio.timeout(5):
            while u.n < 11 or gateway.app.runtime.flights:
                await asyncio.sleep(0.01)
        await gateway.app.runtime.keeper.drain()

    async def leave(self, gateway: Running, question: str) -> None:
        """A caller that leaves while its answer is coming."""
        self.u.reply(answer(deltas=["a", "b", "c"], usage=TOLD).pause(before=2, seconds=30))
        body = {"model": "m1", "temperature": 0, "stream": True, "messages": [{"role": "user", "content": question}]}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break
        async with asyncio.timeout(5):
            while gateway.app.runtime.flights:
                await asyncio.sleep(0.01)

    async def second(self, gateway: Running) -> None:
        """After it, with the clock set back by three hours."""
        self.clock._time -= 3 * 3600
        await self.ask(gateway, "q1")  # nothing was kept but in memory: a miss
        await self.ask(gateway, "q1")  # a hit
        self.u.reply(answer(usage=TOLD).delayed(0.2))
        slow = asyncio.create_task(self.ask(gateway, "q12"))  # a miss that takes 2 s
        await asyncio.sleep(0.1)
        self.clock._monotonic += 2
        await slow


REQUESTS = {"exact": 6, "stale": 1, "faq": 1, "coalesced": 2, "miss": 8, "bypass": 1, "error": 5}
HITS = 6 + 1 + 2
"""Saved answers with a usage report; that of the model without a price among them."""
CALLS = {"miss": 11, "bypass": 1, "stale": 1}
"""Also those that failed, broke off, or were left."""
TOLD_CALLS = 3 + 1 + 1 + 1 + 2
"""Calls that reported `TOLD`: q1 q2 q3, q4, the unpriced q7, the refresh, q1 and q12 after the restart."""


@pytest.fixture
async def after(tmp_path: Path) -> AsyncIterator[tuple[Running, Script]]:
    """A gateway that has seen the whole script, a restart of the process in its middle."""
    async with StubUpstream(models=("m1",)) as u:
        script = Script(tmp_path, u)
        async with running_gateway(script.config, script.clock) as gateway:
            await script.first(gateway)
        async with running_gateway(script.config, script.clock) as gateway:
            await script.second(gateway)
            assert u.n == sum(CALLS.values())
            yield gateway, script


async def groups(gateway: Running, question: str = "") -> list[dict[str, Any]]:
    response = await gateway.client.get(f"/admin/ledger{question}")
    assert response.status_code == 200, response.text
    return response.json()["groups"]


async def test_every_number_of_the_ledger_is_the_truth(after: tuple[Running, Script]) -> None:
    gateway, _ = after
    lines = {line["outcome"]: line for line in await groups(gateway)}
    assert {outcome: line["requests"] for outcome, line in lines.items()} == REQUESTS
    assert {outcome: line["calls"] for outcome, line in lines.items() if line["calls"]} == CALLS
    (all_,) = await groups(gateway, "?by=endpoint")
    assert all_["requests"] == sum(REQUESTS.values())
    assert all_["hits"] == 10

    served_misses = TOLD_CALLS - 1 - 1  # not the refresh; the bypass is no miss
    assert lines["miss"]["served_tokens"] == 110 * served_misses + 8
    assert lines["miss"]["unknown_served"] == 1  # the absurd one
    assert all_["saved_tokens"] == 110 * HITS
    assert all_["served_tokens"] == 110 * (HITS + served_misses + 1) + 8
    assert all_["unknown_served"] == 2  # the curated one as well

    assert all_["provider_cached_tokens"] == 40 * TOLD_CALLS
    assert all_["computed_prompt_tokens"] == 60 * TOLD_CALLS
    assert all_["unsplit_prompt_tokens"] == 7
    assert all_["upstream_prompt_tokens"] == 100 * TOLD_CALLS + 7
    assert all_["upstream_output_tokens"] == 10 * TOLD_CALLS + 1
    assert all_["upstream_tokens"] == 110 * TOLD_CALLS + 8
    assert all_["unknown_usage"] == 3  # absurd, broken off, left; the refused one used nothing

    assert all_["cost_usd"] == pytest.approx(COST * (TOLD_CALLS - 1), rel=1e-12)
    assert all_["unknown_cost"] == 3 + 1 + 1  # those, the unsplit one, the one without a price
    assert all_["saved_usd"] == pytest.approx(COST * (HITS - 1), rel=1e-12)
    assert all_["unknown_saved"] == 2  # curated, and without a price
    assert lines["exact"]["cost_usd"] == 0
    assert lines["faq"]["saved_usd"] is None

    assert all_["latency_count"] == sum(REQUESTS.values())
    assert all_["latency_mean"] == pytest.approx(2 / sum(REQUESTS.values()))
    assert lines["miss"]["latency_p95"] > 1
    assert lines["exact"]["latency_p95"] < 0.001
    assert all_["slo_judged"] == sum(REQUESTS.values()) - 2 - 3  # not the other model's, nor the callers' own errors
    assert all_["slo_met"] == all_["slo_judged"] - 3  # not the two upstream errors, nor the slow one


async def test_a_clock_that_is_set_back_and_a_restart_move_nothing_out_of_sight(
    after: tuple[Running, Script],
) -> None:
    gateway, _ = after
    noon = 1_796_040_000
    by_minute = Counter[int]()
    for line in await groups(gateway, "?step=1m&by=outcome"):
        by_minute[line["at"] - noon] += line["requests"]
    assert by_minute == {0: 19, 60: 1, 7260: 1, -3540 // 60 * 60: 3}
    hour = (await groups(gateway, f"?from={noon}&to={noon + 3600}&by=endpoint"))[0]
    assert hour["requests"] == 20


async def test_metrics_say_the_same(after: tuple[Running, Script]) -> None:
    gateway, _ = after
    response = await gateway.client.get("/metrics")
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            sums[sample.name, ""] += sample.value
            if kind := sample.labels.get("kind") or sample.labels.get("outcome"):
                sums[sample.name, kind] += sample.value
    (all_,) = await groups(gateway, "?by=endpoint")
    assert {o: sums["warmgate_requests_total", o] for o in REQUESTS} == REQUESTS
    for name, kind, field in (
        ("warmgate_served_tokens_total", "", "served_tokens"),
        ("warmgate_served_unknown_total", "", "unknown_served"),
        ("warmgate_upstream_calls_total", "", "calls"),
        ("warmgate_upstream_tokens_total", "cached", "provider_cached_tokens"),
        ("warmgate_upstream_tokens_total", "computed", "computed_prompt_tokens"),
        ("warmgate_upstream_tokens_total", "unsplit", "unsplit_prompt_tokens"),
        ("warmgate_upstream_tokens_total", "output", "upstream_output_tokens"),
        ("warmgate_upstream_unknown_usage_total", "", "unknown_usage"),
        ("warmgate_cost_unknown_total", "", "unknown_cost"),
        ("warmgate_saved_unknown_total", "", "unknown_saved"),
        ("warmgate_slo_judged_total", "", "slo_judged"),
        ("warmgate_slo_met_total", "", "slo_met"),
        ("warmgate_request_seconds_count", "", "requests"),
    ):
        assert sums[name, kind] == all_[field], name
    assert sums["warmgate_cost_usd_total", ""] == pytest.approx(all_["cost_usd"], rel=1e-12)
    assert sums["warmgate_saved_usd_total", ""] == pytest.approx(all_["saved_usd"], rel=1e-12)
    assert sums["warmgate_request_seconds_sum", ""] == 2
    assert sums["warmgate_ledger_ok", ""] == 1


async def test_rows_and_csv_say_the_same(after: tuple[Running, Script]) -> None:
    gateway, _ = after
    rows = (await gateway.client.get("/admin/ledger/rows?limit=1000")).json()["rows"]
    assert Counter(row["outcome"] for row in rows) == REQUESTS
    reasons = Counter(row["reason"].partition(":")[0] for row in rows if row["outcome"] == "error")
    assert reasons["caller left"] == 1
    assert reasons["model_not_found"] == 1
    assert reasons["status 500"] == 1
    text = (await gateway.client.get("/admin/ledger?by=outcome&format=csv")).text
    table = {line["outcome"]: line for line in csv.DictReader(io.StringIO(text))}
    assert {outcome: int(line["requests"]) for outcome, line in table.items()} == REQUESTS
    assert table["faq"]["saved_usd"] == ""


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("?by=colour", "'by' must name some of"),
        ("?by=model,model", "each once"),
        ("?from=yesterday", "'from' must be"),
        ("?step=30s", "whole minutes"),
        ("?step=soon", "whole minutes"),
        ("?format=xml", "json or csv"),
        ("?frm=1", "Unknown parameter 'frm'"),
        ("?stream=maybe", "'stream' must be"),
        ("/rows?limit=0", "'limit' must be"),
        ("/rows?limit=x", "'limit' must be"),
    ],
)
async def test_a_question_that_makes_no_sense_gets_one_sentence(question: str, sentence: str) -> None:
    async with running_gateway({"upstreams": [], "engine": "off"}) as gateway:
        response = await gateway.client.get(f"/admin/ledger{question}")
        assert response.status_code == 400
        assert sentence in response.json()["detail"]


@pytest.mark.parametrize("question", ["?from=-1h&to=2100-01-01", "?from=2020-01-01T00:00:00Z&model=m1&stream=true"])
async def test_questions_about_nothing_have_empty_answers(question: str) -> None:
    async with running_gateway({"upstreams": [], "engine": "off"}) as gateway:
        assert await groups(gateway, question) == []
        assert (await gateway.client.get(f"/admin/ledger{question}&format=csv")).text == ""
