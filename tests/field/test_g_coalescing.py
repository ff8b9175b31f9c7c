"""Field cases, section G: equal requests share one upstream call, and none of them is harmed by another."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import orjson
import pytest

import gateway.reading
from loadtest.stub_upstream import StubUpstream, answer, error, events, json_body
from tests.field.conftest import CHAT, B, Bench, World, both_paths, each_store, one_world
from tests.field.reading import ASKS, events_of, json_events, text_of, text_of_stream
from tests.harness import upstream
from tests.raw import Answer, RawConnection, post

STREAMED = B | {"stream": True}
WITH_USAGE = STREAMED | {"stream_options": {"include_usage": True}}


async def ask(bench: Bench, body: dict[str, Any], timeout: float = 30, path: str = CHAT) -> str:
    """What one caller is told."""
    response = await bench.gateway.client.post(path, json=body, timeout=timeout)
    assert response.status_code == 200, response.text
    streamed = response.headers["content-type"].startswith("text/event-stream")
    assert streamed is bool(body.get("stream")), "in its own form"
    return text_of_stream(response.content) if streamed else text_of(response.json())


async def clean(bench: Bench) -> None:
    """Nothing is left of any flight, call or admission."""
    await bench.at_rest()
    runtime = bench.gateway.app.runtime
    assert not runtime.flights
    assert [member.in_flight for member in runtime.pool.members] == [0] * len(runtime.pool.members)
    assert runtime.tenants._open.usage.concurrent == 0


@each_store
async def test_o46_the_leader_leaves_before_the_answer_and_the_others_get_it(
    world: World, bench: Bench, gate: asyncio.Event
) -> None:
    sharing = world.store == "redis"  # then the gateway follows its own call, to tell others
    bench.u.always(answer().held(gate))
    leader = asyncio.create_task(ask(bench, B))
    await bench.u.wait_calls(1)
    followers = [asyncio.create_task(ask(bench, STREAMED if i % 2 else B)) for i in range(9)]
    await bench.gateway.joined(10 + sharing)
    leader.cancel()
    await bench.gateway.joined(9 + sharing)
    gate.set()
    assert await asyncio.gather(*followers) == ["ans-1"] * 9
    assert bench.u.n == 1
    await clean(bench)
    assert await bench.outcomes() == {"coalesced": 9, "error": 1}
    await bench.hit(B)


@both_paths
async def test_o46_the_leader_leaves_in_mid_stream_and_the_others_get_it_all(world: World, gate: asyncio.Event) -> None:
    async with world.bench(cache={"ttl": "100s"}) as bench:
        words = [f"w{i} " for i in range(10)]
        bench.u.reply(answer(deltas=words).held(gate, before=4))
        async with bench.streaming(STREAMED) as leading:
            pieces = leading.aiter_raw()
            await anext(pieces)
            followers = [asyncio.create_task(ask(bench, STREAMED if i % 2 else B)) for i in range(9)]
            await bench.gateway.joined(10)
        await bench.gateway.joined(9)
        gate.set()
        assert await asyncio.gather(*followers) == ["".join(words)] * 9
        assert bench.u.n == 1
        await clean(bench)
        bench.clock.advance(101)
        await bench.miss(B)


@one_world
async def test_o46_a_leader_that_was_the_only_reader_does_not_block_those_who_wait_for_the_whole(
    bench: Bench, gate: asyncio.Event
) -> None:
    """Derived: who wants it in one piece reads no pieces, but must not hold the call up when it is the last one."""
    words = ["x" * 50_000] * 20
    bench.u.reply(answer(deltas=words).held(gate, before=3))
    async with bench.streaming(STREAMED) as leading:
        pieces = leading.aiter_raw()
        await anext(pieces)
        waiting = asyncio.create_task(ask(bench, B))
        await bench.gateway.joined(2)
    await bench.gateway.joined(1)
    gate.set()
    assert len(await waiting) == 1_000_000
    assert bench.u.n == 1
    await clean(bench)


@one_world
@pytest.mark.parametrize("after", [0, 1, 2, 5, 8])
async def test_o46_wherever_the_leader_is_cut_the_next_one_is_served(bench: Bench, after: int) -> None:
    bench.u.always(answer(deltas=["a ", "b ", "c "]).paced(0.02))
    leader = await RawConnection.open(bench.gateway.url)
    leader.send(post(CHAT, orjson.dumps(STREAMED)))
    await bench.u.wait_calls(1)
    for _ in range(after):
        await leader.reader.read(1)
    leader.reset()
    for _ in range(3):
        assert await ask(bench, B) == "a b c "
    await clean(bench)


@both_paths
async def test_o46_many_callers_who_leave_at_random_leave_nothing_behind(bench: Bench) -> None:
    chance = random.Random(46)
    bench.u.always(answer(deltas=["one ", "two ", "three "]).paced(0.03).delayed(0.05))

    async def caller(number: int) -> str | None:
        body = (STREAMED if chance.random() < 0.5 else B) | {"seed": number % 4}
        try:
            return await ask(bench, body, timeout=chance.choice([0.01, 0.05, 0.1, 0.15, 10]))
        except httpx.TimeoutException:
            return None

    told = await asyncio.gather(*(caller(number) for number in range(120)))
    assert {*told} == {None, "one two three "}
    await clean(bench)
    for seed in range(4):
        assert await ask(bench, B | {"seed": seed}) == "one two three "


@one_world
@pytest.mark.parametrize(
    "first", [error(500), error(429), answer().cut(after=0, then="reset")], ids=["500", "429", "reset"]
)
async def test_o46_a_call_that_fails_fails_for_all_once_and_is_over(
    bench: Bench, gate: asyncio.Event, first: Any
) -> None:
    bench.u.reply(first.held(gate))
    asking = asyncio.gather(*(bench.gateway.client.post(CHAT, json=B) for _ in range(10)))
    await bench.gateway.joined(10)
    gate.set()
    responses = await asking
    assert len({response.status_code for response in responses}) == 1
    assert responses[0].status_code in (429, 500, 502)
    assert all("error" in response.json() for response in responses)
    assert bench.u.n == 1
    await clean(bench)
    assert await ask(bench, B) == "ans-2"


@one_world
async def test_o46_what_must_not_be_shared_is_not(bench: Bench) -> None:
    bench.u.always(answer().delayed(0.2))
    sampled = {name: value for name, value in B.items() if name != "temperature"}
    texts = await asyncio.gather(*(ask(bench, sampled) for _ in range(3)))
    assert len({*texts}) == 3
    fresh = [
        bench.gateway.client.post(CHAT, json=B, headers={"cache-control": directive})
        for directive in ("no-cache", "no-cache", "no-store", "no-store")
    ]
    assert len({response.text for response in await asyncio.gather(*fresh)}) == 4
    assert bench.u.n == 7


@one_world
async def test_o46_a_flight_in_the_other_form_without_use_costs_one_more_call_not_one_each(
    bench: Bench, gate: asyncio.Event
) -> None:
    """Derived: a stream that cannot be joined into a plain answer."""
    again = asyncio.Event()
    bench.u.reply(answer(deltas=["a ", "b "], finish_reason=None).held(gate), answer().held(again))
    leader = asyncio.create_task(ask(bench, STREAMED))
    await bench.u.wait_calls(1)
    others = asyncio.gather(*(ask(bench, B) for _ in range(10)))
    await bench.gateway.joined(11)
    gate.set()
    await bench.gateway.joined(10)
    again.set()
    assert await others == ["ans-2"] * 10
    assert await leader == "a b "
    assert bench.u.n == 2


async def slow_reader(bench: Bench, body: dict[str, Any], go: asyncio.Event) -> Answer:
    """A caller that reads nothing but a few kilobytes until it is told to go on."""
    async with await RawConnection.open(bench.gateway.url, receive_buffer=8192) as connection:
        connection.send(post(CHAT, orjson.dumps(body)))
        await go.wait()
        connection.widen()
        found = await connection.answer(60)
        assert found is not None
        return found


BIG = ["x" * 10_000] * 200  # 2 MB


@both_paths
async def test_o47_slow_followers_get_it_all_and_do_not_slow_the_leader(bench: Bench) -> None:
    bench.u.reply(answer(deltas=BIG).pause(100, 0.3))
    go = asyncio.Event()
    async with bench.streaming(WITH_USAGE) as leading:
        pieces = leading.aiter_raw()
        got = await anext(pieces)
        bodies = [WITH_USAGE, STREAMED] * 9 + [STREAMED, B]
        slow = [asyncio.create_task(slow_reader(bench, body, go)) for body in bodies]
        late = None
        async for piece in pieces:
            got += piece
            if late is None and len(got) > 1_000_000:
                late = asyncio.create_task(ask(bench, STREAMED))
            for under_way in bench.gateway.app.runtime.flights._under_way.values():
                assert under_way.flight._held <= gateway.reading.BOUND + gateway.reading.WINDOW
    assert len(text_of_stream(got)) == 2_000_000, "the leader is done though the others have read next to nothing"
    assert late is not None
    assert len(await late) == 2_000_000
    go.set()
    for body, found in zip(bodies, await asyncio.gather(*slow), strict=True):
        assert found.status == 200
        if body is B:
            assert found.header("content-type") == "application/json"
            assert len(text_of(orjson.loads(found.body))) == 2_000_000
            continue
        assert len(text_of_stream(found.body)) == 2_000_000
        assert events_of(found.body)[-1].data == "[DONE]"
        reports = [event["usage"] for event in json_events(found.body) if event.get("usage")]
        assert len(reports) == (body is WITH_USAGE)
    assert bench.u.n == 1
    await clean(bench)


@pytest.fixture
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flight that keeps little."""
    monkeypatch.setattr(gateway.reading, "BOUND", 300_000)
    monkeypatch.setattr(gateway.reading, "WINDOW", 100_000)


@one_world
@pytest.mark.usefixtures("small_bound")
async def test_o47_who_falls_too_far_behind_is_told_so(bench: Bench, gate: asyncio.Event) -> None:
    go = asyncio.Event()
    bench.u.reply(answer(deltas=["x" * 10_000] * 2000).held(gate))
    leader = asyncio.create_task(ask(bench, STREAMED))
    await bench.u.wait_calls(1)
    slow = [asyncio.create_task(slow_reader(bench, STREAMED, go)) for _ in range(5)]
    await bench.gateway.joined(6)
    gate.set()
    assert len(await leader) == 20_000_000
    go.set()
    for found in await asyncio.gather(*slow):
        seen = events_of(found.body)
        assert "[DONE]" not in [event.data for event in seen]
        assert seen[-1].json["error"]["code"] == "too_slow"
        said = text_of_stream(found.body)
        assert 0 < len(said) < 20_000_000
        assert not said.strip("x")
    assert bench.u.n == 1
    await clean(bench)
    assert await bench.outcomes() == {"miss": 1, "error": 5}


@one_world
@pytest.mark.parametrize("api", ASKS)
async def test_o47_every_api_is_shared_in_both_forms(bench: Bench, gate: asyncio.Event, api: str) -> None:
    path, plain = ASKS[api]
    bench.u.reply(answer(deltas=["Hel", "lo"]).held(gate))
    bodies = [{**plain, "stream": bool(i % 2)} for i in range(10)]
    asking = asyncio.gather(*(ask(bench, body, path=path) for body in bodies))
    await bench.gateway.joined(10)
    gate.set()
    assert await asking == ["Hello"] * 10
    assert bench.u.n == 1
    await clean(bench)


@one_world
async def test_o47_identities_are_each_callers_own(bench: Bench, gate: asyncio.Event) -> None:
    """Derived: callers who share an answer in another form than the leader's get ids of their own."""
    bench.u.reply(answer().held(gate))
    leader = asyncio.create_task(bench.gateway.client.post(CHAT, json=STREAMED))
    await bench.u.wait_calls(1)
    asking = asyncio.gather(*(bench.gateway.client.post(CHAT, json=B) for _ in range(4)))
    await bench.gateway.joined(5)
    gate.set()
    others = await asking
    ids = {response.json()["id"] for response in others} | {json_events((await leader).content)[0]["id"]}
    assert len(ids) == 5
    assert len({response.headers["x-request-id"] for response in others}) == 4


@one_world
async def test_o46_two_upstream_models_are_two_flights(world: World, gate: asyncio.Event) -> None:
    async with StubUpstream(models=("m1", "m2")) as u:
        u.always(lambda call: answer(f"from {call.json['model']}").held(gate))
        async with world.bench(u, upstreams=[upstream(u.url)], models={"fast": {"target": "m1"}}) as bench:
            names = ["m1", "m2", "fast"] * 5
            asking = asyncio.gather(*(ask(bench, B | {"model": name}) for name in names))
            await bench.gateway.joined(10, 5)
            gate.set()
            assert await asking == ["from m1", "from m2", "from m1"] * 5
            assert u.n == 2


@pytest.mark.parametrize("stream", [False, True])
@each_store
async def test_o47_bookkeeping_of_one_caller_is_not_told_to_another(
    world: World, bench: Bench, gate: asyncio.Event, stream: bool
) -> None:
    """The Responses API repeats it in its answer: one call for all, and to each caller his own."""
    sharing = world.store == "redis"
    said = {"type": "output_text", "text": "said", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [said]}
    whole = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m1",
        "output": [item],
        "metadata": {"of": "0"},
        "user": "0",
    }
    stages = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    reply = events(*(b"event: %s\ndata: %s\n\n" % (s["type"].encode(), orjson.dumps(s)) for s in stages))
    bench.u.always((reply if stream else json_body(whole)).held(gate))
    body = {"model": "m1", "temperature": 0, "store": False, "input": "Say A", "stream": stream}
    owners = ["0", "1", "1", "0"]
    asking = []
    for number, owner in enumerate(owners):
        asked = {**body, "metadata": {"of": owner}, "user": owner}
        asking.append(asyncio.create_task(bench.gateway.client.post("/v1/responses", json=asked, timeout=30)))
        await bench.gateway.joined(number + 1 + sharing)
    gate.set()
    for owner, response in zip(owners, await asyncio.gather(*asking), strict=True):
        told = json_events(response.content)[-1]["response"] if stream else response.json()
        assert (told["metadata"], told["user"]) == ({"of": owner}, owner)
        assert told["output"] == [item]
    assert bench.u.n == 1
    await clean(bench)
