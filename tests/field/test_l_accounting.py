"""Field cases, section L: every answer has an identity of its own, every request one row, every token its place."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import orjson
import pytest

from gateway.ledger import OUTCOMES
from loadtest.stub_upstream import answer, error, json_body
from tests.field.conftest import CHAT, B, Bench, World, both_paths, each_store, hashed, one_world
from tests.field.reading import ASKS
from tests.raw import RawConnection, post

EVERY_API = {
    **ASKS,
    "embeddings": ("/v1/embeddings", {"model": "m1", "input": ["a", "b"]}),
    "count_tokens": ("/v1/messages/count_tokens", {"model": "m1", "messages": [{"role": "user", "content": "x"}]}),
}
STREAMED = B | {"stream": True}


def identities(reply: Any) -> tuple[set[str], set[int]]:
    """Every id and every time of creation in an answer."""
    ids: set[str] = set()
    times: set[int] = set()
    for part in reply.events if reply.streamed else [reply.response.json()]:
        for holder in (part, part.get("message") or {}, part.get("response") or {}):
            if "id" in holder:
                ids.add(holder["id"])
            times |= {holder[name] for name in ("created", "created_at") if name in holder}
    return ids, times


@both_paths
@pytest.mark.parametrize("api", ASKS)
async def test_o70_every_answer_has_an_id_and_a_time_of_its_own(bench: Bench, api: str) -> None:
    path, ask = ASKS[api]
    seen: list[str] = []
    texts = []
    for number in range(10):
        reply = await bench.send({**ask, "stream": number % 2 == 1}, path)
        ids, times = identities(reply)
        assert len(ids) == 1, "one id within one answer"
        seen += ids
        if number:
            assert times <= {int(bench.clock.time())}, "created now"
            assert (api == "messages") == (not times)
        texts.append(reply.text)
        bench.clock.advance(10)
    assert bench.u.n == 1
    assert len({*seen}) == 10
    assert len({*texts}) == 1
    requests = [row["request_id"] for row in await bench.rows()]
    assert len({*requests}) == 10


@both_paths
async def test_o70_the_id_looks_like_the_apis_own_and_the_first_one_is_nowhere_in_a_hit(bench: Bench) -> None:
    for api, prefix in (("chat", "chatcmpl-"), ("completions", "cmpl-"), ("messages", "msg_"), ("responses", "resp_")):
        path, ask = ASKS[api]
        (original,), _ = identities(await bench.miss(ask, path))
        for stream in (False, True):
            hit = await bench.hit({**ask, "stream": stream}, path)
            ((fresh, *more), _) = identities(hit)
            assert fresh.startswith(prefix)
            assert not more
            assert original not in hit.response.text


async def ledger(bench: Bench, by: str = "outcome") -> dict[str, dict[str, Any]]:
    """What the operator is shown."""
    found = await bench.gateway.client.get("/admin/ledger", params={"by": by})
    return {line[by]: line for line in found.json()["groups"]}


@pytest.fixture
def prices(world: World) -> str:
    path = world.folder / "prices.yaml"
    path.write_text("models:\n  m1: {input: 1.0, output: 2.0}\n")
    return str(path)


@each_store
async def test_o71_tokens_are_served_saved_and_paid_for_once_each(world: World, prices: str) -> None:
    async with world.bench(prices=prices) as bench:
        replies = [await bench.miss(B), await bench.hit(B), await bench.hit(STREAMED), await bench.hit(B)]
        for reply in replies[:2] + replies[3:]:
            assert reply.response.json()["usage"]["total_tokens"] == 15, "the caller is told what is stored"
        lines = await ledger(bench)
        miss, hits = lines["miss"], lines["exact"]
        assert sum(line["upstream_tokens"] for line in lines.values()) == 15
        assert sum(line["served_tokens"] for line in lines.values()) == 60
        assert sum(line["saved_tokens"] for line in lines.values()) == 45
        price = (10 * 1.0 + 5 * 2.0) / 1e6
        assert miss["cost_usd"] == pytest.approx(price)
        assert hits["cost_usd"] == 0
        assert hits["saved_usd"] == pytest.approx(3 * price)
        assert (miss["calls"], hits["calls"]) == (1, 0)


@one_world
async def test_o71_callers_who_share_one_call_pay_it_once(world: World, prices: str, gate: asyncio.Event) -> None:
    async with world.bench(prices=prices) as bench:
        bench.u.reply(answer().held(gate))
        asking = asyncio.gather(*(bench.gateway.client.post(CHAT, json=STREAMED if i % 2 else B) for i in range(10)))
        await bench.gateway.joined(10)
        gate.set()
        await asking
        lines = await ledger(bench)
        assert {outcome: line["requests"] for outcome, line in lines.items()} == {"miss": 1, "coalesced": 9}
        assert sum(line["calls"] for line in lines.values()) == 1
        assert sum(line["upstream_tokens"] for line in lines.values()) == 15
        assert sum(line["saved_tokens"] for line in lines.values()) == 135


@both_paths
async def test_o71_limits_count_the_tokens_that_were_served(world: World) -> None:
    tenants = [{"name": "t", "keys": [hashed("K")], "limits": {"tokens_per_minute": 44}}]
    async with world.bench(tenants=tenants) as bench:
        await bench.miss(B, key="K")
        await bench.hit(B, key="K")
        await bench.hit(STREAMED, key="K")
        assert (await bench.send(B, key="K")).status == 429


@both_paths
async def test_o72_every_request_has_one_outcome_and_they_add_up(world: World) -> None:
    path = world.folder / "faq.yaml"
    path.write_text('- ask: ["Who are you?"]\n  answer: "A cache."\n')
    async with world.bench(faq={"path": str(path)}, cache={"stale_while_revalidate": "1h"}) as bench:
        expected: Counter[str] = Counter()

        async def send(outcome: str, *arguments: Any, **headers: str) -> None:
            await bench.send(*arguments, **headers)
            expected[outcome] += 1
            await bench.at_rest()
            newest = (await bench.rows(1))[0]
            assert newest["outcome"] == outcome, (arguments, headers, newest)
            assert await bench.outcomes() == expected

        for api, (path_, ask) in EVERY_API.items():
            await send("miss", ask, path_)
            await send("exact", ask, path_)
            await send("miss", {**ask, "user": "x"}, path_, cache_control="no-cache")
            await send("exact", {**ask, "user": "x"}, path_)
            if api in ASKS:
                streamed = {**ask, "stream": True}
                await send("exact", streamed, path_)
                await send("miss", {**streamed, "seed": 1}, path_)
                await send("exact", {**streamed, "seed": 1}, path_)
                sampled = {name: value for name, value in ask.items() if name != "temperature"}
                await send("bypass", sampled, path_)
                await send("bypass", {**sampled, "stream": True}, path_)
            bench.u.reply(error(500))
            await send("error", {**ask, "seed": 2}, path_)
            await send("error", b"{", path_)
            await send("error", {**ask, "model": "nobody's"}, path_)
            await send("miss", {**ask, "seed": 3}, path_, cache_control="only-if-cached")
        question = [{"role": "user", "content": "who are you"}]
        await send("faq", {"model": "m1", "messages": question})
        await send("faq", {"model": "m1", "messages": question, "stream": True})
        bench.u.on("/v1/elsewhere", json_body({}))
        await send("bypass", {"model": "m1"}, "/v1/elsewhere")
        bench.u.reply(answer().cut(after=3))
        await send("error", STREAMED | {"seed": 4})
        bench.clock.advance(3700)
        await send("stale", B)
        await send("exact", B)
        assert expected.keys() <= {*OUTCOMES}


@one_world
async def test_o72_those_who_joined_and_those_who_left_are_counted_as_well(bench: Bench, gate: asyncio.Event) -> None:
    bench.u.always(answer(deltas=["a "] * 10).held(gate))
    staying = asyncio.gather(*(bench.gateway.client.post(CHAT, json=STREAMED if i % 2 else B) for i in range(20)))
    leaving = asyncio.gather(*(bench.gateway.client.post(CHAT, json=B | {"seed": i}) for i in range(5)))
    await bench.gateway.joined(20, *[1] * 5)
    leaving.cancel()
    await bench.gateway.joined(20)
    gate.set()
    await staying
    await bench.at_rest()
    assert await bench.outcomes() == {"miss": 1, "coalesced": 19, "error": 5}
    left = [row for row in await bench.rows() if row["outcome"] == "error"]
    assert {row["reason"] for row in left} == {"caller left"}


@both_paths
async def test_o72_refused_and_unreadable_requests_are_counted_as_well(world: World) -> None:
    tenants = [{"name": "t", "keys": [hashed("K")], "models": ["m1"]}]
    async with world.bench(tenants=tenants, limits={"max_body": 1000}) as bench:
        await bench.send(B)
        await bench.send(B, key="wrong")
        await bench.send(B | {"model": "m2"}, key="K")
        await bench.send(b"x" * 2000, key="K")
        await bench.send(b"x", key="K", content_encoding="gzip")
        await bench.send(b"x", key="K", content_encoding="snappy")
        assert [row["status"] for row in await bench.rows()] == [415, 400, 413, 403, 401, 401]
        assert await bench.outcomes() == {"error": 6}
        await bench.miss(B, key="K")
        await bench.hit(B, key="K")
        async with await RawConnection.open(bench.gateway.url) as connection:
            request = post(CHAT, orjson.dumps(B), "Authorization: Bearer K")
            connection.send(request * 5)
            answers = [await connection.answer() for _ in range(5)]
            assert [one.status for one in answers if one] == [200] * 5
        assert await bench.outcomes() == {"error": 6, "miss": 1, "exact": 6}


@each_store
async def test_o72_the_metrics_say_the_same(bench: Bench) -> None:
    await bench.miss(B)
    for _ in range(3):
        await bench.hit(B)
        await bench.hit(STREAMED)
    metrics = (await bench.gateway.client.get("/metrics")).text
    counts = [line for line in metrics.splitlines() if line.startswith("warmgate_requests_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counts) == 7
    by_outcome = {
        (part.split('outcome="')[1].split('"')[0], part.split('stream="')[1].split('"')[0]): float(part.rsplit(" ")[-1])
        for part in counts
    }
    assert by_outcome == {("miss", "false"): 1, ("exact", "false"): 3, ("exact", "true"): 3}
