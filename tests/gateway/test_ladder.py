"""The hit-rate ladder of a running gateway: every miss has its cause, and nothing else is counted."""

from __future__ import annotations

import asyncio
from typing import Any

from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B
from tests.gateway.conftest import Bench, Start
from tests.harness import FakeClock


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
