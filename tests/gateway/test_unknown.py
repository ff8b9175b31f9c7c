"""What nobody knows is never told as zero, and what is known to be nothing is not told as unknown."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.stub_upstream import StubUpstream, answer, json_body
from tests.field.conftest import B
from tests.gateway.conftest import Bench, Start

TOKENS = ("prompt_tokens", "output_tokens", "tokens")


async def line(bench: Bench, question: str = "?by=endpoint") -> dict[str, Any]:
    (found,) = (await bench.gateway.client.get(f"/admin/ledger{question}")).json()["groups"]
    return found


async def test_sums_of_which_nothing_is_known_are_null(start: Start, u: StubUpstream) -> None:
    u.always(answer(usage={"prompt_tokens": 5, "completion_tokens": -1}))
    async with start() as bench:
        await bench.miss(B)
        await bench.hit(B)
        told = await line(bench)
        unknown = [f"{what}_{name}" for what in ("served", "saved", "upstream") for name in TOKENS]
        unknown += ["provider_cached_tokens", "computed_prompt_tokens", "cost_usd", "saved_usd", "token_hit_rate"]
        assert {name: told[name] for name in unknown} == dict.fromkeys(unknown)
        assert (told["unknown_usage"], told["unknown_served"], told["hits"]) == (1, 2, 1)
        effective = (await bench.gateway.client.get("/admin/effective")).json()[0]
        assert set(effective["tokens"].values()) == {None}
        assert (await bench.gateway.client.get("/dashboard/api/overview")).status_code == 200


async def test_what_is_known_of_some_is_the_sum_of_these(start: Start, u: StubUpstream) -> None:
    u.reply(answer(usage={"prompt_tokens": 5, "completion_tokens": -1}))
    async with start() as bench:
        await bench.miss(B)
        await bench.miss(B | {"seed": 1})
        await bench.hit(B)
        told = await line(bench)
        assert (told["served_tokens"], told["upstream_tokens"], told["saved_tokens"]) == (15, 15, None)


async def test_where_nothing_happened_zero_is_the_truth(start: Start) -> None:
    async with start() as bench:
        await bench.send(b"{")
        told = await line(bench)
        assert {told[f"{what}_tokens"] for what in ("served", "saved", "upstream", "provider_cached")} == {0}


async def test_what_uses_no_tokens_is_not_unknown(start: Start) -> None:
    """Lists of models that clients poll, files, and counts of tokens."""
    async with start(models={"fast": {"target": "m1"}}) as bench:
        for path in ("/v1/models", "/v1/models/fast", "/v1/models/m1"):
            assert (await bench.gateway.client.get(path)).status_code == 200
        count = {"model": "m1", "messages": [{"role": "user", "content": "Hi"}]}
        for _ in range(2):
            await bench.send(count, path="/v1/messages/count_tokens")
        lines = (await bench.gateway.client.get("/admin/ledger")).json()["groups"]
        assert {line["outcome"]: line["requests"] for line in lines} == {"bypass": 3, "miss": 1, "exact": 1}
        assert {(line["unknown_served"], line["unknown_usage"], line["served_tokens"]) for line in lines} == {(0, 0, 0)}


async def test_calls_that_pass_through_are_calls_of_which_nobody_knows_what_they_used(
    start: Start, u: StubUpstream
) -> None:
    u.on("/v1/images/generations", json_body({"data": []}))
    async with start() as bench:
        await bench.send({"model": "m1", "prompt": "a cat"}, path="/v1/images/generations")
        told = await line(bench)
        assert (told["calls"], told["unknown_usage"], told["unknown_cost"], told["cost_usd"]) == (1, 1, 1, None)
        assert (told["requests"], told["unknown_served"]) == (1, 1)
        await bench.send({"model": "m1"}, path="/v1/nothing")  # refused, so nothing was used
        await bench.gateway.client.get("/v1/files")
        told = await line(bench)
        assert (told["requests"], told["calls"], told["unknown_usage"]) == (3, 3, 1)
        assert u.n == 2  # and the GET


@pytest.mark.parametrize("name", ["nobody's", "<script>alert(1)</script>"])
async def test_a_model_that_nobody_serves_gets_no_name_in_what_passes_through(start: Start, name: str) -> None:
    """Callers could otherwise fill the ledger with names of their own."""
    async with start() as bench:
        await bench.send({"model": name, "prompt": "a cat"}, path="/v1/images/generations")
        assert (await line(bench, "?by=model"))["model"] == ""
