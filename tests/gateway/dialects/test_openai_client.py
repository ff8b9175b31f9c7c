"""The official OpenAI client, sync and async, stream and plain, reads misses and hits alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from gateway.dialects import DIALECTS
from loadtest.stub_upstream import Call, Reply, known_vector
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

CHAT = DIALECTS["/v1/chat/completions"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
]


def completion(finish: str = "stop", logprobs: Any = None, **message: Any) -> dict[str, Any]:
    whole = {"role": "assistant", "content": None, "refusal": None, **message}
    return {
        "object": "chat.completion",
        "model": "m1",
        "choices": [{"index": 0, "message": whole, "logprobs": logprobs, "finish_reason": finish}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 34, "total_tokens": 46},
    }


CHAT_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({}, completion(content="Bonjour 你好🙂, and welcome to a text of more than one piece.")),
    "tools": ({"tools": [TOOL]}, completion("tool_calls", tool_calls=CALLS)),
    "json mode": ({"response_format": {"type": "json_object"}}, completion(content=JSON_TEXT)),
    "reasoning": ({}, completion(content="Four.", reasoning_content="Two and two make four, as they always have.")),
    "log probabilities": (
        {"logprobs": True},
        completion(
            content="Hi",
            logprobs={
                "content": [{"token": "Hi", "logprob": -0.1, "bytes": [72, 105], "top_logprobs": []}],
                "refusal": None,
            },
        ),
    ),
    "vendor fields": ({}, completion(content="Hi", x_vendor={"a": [1, 2, {"b": None}]})),
}


def chat_body(more: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": "m1", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **more}


async def chat_async_plain(gateway: Running, body: dict[str, Any]) -> Any:
    async with async_openai_client(gateway) as c:
        return shown(await c.chat.completions.create(**body))


async def chat_sync_plain(gateway: Running, body: dict[str, Any]) -> Any:
    def read() -> Any:
        with openai_client(gateway) as c:
            return shown(c.chat.completions.create(**body))

    return await asyncio.to_thread(read)


async def chat_async_stream(gateway: Running, body: dict[str, Any]) -> Any:
    async with (
        async_openai_client(gateway) as c,
        c.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream,
    ):
        return shown(await stream.get_final_completion())


async def chat_sync_stream(gateway: Running, body: dict[str, Any]) -> Any:
    def read() -> Any:
        with (
            openai_client(gateway) as c,
            c.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream,
        ):
            return shown(stream.get_final_completion())

    return await asyncio.to_thread(read)


CHAT_READERS: dict[str, Any] = {
    "async plain": chat_async_plain,
    "sync plain": chat_sync_plain,
    "async stream": chat_async_stream,
    "sync stream": chat_sync_stream,
}


@pytest.mark.parametrize("first", ["async plain", "sync stream"])
@pytest.mark.parametrize("case", CHAT_CASES)
async def test_chat_is_read_alike_by_every_reader_whoever_was_first(case: str, first: str) -> None:  # O-22, O-24
    more, message = CHAT_CASES[case]
    order = [first, *(name for name in CHAT_READERS if name != first)]
    async with gateway_before(speaks(CHAT, message)) as (u, gateway):
        read = [await CHAT_READERS[name](gateway, chat_body(more)) for name in order]
        assert u.n == 1
    assert read == [said_only(message)] * 4


async def test_a_streamed_hit_comes_in_pieces_for_both_clients() -> None:  # O-23
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"

    def check(chunks: list[ChatCompletionChunk]) -> None:
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert sum(bool(choice.delta.content) for choice in choices) >= 3
        assert "".join(choice.delta.content or "" for choice in choices) == text
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
        assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1

    def read_sync(gateway: Running) -> list[ChatCompletionChunk]:
        with openai_client(gateway) as c:
            return list(c.chat.completions.create(**chat_body({}), stream=True))

    async with (
        gateway_before(speaks(CHAT, completion(content=text))) as (u, gateway),
        async_openai_client(gateway) as c,
    ):
        for _ in range(2):
            check([chunk async for chunk in await c.chat.completions.create(**chat_body({}), stream=True)])
            check(await asyncio.to_thread(read_sync, gateway))
        assert u.n == 1


async def test_structured_output_is_parsed_from_misses_and_hits() -> None:
    async with (
        gateway_before(speaks(CHAT, completion(content=JSON_TEXT))) as (u, gateway),
        async_openai_client(gateway) as c,
    ):
        for _ in range(2):
            answer = await c.chat.completions.parse(**chat_body({}), response_format=Weather)
            assert answer.choices[0].message.parsed == Weather(city="Paris", celsius=21)
        assert u.n == 1


async def test_a_stream_that_breaks_raises_in_the_client() -> None:  # O-27
    def broken(call: Call) -> Reply:
        return speaks(CHAT, completion(content="one two three four five six seven"))(call).cut(after=2, then="close")

    async with gateway_before(broken) as (u, gateway), async_openai_client(gateway) as c:
        for _ in range(2):
            with pytest.raises(openai.APIError, match="mid-stream"):
                _ = [chunk async for chunk in await c.chat.completions.create(**chat_body({}), stream=True)]
        assert u.n == 2


# Completions


async def test_completions_are_read_alike_in_both_forms() -> None:
    body = {"model": "m1", "prompt": "Hi", "temperature": 0}
    async with gateway_before() as (u, gateway), async_openai_client(gateway) as c:
        plain = [(await c.completions.create(**body)).choices[0].text for _ in range(2)]
        streamed = [chunk async for chunk in await c.completions.create(**body, stream=True)]
        assert plain == ["ans-1", "ans-1"]
        assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == "ans-1"
        assert u.n == 1


# Embeddings


async def test_embeddings_through_the_client_with_its_own_encoding() -> None:
    async with gateway_before() as (u, gateway), async_openai_client(gateway) as c:
        for texts in (["a"], ["b", "a", "c"], ["a", "b", "a"]):
            answer = await c.embeddings.create(model="m1", input=texts)
            assert [vector.embedding for vector in answer.data] == [known_vector(text) for text in texts]
            assert [vector.index for vector in answer.data] == list(range(len(texts)))
            assert answer.usage.prompt_tokens == 10 * len(texts)
        assert [call.json["input"] for call in u.calls] == [["a"], ["b", "c"]]
