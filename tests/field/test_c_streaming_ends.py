"""Field cases, section C: how streams end, and what their usage is counted as."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import Bench, World, one_world
from tests.field.reading import ASKS, events_of, text_of_stream
from tests.field.test_c_streaming import STREAMED, anthropic_arguments
from tests.harness import upstream

SILENT = {"idle": "300ms"}
DEATHS = {
    "closed": answer().cut(after=3, then="close"),
    "ended": answer().cut(after=3, then="end"),
    "reset": answer().cut(after=3, then="reset"),
    "silent": answer().cut(after=3, then="stall"),
    "broken JSON": answer().swap(3, b'data: {"choices": [{"in\n\n'),
    "not an object": answer().swap(3, b"data: 17\n\n"),
    "broken gzip": answer().encoded("gzip").swap(3, b"\x00\xff" * 20),
}


@one_world
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("api", ASKS)
async def test_o27_an_upstream_that_dies_in_mid_stream_is_told_of_once_and_nothing_is_made_up(
    world: World, api: str, death: str
) -> None:
    path, ask = ASKS[api]
    ask = {**ask, "stream": True}
    async with StubUpstream() as u, StubUpstream() as other:
        for one in (u, other):
            one.always(DEATHS[death])
        both = [upstream(u.url, "a", timeouts=SILENT), upstream(other.url, "b", timeouts=SILENT)]
        async with world.bench(u, upstreams=both) as bench:
            reply = await bench.send(ask, path)
            events_seen = events_of(reply.response.content)
            errors = [event for event in events_seen if is_error(event.json if event.data != "[DONE]" else {})]
            assert len(errors) == 1
            assert errors[0] is events_seen[-1], "the error is the last"
            assert (errors[0].name == "error") == (api in ("messages", "responses"))
            assert len(events_seen) > 1, "what came before was passed on"
            for made_up in ("[DONE]", "message_stop", "response.completed", '"finish_reason":"'):
                assert made_up not in reply.response.text
            assert u.n + other.n == 1, "no retry after the first byte"
            assert bench.stored == 0
            assert (await bench.outcomes()) == {"error": 1}
            for one in (u, other):
                one.always(answer(deltas=["one ", "two ", "three "]))
            again = await bench.send(ask, path)
            assert u.n + other.n == 2
            assert again.text == "one two three "
            assert (await bench.hit(ask, path)).text == again.text


def is_error(event: dict[str, Any]) -> bool:
    return bool(event.get("error")) or event.get("type") == "error"


@one_world
async def test_o27_the_clients_raise_on_it(bench: Bench) -> None:
    bench.u.reply(answer().cut(after=3), answer().cut(after=4))
    async with openai.AsyncOpenAI(base_url=f"{bench.gateway.url}/v1", api_key="k", max_retries=0) as client:
        ask: Any = STREAMED
        with pytest.raises(openai.APIError, match="mid-stream"):
            async for _ in await client.chat.completions.create(**ask):
                pass
    async with anthropic.AsyncAnthropic(base_url=bench.gateway.url, api_key="k", max_retries=0) as client:
        ask = anthropic_arguments()
        with pytest.raises(anthropic.APIStatusError, match="mid-stream"):
            async with client.messages.stream(**ask) as stream:
                await stream.get_final_message()


@one_world
async def test_o27_a_dead_upstream_before_the_first_byte_is_a_plain_error(bench: Bench) -> None:
    bench.u.reply(answer().cut(after=0, then="reset"))
    reply = await bench.miss(STREAMED)
    assert "[DONE]" not in reply.response.text
    assert is_error(reply.events[0] if reply.streamed else reply.response.json())
    assert bench.stored == 0


@pytest.mark.parametrize("repeat", [False, True], ids=["apart", "repeated"])
async def test_o28_usage_spread_over_two_events_is_counted_once(bench: Bench, repeat: bool) -> None:
    path, ask = ASKS["messages"]
    usage = {"input_tokens": 50, "cache_read_input_tokens": 2400, "cache_creation_input_tokens": 120}
    bench.u.reply(answer(deltas=["Hel", "lo"], usage={**usage, "output_tokens": 9}, repeat_usage=repeat))
    streamed = {**ask, "stream": True}
    missed, hit = await bench.miss(streamed, path), await bench.hit(streamed, path)
    for reply in (missed, hit):
        kinds = [event["type"] for event in reply.events if event["type"] not in ("ping", "content_block_delta")]
        assert kinds == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert text_of_stream(reply.response.content) == "Hello"
        read: dict[str, int] = {}
        for event in reply.events:
            read |= event.get("usage") or event.get("message", {}).get("usage") or {}
        assert read == {**usage, "output_tokens": 9}
    assert (await bench.hit(ask, path)).response.json()["usage"] == {**usage, "output_tokens": 9}
    for row in await bench.rows():
        assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (2570, 2400, 9)
    spent = await bench.spent()
    assert (spent["computed"], spent["cached"], spent["cache_write"], spent["output"]) == (170, 2400, 120, 9)
    assert json.loads(hit.response.content.split(b"data: ")[1].split(b"\n")[0])["message"]["id"] != "msg_stub_1"
