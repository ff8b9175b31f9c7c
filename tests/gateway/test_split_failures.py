"""Either side of a split request dies, or its caller leaves, at each point: the answer is recomputed or an honest
error, and the sides that live are left clean (O-69).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from engine.pd.offers import Offers
from gateway.split import Splits
from loadtest.stub_upstream import StubUpstream, answer, body, error, json_body
from tests.gateway.nodes import CHAT, SETTINGS, Two, chat, plain, route
from tests.harness import running_gateway, upstream

Cut = Callable[[], object]
Events = tuple[threading.Event, threading.Event]


async def expected(two: Two, body: dict[str, Any]) -> Any:
    return plain(await two.alone.post(CHAT, json=body))


@pytest.fixture
def stuck_prefill(two: Two) -> Iterator[Events]:
    """Holds the prefill engine in the middle of a prompt; gives (it has begun, let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    runner = two.prefill.core.runner
    run = runner.run

    def held(step: Any) -> Any:
        if step.prefills:
            begun.set()
            go_on.wait(20)
        return run(step)

    runner.run = held  # type: ignore[method-assign]
    yield begun, go_on
    go_on.set()


@pytest.fixture
def after_prefill(monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    """What is to happen between prefill and decode."""
    done: list[Cut] = []
    prefill = Splits._prefill

    async def then(self: Splits, *given: Any) -> Any:
        handed = await prefill(self, *given)
        for cut in done:
            cut()
        return handed

    monkeypatch.setattr(Splits, "_prefill", then)
    return done


@pytest.fixture
def in_transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    """Stops a transfer after its first blocks; gives (it has stopped, let it go on)."""
    stopped, go_on = threading.Event(), threading.Event()
    send = Offers._send

    async def haltingly(self: Offers, offer: Any, first: int, writer: asyncio.StreamWriter) -> None:
        drain = writer.drain

        async def wait() -> None:
            await drain()
            stopped.set()
            while not go_on.is_set():
                await asyncio.sleep(0.01)

        writer.drain = wait  # type: ignore[method-assign]
        await send(self, offer, first, writer)

    monkeypatch.setattr(Offers, "_send", haltingly)
    yield stopped, go_on
    go_on.set()


async def wait_for(event: threading.Event) -> None:
    async with asyncio.timeout(20):
        while not event.is_set():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def asking(two: Two, body: dict[str, Any]) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    task = asyncio.create_task(two.ask(body))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def settled(two: Two) -> bool:
    members = two.gateway.app.runtime.pool.members
    return all(not m.in_flight and not m.engine.running and not m.engine.pending for m in members)


@pytest.mark.parametrize("stream", [False, True])
class TestThePrefillSideDies:
    async def test_before_it_is_asked(self, two: Two, stream: bool) -> None:
        two.prefill.cut_off()
        answer = await two.ask(chat(stream=stream))
        assert route(answer) == 'whole="prefill failed: connect"'
        assert plain(answer) == await expected(two, chat(stream=stream))
        assert settled(two)

    async def test_while_it_computes(self, two: Two, stream: bool, stuck_prefill: Events) -> None:
        begun, go_on = stuck_prefill
        async with asking(two, chat(stream=stream)) as task:
            await wait_for(begun)
            two.prefill.cut_off()
            answer = await task
        go_on.set()
        assert route(answer).startswith('whole="prefill failed: ')
        assert plain(answer) == await expected(two, chat(stream=stream))
        assert settled(two)

    async def test_before_its_blocks_are_fetched(self, two: Two, stream: bool, after_prefill: list[Cut]) -> None:
        after_prefill.append(two.prefill.cut_off)
        answer = await two.ask(chat(stream=stream))
        assert plain(answer) == await expected(two, chat(stream=stream))
        assert two.decode.events == {"unreachable": 1}

    async def test_while_they_are_fetched(self, two: Two, stream: bool, in_transfer: Events) -> None:
        stopped, _ = in_transfer
        async with asking(two, chat(stream=stream)) as task:
            await wait_for(stopped)
            await asyncio.to_thread(two.prefill.cut_off)
            answer = await task
        assert plain(answer) == await expected(two, chat(stream=stream))
        assert two.decode.events in ({"torn": 1}, {"gone": 1})
        assert two.decode.core.counters.computed_tokens

    async def test_after_that(self, two: Two, stream: bool) -> None:
        body = chat(stream=True, max_tokens=40)
        async with two.gateway.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            first = [await anext(lines) for _ in range(4)]
            await two.prefill.at_rest()
            two.prefill.cut_off()
            rest = [line async for line in lines]
        assert [*first, *rest][-2:] == ["data: [DONE]", ""]


class TestTheDecodeSideDies:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_before_it_is_asked_the_prefill_side_does_it_all(
        self, two: Two, stream: bool, after_prefill: list[Cut]
    ) -> None:
        after_prefill.append(two.decode.cut_off)
        answer = await two.ask(chat(stream=stream))
        assert answer.headers["x-warmgate-upstream"] == "prefill"
        assert route(answer) == 'whole="role prefill"'
        assert _choices(plain(answer)) == _choices(await expected(two, chat(stream=stream)))
        assert settled(two)
        assert two.prefill.core.manager.free < two.prefill.core.manager.total, "under the lease"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_while_it_fetches(self, two: Two, stream: bool, in_transfer: Events) -> None:
        stopped, go_on = in_transfer
        async with asking(two, chat(stream=stream)) as task:
            await wait_for(stopped)
            two.decode.cut_off()
            go_on.set()
            answer = await task
        assert answer.headers["x-warmgate-upstream"] == "prefill"
        assert _choices(plain(answer)) == _choices(await expected(two, chat(stream=stream)))
        assert settled(two)

    async def test_in_the_middle_of_its_answer_that_is_an_honest_error(self, two: Two) -> None:
        body = chat(stream=True, max_tokens=60)
        async with two.gateway.client.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(6):
                await anext(lines)
            two.decode.cut_off()
            rest = [line async for line in lines if line]
        assert "error" in orjson.loads(rest[-1].removeprefix("data: "))
        assert "data: [DONE]" not in rest
        assert settled(two)


class TestTheCallerLeaves:
    async def left(self, two: Two, task: asyncio.Task[httpx.Response]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(20):
            while not settled(two):
                await asyncio.sleep(0.01)
        await two.prefill.at_rest()
        await two.decode.at_rest()

    async def test_while_the_prompt_is_computed(self, two: Two, stuck_prefill: Events) -> None:
        begun, go_on = stuck_prefill
        async with asking(two, chat()) as task:
            await wait_for(begun)
            go_on.set()
            await self.left(two, task)

    async def test_between_prefill_and_decode(self, two: Two, after_prefill: list[Cut]) -> None:
        async with asking(two, chat()) as task:
            after_prefill.append(task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self.left(two, task)
        assert two.prefill.events["offered"] == 1

    async def test_during_the_transfer(self, two: Two, in_transfer: Events) -> None:
        stopped, go_on = in_transfer
        async with asking(two, chat()) as task:
            await wait_for(stopped)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            go_on.set()
            await self.left(two, task)

    async def test_while_it_decodes(self, two: Two) -> None:
        async with two.gateway.client.stream("POST", CHAT, json=chat(stream=True, max_tokens=60)) as answer:
            lines = answer.aiter_lines()
            for _ in range(6):
                await anext(lines)
        await self.left(two, asyncio.create_task(asyncio.sleep(0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"choices": [], "usage": {"prompt_tokens": 9}}, "no parameters"),
        ({"kv_transfer_params": "yes"}, "no parameters"),
        ({"kv_transfer_params": {}}, "no parameters"),
        ([1, 2], "no parameters"),
        (b"<html>", "not JSON"),
    ],
)
async def test_a_prefill_side_that_talks_nonsense_is_done_without(said: Any, why: str) -> None:
    async with StubUpstream(models=("m1",)) as prefill, StubUpstream(models=("m1",)) as decode:
        prefill.always(body(said) if isinstance(said, bytes) else json_body(said))
        decode.always(answer("right"))
        roles = [upstream(prefill.url, "p", role="prefill"), upstream(decode.url, "d", role="decode")]
        async with running_gateway({"upstreams": roles, **SETTINGS}) as gateway:
            got = await gateway.client.post(CHAT, json=chat(model="m1"))
        assert got.json()["choices"][0]["message"]["content"] == "right"
        assert route(got) == f'whole="prefill failed: {why}"'
        assert "kv_transfer_params" not in decode.calls[-1].json


async def test_a_decode_side_that_refuses_the_parameters_is_asked_for_the_whole() -> None:
    async with StubUpstream(models=("m1",)) as prefill, StubUpstream(models=("m1",)) as decode:
        prefill.always(json_body({"kv_transfer_params": {"remote_port": "many"}}))
        decode.reply(error(400), answer("right"))
        roles = [upstream(prefill.url, "p", role="prefill"), upstream(decode.url, "d", role="decode")]
        async with running_gateway({"upstreams": roles, **SETTINGS}) as gateway:
            got = await gateway.client.post(CHAT, json=chat(model="m1"))
        assert got.json()["choices"][0]["message"]["content"] == "right"
        assert route(got) == 'whole="decode failed: status 400"'


def _choices(said: Any) -> Any:
    events = said if isinstance(said, list) else [said]
    return [event["choices"] for event in events]
