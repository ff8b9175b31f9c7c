"""The official OpenAI client reads responses alike, sync and async, stream and plain, missed and hit."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gateway.dialects import DIALECTS
from loadtest.stub_upstream import Call, Reply
from tests.gateway.dialects.clients import (
    JSON_TEXT,
    Weather,
    async_openai_client,
    gateway_before,
    openai_client,
    said_only,
    shown,
    speaks,
)
from tests.harness import Running

RESPONSES = DIALECTS["/v1/responses"]


def response(*output: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "m1",
        "output": list(output),
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 34,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 46,
        },
    }


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


REASONED = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "I added two and two, slowly and with care."}],
    "encrypted_content": "ENC",
    "status": "completed",
}
FUNCTION_CALL = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"city": "Paris", "unit": "celsius"}',
    "status": "completed",
}
RESPONSE_CASES = {
    "text": response(said("Bonjour 你好🙂, and welcome to a text of more than one piece.")),
    "tools": response(FUNCTION_CALL, {**FUNCTION_CALL, "id": "fc_2", "call_id": "call_2"}),
    "reasoning": response(REASONED, said("Four.")),
    "json": response(said(JSON_TEXT)),
}


def response_body() -> dict[str, Any]:
    return {"model": "m1", "input": "Hi", "temperature": 0, "store": False}


async def response_async_plain(gateway: Running) -> Any:
    async with async_openai_client(gateway) as c:
        return shown(await c.responses.create(**response_body()))


async def response_async_stream(gateway: Running) -> Any:
    async with async_openai_client(gateway) as c, c.responses.stream(**response_body()) as stream:
        return shown(await stream.get_final_response())


async def response_sync_plain(gateway: Running) -> Any:
    def read() -> Any:
        with openai_client(gateway) as c:
            return shown(c.responses.create(**response_body()))

    return await asyncio.to_thread(read)


async def response_sync_stream(gateway: Running) -> Any:
    def read() -> Any:
        with openai_client(gateway) as c, c.responses.stream(**response_body()) as stream:
            return shown(stream.get_final_response())

    return await asyncio.to_thread(read)


RESPONSE_READERS: dict[str, Any] = {
    "async plain": response_async_plain,
    "async stream": response_async_stream,
    "sync plain": response_sync_plain,
    "sync stream": response_sync_stream,
}


@pytest.mark.parametrize("first", ["async plain", "sync stream"])
@pytest.mark.parametrize("case", RESPONSE_CASES)
async def test_responses_are_read_alike_by_every_reader_whoever_was_first(case: str, first: str) -> None:  # O-24
    message = RESPONSE_CASES[case]
    order = [first, *(name for name in RESPONSE_READERS if name != first)]
    async with gateway_before(speaks(RESPONSES, message)) as (u, gateway):
        read = [await RESPONSE_READERS[name](gateway) for name in order]
        assert u.n == 1
    expected = {**said_only(message), "store": False}
    assert [{"store": False, **answer} for answer in read] == [expected] * 4


async def test_streamed_text_of_a_response_grows_piece_by_piece() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    async with (
        gateway_before(speaks(RESPONSES, response(said(text)))) as (_, gateway),
        async_openai_client(gateway) as c,
    ):
        for _ in range(2):
            async with c.responses.stream(**response_body()) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert "".join(deltas) == text and len(deltas) >= 3


async def test_structured_output_of_a_response_is_parsed_from_misses_and_hits() -> None:
    async with (
        gateway_before(speaks(RESPONSES, response(said(JSON_TEXT)))) as (u, gateway),
        async_openai_client(gateway) as c,
    ):
        for _ in range(2):
            answer = await c.responses.parse(**response_body(), text_format=Weather)
            assert answer.output_parsed == Weather(city="Paris", celsius=21)
        assert u.n == 1


async def test_a_response_kept_upstream_is_asked_for_each_time() -> None:
    async with gateway_before() as (u, gateway), async_openai_client(gateway) as c:
        for store in (None, True, openai.omit):
            for _ in range(2):
                await c.responses.create(model="m1", input="Hi", temperature=0, store=store)
        assert u.n == 6
        for _ in range(2):
            await c.responses.create(model="m1", input="Hi", temperature=0, extra_headers={"x-warmgate-ttl": "60"})
        assert u.n == 7


async def test_a_broken_stream_of_a_response_ends_with_an_error_in_the_client() -> None:
    def broken(call: Call) -> Reply:
        return speaks(RESPONSES, response(said("one two three")))(call).cut(after=5, then="close")

    async with gateway_before(broken) as (u, gateway), async_openai_client(gateway) as c:
        for _ in range(2):
            read = [event async for event in await c.responses.create(**response_body(), stream=True)]
            assert [event.type for event in read].count("error") == 1
            assert read[-1].type == "error" and "mid-stream" in read[-1].message
        assert u.n == 2
