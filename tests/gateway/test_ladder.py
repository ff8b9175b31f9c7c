"""The hit-rate ladder of a running gateway: every miss has its cause, and nothing else is counted."""

from __future__ import annotations

import asyncio
from typing import Any

from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B
from tests.gateway.conftest import Bench, Start
from tests.harness import FakeClock
from tests.waiting import until


async def ladder(bench: Bench) -> dict[str, Any]:
    await bench.gateway.app.runtime.ledger.flush()
    return (await bench.gateway.client.get("/admin/ladder")).json()


def lost(told: dict[str, Any]) -> dict[str, int]:
    return {line["to"]: line["requests"] for line in told["lost"] if line["requests"]}


async def test_each_rung(start: Start, clock: FakeClock) -> None:
    async with start(cache={"ttl": "10s", "stale_while_revalidate": 0, "keep_stale": 0}) as bench:
        await bench.miss(B)
        await bench.hit(B)
        await bench.miss(B | {"max_tokens": 5})
        clock.advance(11)
        await bench.miss(B)
        await bench.gateway.client.post("/admin/purge", json={"model": "m1"})
        await bench.miss(B)
        told = await ladder(bench)
        assert lost(told) == {"fields": 1, "expired": 1, "gone": 1}
        assert (told["asked"], told["hits"], told["first"], told["unexplained"]) == (5, 1, 1, 0)
        assert (told["hit_rate"], told["ideal_rate"]) == (0.2, 0.8)
        assert told["fields"] == [{"field": "max_tokens", "requests": 1}]


async def test_an_answer_that_may_not_be_kept(start: Start, u: StubUpstream) -> None:
    u.always(answer(finish_reason="length"))
    async with start() as bench:
        for _ in range(3):
            await bench.gateway.chat(B)
        assert lost(await ladder(bench)) == {"not stored": 2}


async def test_who_joins_a_call_misses_nothing(start: Start, u: StubUpstream, gate: asyncio.Event) -> None:
    u.always(answer().held(gate))
    async with start() as bench:
        asking = asyncio.gather(*(bench.gateway.chat(B) for _ in range(3)))
        await bench.gateway.joined(3)
        gate.set()
        await asking
        told = await ladder(bench)
        assert (told["asked"], told["hits"], told["first"], lost(told)) == (3, 2, 1, {})


async def test_sampled_requests_are_on_no_rung(start: Start) -> None:
    async with start() as bench:
        for _ in range(3):
            await bench.gateway.chat(B | {"temperature": 1})
        told = await ladder(bench)
        assert (told["asked"], told["ideal_rate"]) == (0, None)


async def test_every_miss_has_one_cause_and_nothing_else_has_one(start: Start, u: StubUpstream) -> None:
    """Also where a stream breaks or its caller leaves (errors, not misses), and however a miss came about."""
    async with start() as bench:
        other = B | {"stream": True, "messages": [{"role": "user", "content": "another question"}]}
        u.reply(answer(deltas=["a", "b", "c"]).cut(after=2, then="reset"))
        await bench.send(other)
        u.reply(answer(deltas=["a", "b", "c"]).pause(before=2, seconds=30))
        async with bench.streaming(other) as response:
            async for _ in response.aiter_bytes():
                break
        await until(lambda: not bench.gateway.app.runtime.flights, "the call has ended")
        await bench.miss(B)
        await bench.miss(B, cache_control="no-cache")
        await bench.miss(B | {"seed": 3}, cache_control="no-store")
        assert (await bench.send(B | {"seed": 4}, cache_control="only-if-cached")).status == 504
        for batch in (["x"], ["x", "y"], ["y"], ["x", "y"]):  # two misses, two hits
            await bench.send({"model": "m1", "input": batch}, path="/v1/embeddings")
        told = await ladder(bench)
        assert await bench.outcomes() == {"error": 2, "miss": 6, "exact": 2}
        assert bench.gateway.app.runtime.misses.causes == {"first": 3, "declined": 3}
        assert (told["asked"], told["hits"], told["first"], told["unexplained"], lost(told)) == (5, 2, 3, 0, {})


async def test_a_batch_is_lost_to_what_its_first_missing_item_was_lost_to(start: Start, clock: FakeClock) -> None:
    async with start(cache={"ttl": "10s"}) as bench:
        for _ in range(2):
            await bench.send({"model": "m1", "input": ["x", "y"]}, path="/v1/embeddings")
            clock.advance(11)
        assert lost(await ladder(bench)) == {"expired": 1}


async def test_a_held_out_hit_whose_new_answer_breaks_is_no_miss(start: Start, u: StubUpstream) -> None:
    async with start(cache={"holdout": 1}) as bench:
        await bench.miss(B)
        u.reply(answer(deltas=["a", "b", "c"]).cut(after=2, then="reset"))
        await bench.send(B | {"stream": True})
        assert await bench.outcomes() == {"miss": 1, "error": 1}
        assert lost(await ladder(bench)) == {}


async def test_what_a_caller_finds_too_old_is_not_lost(start: Start, clock: FakeClock) -> None:
    async with start() as bench:
        for body, path in ((B, "/v1/chat/completions"), ({"model": "m1", "input": ["x"]}, "/v1/embeddings")):
            await bench.miss(body, path)
            clock.advance(5)
            await bench.miss(body, path, cache_control="max-age=4")
        told = await ladder(bench)
        assert bench.gateway.app.runtime.misses.causes == {"first": 2, "declined": 2}
        assert (told["asked"], told["first"], lost(told)) == (2, 2, {})
