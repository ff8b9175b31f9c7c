"""``cache.min_uses``: only what is asked repeatedly is worth its place."""

from __future__ import annotations

import asyncio

from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B
from tests.gateway.conftest import Start, refreshed
from tests.harness import FakeClock


async def test_an_answer_is_stored_from_the_nth_time_on_that_it_is_asked_for(start: Start) -> None:
    async with start(cache={"min_uses": 3}) as bench:
        for _ in range(2):
            first = await bench.miss(B)
            assert first.cache_status == 'warmgate; fwd=uri-miss; detail="not stored: asked too rarely"'
        assert bench.not_stored == {"asked too rarely": 2}
        assert (await bench.miss(B)).cache_status == "warmgate; fwd=uri-miss; stored"
        await bench.hit(B)


async def test_other_questions_do_not_count(start: Start) -> None:
    async with start(cache={"min_uses": 2}) as bench:
        for seed in range(5):
            await bench.miss(B | {"seed": seed})
        assert bench.stored == 0


async def test_those_who_join_a_call_count_as_well(start: Start, u: StubUpstream, gate: asyncio.Event) -> None:
    u.always(answer().held(gate))
    async with start(cache={"min_uses": 3}) as bench:
        asking = asyncio.gather(*(bench.gateway.chat(B) for _ in range(3)))
        await bench.gateway.joined(3)
        gate.set()
        await asking
        await bench.hit(B)
        assert u.n == 1


async def test_what_is_not_to_be_stored_does_not_count(start: Start) -> None:
    async with start(cache={"min_uses": 2}) as bench:
        await bench.miss(B, cache_control="no-store")
        await bench.miss(B)
        assert bench.stored == 0


async def test_a_renewed_answer_is_stored_without_question(start: Start, clock: FakeClock) -> None:
    async with start(cache={"min_uses": 2, "ttl": "10s", "stale_while_revalidate": "1m"}) as bench:
        await bench.miss(B)
        await bench.miss(B)
        bench.gateway.app.runtime.keeper.min_uses = 200
        clock.advance(11)
        await bench.gateway.chat(B)
        await refreshed(bench, 3)
        await bench.hit(B)


async def test_embedded_texts_count_one_by_one(start: Start) -> None:
    async with start(cache={"min_uses": 2}) as bench:

        async def ask(*texts: str) -> list[str]:
            await bench.send({"model": "m1", "input": list(texts)}, "/v1/embeddings")
            return bench.u.calls[-1].json["input"]

        assert await ask("a", "b") == ["a", "b"]
        assert await ask("a", "c") == ["a", "c"]
        assert await ask("a", "c", "d") == ["c", "d"]
