"""The official Anthropic client, sync and async, stream and plain, reads misses and hits alike."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from gateway.dialects import DIALECTS
from loadtest.stub_upstream import Call, Reply, error, json_body
from tests.gateway.dialects.clients import (
    JSON_TEXT,
    Weather,
    anthropic_client,
    async_anthropic_client,
    gateway_before,
    said_only,
    shown,
    speaks,
)
from tests.harness import Running

MESSAGES = DIALECTS["/v1/messages"]
CITATION = {
    "type": "char_location",
    "cited_text": "x",
    "document_index": 0,
    "document_title": "t",
    "start_char_index": 0,
    "end_char_index": 1,
}


def message(*content: dict[str, Any], stop: str = "end_turn") -> dict[str, Any]:
    usage = {"input_tokens": 50, "cache_read_input_tokens": 2400, "cache_creation_input_tokens": 120}
    return {
        "type": "message",
        "role": "assistant",
        "model": "m1",
        "content": list(content),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 9},
    }


THOUGHT = {"type": "thinking", "thinking": "Two and two make four, as they always have.", "signature": "SIG=="}
CASES = {
    "text": message({"type": "text", "text": "Bonjour 你好🙂, and welcome to a text of more than one piece."}),
    "citations": message({"type": "text", "text": "As it is written.", "citations": [CITATION, CITATION]}),
    "tools": message(
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_a", "name": "weather", "input": {"city": "Paris", "days": [1, 2.5]}},
        {"type": "tool_use", "id": "toolu_b", "name": "now", "input": {}},
        stop="tool_use",
    ),
    "reasoning": message(THOUGHT, {"type": "redacted_thinking", "data": "SECRET"}, {"type": "text", "text": "Four."}),
    "json": message({"type": "text", "text": JSON_TEXT}),
}
BODY: dict[str, Any] = {
    "model": "m1",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hi"}],
    "extra_body": {"temperature": 0},
}


async def async_plain(gateway: Running) -> Any:
    async with async_anthropic_client(gateway) as c:
        return shown(await c.messages.create(**BODY))


async def async_stream(gateway: Running) -> Any:
    async with async_anthropic_client(gateway) as c, c.messages.stream(**BODY) as stream:
        return shown(await stream.get_final_message())


async def sync_plain(gateway: Running) -> Any:
    def read() -> Any:
        with anthropic_client(gateway) as c:
            return shown(c.messages.create(**BODY))

    return await asyncio.to_thread(read)


async def sync_stream(gateway: Running) -> Any:
    def read() -> Any:
        with anthropic_client(gateway) as c, c.messages.stream(**BODY) as stream:
            return shown(stream.get_final_message())

    return await asyncio.to_thread(read)


READERS: dict[str, Any] = {
    "async plain": async_plain,
    "async stream": async_stream,
    "sync plain": sync_plain,
    "sync stream": sync_stream,
}


@pytest.mark.parametrize("first", ["async stream", "sync plain"])
@pytest.mark.parametrize("case", CASES)
async def test_messages_are_read_alike_by_every_reader_whoever_was_first(case: str, first: str) -> None:  # O-24, O-28
    whole = CASES[case]
    order = [first, *(name for name in READERS if name != first)]
    async with gateway_before(speaks(MESSAGES, whole)) as (u, gateway):
        read = [await READERS[name](gateway) for name in order]
        assert u.n == 1
    assert read == [said_only(whole)] * 4


async def test_streamed_text_comes_in_pieces_and_ids_are_fresh() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    async with (
        gateway_before(speaks(MESSAGES, message({"type": "text", "text": text}))) as (u, gateway),
        async_anthropic_client(gateway) as c,
    ):
        ids = set()
        for _ in range(3):
            async with c.messages.stream(**BODY) as stream:
                pieces = [piece async for piece in stream.text_stream]
                ids.add((await stream.get_final_message()).id)
            assert "".join(pieces) == text and len(pieces) >= 3
        assert len(ids) == 3 and u.n == 1


async def test_structured_output_is_parsed_from_misses_and_hits() -> None:
    async with gateway_before(speaks(MESSAGES, CASES["json"])) as (u, gateway), async_anthropic_client(gateway) as c:
        for _ in range(2):
            answer = await c.messages.parse(**BODY, output_format=Weather)
            assert answer.parsed_output == Weather(city="Paris", celsius=21)
        assert u.n == 1


async def test_versions_and_betas_reach_the_upstream_and_part_the_answers() -> None:  # O-52
    async with gateway_before(api="anthropic") as (u, gateway), async_anthropic_client(gateway) as c:
        heads = [{"anthropic-beta": "a"}, {"anthropic-beta": "b"}, {}, {"anthropic-version": "2099-01-01"}]
        for _ in range(2):
            for number, headers in enumerate(heads, 1):
                answer = await c.messages.create(**BODY, extra_headers=headers)
                assert [block.text for block in answer.content if block.type == "text"] == [f"ans-{number}"]
        assert u.n == 4
        assert [call.headers.get("anthropic-beta") for call in u.calls] == ["a", "b", None, None]
        versions = [call.headers["anthropic-version"] for call in u.calls]
        assert versions[:3] == [versions[0]] * 3 and versions[3] == "2099-01-01" != versions[0]


async def test_a_query_goes_upstream_and_into_the_key() -> None:
    body = {"model": "m1", "max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
    async with gateway_before(api="anthropic") as (u, gateway):
        for query in ("?beta=true", "", "?beta=true", ""):
            await gateway.client.post(f"/v1/messages{query}", json=body)
        assert [call.target for call in u.calls] == ["/v1/messages?beta=true", "/v1/messages"]


async def test_cache_marks_reach_the_upstream_byte_for_byte() -> None:
    body = (
        b'{"model": "m1", "max_tokens":5,\n "temperature": 0.0, "system": [{"type":"text", "text":"Be brief.", '
        b'"cache_control": {"type":"ephemeral"}}], "messages":[{"role":"user","content":"Hi"}]}'
    )
    async with gateway_before(api="anthropic") as (u, gateway):
        for _ in range(2):
            await gateway.client.post("/v1/messages", content=body, headers={"content-type": "application/json"})
        assert [call.body for call in u.calls] == [body]


async def test_a_refusal_is_asked_for_again() -> None:  # O-16
    replies = [message({"type": "text", "text": "No."}, stop="refusal"), CASES["text"]]

    def script(call: Call) -> Reply:
        return speaks(MESSAGES, replies[min(call.number, 2) - 1])(call)

    async with gateway_before(script) as (u, gateway):
        stops = [(await READERS[name](gateway))["stop_reason"] for name in READERS]
        assert stops == ["refusal", "end_turn", "end_turn", "end_turn"]
        assert u.n == 2


async def test_a_stream_that_breaks_raises_in_the_client() -> None:  # O-27
    def broken(call: Call) -> Reply:
        return speaks(MESSAGES, CASES["text"])(call).cut(after=4, then="close")

    async with gateway_before(broken) as (u, gateway), async_anthropic_client(gateway) as c:
        for _ in range(2):
            with pytest.raises(anthropic.APIError, match="mid-stream"):
                async with c.messages.stream(**BODY) as stream:
                    await stream.get_final_message()
        assert u.n == 2


async def test_errors_of_the_gateway_and_of_the_upstream_have_anthropics_form() -> None:
    async with gateway_before(api="anthropic") as (u, gateway), async_anthropic_client(gateway) as c:
        with pytest.raises(anthropic.NotFoundError) as raised:
            await c.messages.create(**{**BODY, "model": "unknown"})
        body: Any = raised.value.body
        assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
        assert body["request_id"] == raised.value.response.headers["x-request-id"]
        u.reply(error(529, "busy", "overloaded_error"))
        with pytest.raises(anthropic.APIStatusError) as busy:
            await c.messages.create(**BODY)
        assert busy.value.status_code == 529 and "busy" in str(busy.value)


async def test_token_counts_are_asked_for_once() -> None:
    async with gateway_before(lambda call: json_body({"input_tokens": 13 + call.number})) as (u, gateway):
        async with async_anthropic_client(gateway) as c:
            for _ in range(2):
                counted = await c.messages.count_tokens(model="m1", messages=[{"role": "user", "content": "Hi"}])
                assert counted.input_tokens == 14
            other = await c.messages.count_tokens(model="m1", messages=[{"role": "user", "content": "Ho"}])
            assert other.input_tokens == 15
        assert [call.path for call in u.calls] == ["/v1/messages/count_tokens"] * 2
