"""Embeddings through the gateway: a batch asks the upstream only for what is new, and every vector finds its text."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.ledger.query import Scope, rows
from loadtest.stub_upstream import Call, Reply, StubUpstream, answer, error, json_body, known_vector
from tests.harness import FakeClock, Running, running_gateway, upstream
from tests.services import RedisServer, redis_server
from tests.waiting import SOON, until


class Bench:
    """A gateway in front of an upstream that embeds each text to a vector known from the text."""

    def __init__(self, u: StubUpstream, gateway: Running, clock: FakeClock) -> None:
        self.u, self.gateway, self.clock = u, gateway, clock

    async def post(self, given: Any, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {name.replace("_", "-"): str(more.pop(name)) for name in list(more) if name in HEADERS}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        body = {"model": "e", "input": given, **more}
        response = await self.gateway.client.post("/v1/embeddings", json=body, headers=headers)
        await self.gateway.app.runtime.keeper.drain()
        return response

    async def embed(self, given: Any, *items: Any, **more: Any) -> httpx.Response:
        """Sends, and holds that each of ``items`` got its own vector."""
        response = await self.post(given, **more)
        assert response.status_code == 200, response.text
        data = response.json()["data"]
        assert [vector["index"] for vector in data] == list(range(len(items)))
        assert [vector["embedding"] for vector in data] == [known_vector(item) for item in items]
        return response

    async def under_way(self, count: int) -> None:
        """Waits until so many requests have been let in, and then until each has gone as far as it can."""
        usage = self.gateway.app.runtime.usages.of("default")
        await until(lambda: usage.concurrent == count, f"{count} requests are under way")
        await asyncio.sleep(0.02)

    @property
    def asked(self) -> list[Any]:
        return [call.json["input"] for call in self.u.calls]

    async def newest_row(self) -> dict[str, Any]:
        return (await self.gateway.app.runtime.ledger.read(lambda open_: rows(open_, Scope(), 1)))[0]


HEADERS = ("cache_control", "x_warmgate_ttl", "x_warmgate_tags")


@asynccontextmanager
async def bench(**config: Any) -> AsyncIterator[Bench]:
    clock = FakeClock()
    async with (
        StubUpstream(models=("e",)) as u,
        running_gateway({"upstreams": [upstream(u.url, models=["e"])], **config}, clock) as gateway,
    ):
        yield Bench(u, gateway, clock)


@pytest.fixture
async def b() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.mark.parametrize("store", ["memory", "disk", "redis"])
async def test_a_mixed_batch_asks_for_what_is_new_and_keeps_every_place(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:  # O-73
    cache: dict[str, Any] = {}
    if store == "disk":
        cache = {"memory": "off", "disk": {"path": str(tmp_path), "max_bytes": "64MiB"}}
    elif store == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        cache = {"memory": "off", "redis": {"url": server.url, "prefix": uuid.uuid4().hex, "timeout": "1s"}}
    async with bench(cache=cache) as b:
        await b.embed(["a"], "a")
        mixed = await b.embed(["b", "a", "c"], "b", "a", "c")
        assert mixed.headers["cache-status"] == 'warmgate; fwd=partial; stored; detail="1/3 items"'
        again = await b.embed(["a", "a"], "a", "a")
        assert again.headers["cache-status"].startswith("warmgate; hit; ttl=")
        await b.embed("b", "b")
        assert b.asked == [["a"], ["b", "c"]]
        await b.embed([1, 2, 3], [1, 2, 3])
        await b.embed([[4], [1, 2, 3]], [4], [1, 2, 3])
        assert b.asked[2:] == [[1, 2, 3], [[4]]]


async def test_an_input_that_only_the_upstream_can_judge_is_left_to_it(b: Bench) -> None:
    odd: list[Any] = [[], None, ["a", 1]]
    for given in odd * 2:
        await b.post(given)
    assert b.asked == odd * 2


async def test_dimensions_and_encoding_belong_to_the_key(b: Bench) -> None:
    for _ in range(2):
        await b.post(["a"])
        short = await b.post(["a"], dimensions=3)
        packed = await b.post(["a"], encoding_format="base64")
        assert short.json()["data"][0]["embedding"] == known_vector("a", 3)
        assert struct.unpack("<8f", base64.b64decode(packed.json()["data"][0]["embedding"])) == tuple(known_vector("a"))
        await b.post(["a"], user="somebody")
    assert b.u.n == 3


async def test_a_batch_without_anything_known_is_sent_as_it_came(b: Bench) -> None:
    body = b'{ "input": ["x", "y"],  "model":"e", "dimensions": 8 }'
    for _ in range(2):
        got = await b.gateway.client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert [v["embedding"] for v in got.json()["data"]] == [known_vector("x"), known_vector("y")]
    assert [call.body for call in b.u.calls] == [body]


async def test_a_batch_cut_down_keeps_its_other_fields_and_the_models_own_name() -> None:
    async with bench(models={"alias": {"target": "e"}}) as b:
        await b.post(["a"], dimensions=4)
        got = await b.post(["a", "b", "b"], model="alias", dimensions=4, cache_salt="mine", user="u")
        assert b.u.calls[-1].json == {"model": "e", "input": ["b"], "dimensions": 4, "user": "u"}
        assert [v["embedding"] for v in got.json()["data"]] == [known_vector(t, 4) for t in ("a", "b", "b")]


async def test_usage_reports_what_each_item_was_counted_with(b: Bench) -> None:
    first = await b.post(["aaa", "b"])
    assert first.json()["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    assert (await b.newest_row())["outcome"] == "miss"
    hit = await b.post(["aaa", "b", "b"])
    assert hit.json()["usage"] == {"prompt_tokens": 15 + 5 + 5, "total_tokens": 25}
    assert (await b.newest_row())["outcome"] == "exact"
    partial = await b.post(["b", "c"])
    assert partial.json()["usage"] == {"prompt_tokens": 5 + 10, "total_tokens": 15}
    row = await b.newest_row()
    assert (row["outcome"], row["upstream"], row["model"]) == ("miss", "u", "e")
    assert row["prompt_tokens"] == 15  # what the caller was told, not what the upstream was sent


async def test_usage_that_nobody_knows_is_not_made_up(b: Bench) -> None:
    vector = {"object": "embedding", "index": 0, "embedding": [1.0]}
    b.u.reply(json_body({"object": "list", "model": "e", "data": [vector]}))
    await b.post(["a"])
    assert "usage" not in (await b.post(["a", "b"])).json()


async def test_batches_at_the_same_time_ask_for_each_item_once(b: Bench, gate: asyncio.Event) -> None:
    b.u.always(answer().held(gate))
    batches = (["a", "b"], ["b", "c"], ["c", "a"], ["a", "b"])
    asking = []
    for calls, texts in zip((1, 2, 2, 2), batches, strict=True):
        asking.append(asyncio.create_task(b.embed(texts, *texts)))
        await b.under_way(len(asking))
        await b.u.wait_calls(calls)
    gate.set()
    got = await asyncio.gather(*asking)
    assert sorted(text for asked in b.asked for text in asked) == ["a", "b", "c"]
    assert got[3].headers["cache-status"] == "warmgate; fwd=uri-miss; collapsed"
    assert not b.gateway.app.pipeline._batches._asked


async def test_who_waits_asks_itself_when_the_first_has_left(b: Bench, gate: asyncio.Event) -> None:
    b.u.reply(answer().held(gate))
    leaving = asyncio.create_task(b.post(["a"]))
    await b.u.wait_calls(1)
    waiting = asyncio.create_task(b.embed(["a", "a"], "a", "a"))
    await b.under_way(2)
    leaving.cancel()
    await b.u.wait_closed(b.u.calls[0])
    await waiting
    assert b.asked == [["a"], ["a"]]
    assert not b.gateway.app.pipeline._batches._asked


async def test_an_error_is_passed_on_and_who_waits_asks_itself(b: Bench, gate: asyncio.Event) -> None:
    await b.post(["a"])
    b.u.reply(error(429, "slow down").held(gate), error(400, "no"))
    asking = asyncio.gather(b.post(["a", "b"]), b.post(["b"]))
    await b.under_way(2)
    gate.set()
    first, second = await asking
    assert sorted((first.status_code, second.status_code)) == [400, 429]
    assert b.asked[1:] == [["b"], ["b"]]
    assert (await b.newest_row())["outcome"] == "error"
    await b.embed(["a", "b"], "a", "b")


async def test_answers_of_unknown_form_are_never_put_together(b: Bench) -> None:
    await b.post(["a"])
    odd = json_body({"object": "list", "model": "e", "data": [], "usage": {"prompt_tokens": 1, "total_tokens": 1}})
    b.u.reply(odd, odd)
    got = await b.post(["a", "b"])
    assert got.json()["data"] == []
    assert b.asked == [["a"], ["b"], ["a", "b"]]
    await b.embed(["b"], "b")
    assert b.gateway.app.runtime.not_stored["unknown form"] == 1


async def test_the_upstreams_order_of_vectors_does_not_matter(b: Bench) -> None:
    def backwards(call: Call) -> Reply:
        data = [
            {"object": "embedding", "index": index, "embedding": known_vector(text)}
            for index, text in enumerate(call.json["input"])
        ]
        return json_body({"object": "list", "model": "e", "data": data[::-1]})

    b.u.always(backwards)
    await b.post(["a", "b", "c"])
    await b.embed(["c", "a", "b"], "c", "a", "b")
    assert b.u.n == 1


async def test_callers_steer(b: Bench) -> None:
    await b.post(["a"])
    assert (await b.post(["a", "b"], cache_control="only-if-cached")).status_code == 504
    assert (await b.post(["a"], cache_control="only-if-cached")).status_code == 200
    assert b.u.n == 1
    await b.post(["a", "b"], cache_control="no-store")
    assert b.asked[1:] == [["a", "b"]]
    await b.embed(["b"], "b")
    assert b.u.n == 3
    fresh = await b.post(["a", "b"], cache_control="no-cache")
    assert fresh.headers["cache-status"] == "warmgate; fwd=request; stored"
    assert b.asked[3:] == [["a", "b"]]
    b.clock.advance(10)
    await b.post(["a"], cache_control="max-age=5")
    assert b.asked[4:] == [["a"]]


async def test_items_live_as_long_as_they_are_told(b: Bench) -> None:
    await b.post(["a"], x_warmgate_ttl=100)
    b.clock.advance(60)
    partly = await b.post(["a", "b"], x_warmgate_ttl=100)
    assert b.asked == [["a"], ["b"]]
    assert partly.status_code == 200
    whole = await b.post(["a", "b"])
    assert whole.headers["age"] == "60" and "ttl=40" in whole.headers["cache-status"]
    b.clock.advance(60)
    await b.embed(["a", "b"], "a", "b")
    assert b.asked[2:] == [["a"]]


async def test_stale_items_serve_when_the_upstream_fails_and_all_that_is_missing_is_there() -> None:
    async with bench(cache={"ttl": "60s", "stale_if_error": "1h"}) as b:
        await b.post(["a"])
        b.clock.advance(100)
        b.u.always(error(503))
        stale = await b.embed(["a"], "a")
        assert "detail=stale" in stale.headers["cache-status"]
        assert (await b.newest_row())["outcome"] == "stale"
        assert (await b.post(["a", "b"])).status_code == 503


async def test_a_purge_takes_items_with_it(b: Bench) -> None:
    await b.post(["a"], x_warmgate_tags="books")
    await b.gateway.client.post("/admin/purge", json={"tag": "books"})
    await b.embed(["a"], "a")
    assert b.u.n == 2


async def test_stale_items_serve_at_once_and_are_renewed_once_behind_the_callers(gate: asyncio.Event) -> None:
    async with bench(cache={"ttl": "60s", "stale_while_revalidate": "1h"}) as b:
        await b.post(["a", "b"])
        b.clock.advance(100)
        b.u.always(answer().held(gate))
        for given in (["a"], ["b", "a"], ["a", "b"]):
            stale = await b.embed(given, *given)
            assert stale.headers["cache-status"] == "warmgate; hit; ttl=-40; detail=stale"
        await b.u.wait_calls(3)
        assert sorted(b.asked[1:]) == [["a"], ["b"]], "each once"
        gate.set()

        async def renewed() -> bool:
            return "exact" in (await b.embed(["a", "b"], "a", "b")).headers["cache-status"]

        async with asyncio.timeout(SOON):
            while not await renewed():
                await asyncio.sleep(0.01)
        assert b.u.n == 3


async def test_a_stale_item_serves_beside_a_new_one_and_a_failed_renewal_harms_nobody() -> None:
    async with bench(cache={"ttl": "60s", "stale_while_revalidate": "1h"}) as b:
        await b.post(["a"])
        b.clock.advance(100)
        b.u.always(lambda call: error(500) if call.json["input"] == ["a"] else answer())
        partly = await b.embed(["a", "b"], "a", "b")
        assert partly.headers["cache-status"] == 'warmgate; fwd=partial; stored; detail="1/2 items"'
        await b.u.wait_calls(3)
        await b.embed(["a"], "a")


async def test_why_the_cache_does_not_answer_is_said(b: Bench) -> None:
    await b.post(["a"], x_warmgate_ttl=10)
    b.clock.advance(5)
    assert (await b.post(["a"], cache_control="max-age=1")).headers["cache-status"] == "warmgate; fwd=request; stored"
    b.clock.advance(5000)
    assert (await b.post(["a"])).headers["cache-status"] == "warmgate; fwd=stale; stored"
    b.clock.advance(5)
    mixed = await b.post(["a", "b"], cache_control="max-age=1")
    assert mixed.headers["cache-status"] == "warmgate; fwd=uri-miss; stored"


@pytest.mark.parametrize("cache", [{"min_uses": 2}, {"max_entry": "1KiB"}])
async def test_what_is_not_kept_is_not_said_to_be(cache: dict[str, Any]) -> None:
    async with bench(cache=cache) as b:
        first = await b.post(["a"], dimensions=1000)
        assert first.headers["cache-status"] == "warmgate; fwd=uri-miss"


async def test_what_a_soft_purge_made_stale_is_said_to_be_stale(b: Bench) -> None:
    await b.post(["a", "b"])
    await b.gateway.client.post("/admin/purge", json={"model": "e", "soft": True})
    b.clock.advance(5)
    stale = await b.embed(["a", "b"], "a", "b", cache_control="max-stale")
    assert stale.headers["cache-status"] == "warmgate; hit; ttl=-5; detail=stale"
    assert stale.headers["age"] == "5" and b.u.n == 1


async def test_stale_items_that_were_purged_meanwhile_do_not_serve(b: Bench, gate: asyncio.Event) -> None:
    await b.post(["a"], x_warmgate_ttl=1)
    b.clock.advance(10)
    b.u.reply(error(500).held(gate))
    waiting = asyncio.create_task(b.post(["a"], cache_control="stale-if-error=100"))
    await b.u.wait_calls(2)
    await b.gateway.client.post("/admin/purge", json={"model": "e"})
    gate.set()
    assert (await waiting).status_code == 500


async def test_an_error_says_why_the_cache_did_not_answer(b: Bench) -> None:
    b.u.always(error(400))
    told = (await b.post(["a"])).headers["cache-status"]
    assert told == 'warmgate; fwd=uri-miss; detail="not stored: status 400"'
    assert (await b.post(["a"], cache_control="no-store")).headers["cache-status"] == "warmgate; fwd=request"


async def test_tenants_do_not_share_items() -> None:
    def digest(key: str) -> str:
        return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"

    tenants = [{"name": name, "keys": [digest(name)]} for name in ("t1", "t2")]
    async with bench(tenants=tenants) as b:
        for _ in range(2):
            for key in ("t1", "t2"):
                await b.embed(["a"], "a", key=key)
        assert b.u.n == 2


async def test_a_batch_may_be_larger_than_the_largest_entry() -> None:
    async with bench(cache={"max_entry": "64KiB"}) as b:
        texts = [f"text {number}" for number in range(40)]
        for _ in range(2):
            got = await b.post(texts, dimensions=1000)
            assert len(got.content) > 64 * 1024
            assert [v["embedding"] for v in got.json()["data"]] == [known_vector(text, 1000) for text in texts]
            assert got.json()["usage"]["prompt_tokens"] == 400
        assert b.u.n == 1


async def test_a_query_goes_upstream_and_into_the_key(b: Bench) -> None:
    for query in ("", "?api-version=1", "?api-version=2") * 2:
        await b.gateway.client.post(f"/v1/embeddings{query}", json={"model": "e", "input": ["a"]})
    assert [call.target for call in b.u.calls] == [
        f"/v1/embeddings{q}" for q in ("", "?api-version=1", "?api-version=2")
    ]
