"""The official OpenAI client, sync and async, stream and plain, reads misses and hits alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from gateway.dialects import DIALECTS
from loadtest.stub_upstream import Call, Reply, StubUpstream, events, json_body, known_vector
from tests.gateway.dialects.reading import stream_of
from tests.harness import Running, running_gateway, upstream

CHAT, RESPONSES = DIALECTS["/v1/chat/completions"], DIALECTS["/v1/responses"]
Read = Callable[[Running, dict[str, Any]], Any]


class Weather(BaseModel):
    city: str
    celsius: int


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
]
JSON_TEXT = '{"city": "Paris", "celsius": 21}'


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


def speaks(dialect: Any, message: Mapping[str, Any]) -> Callable[[Call], Reply]:
    """An upstream that always gives this message, in the form that is asked for."""

    def reply(call: Call) -> Reply:
        body = {"id": f"upstream-{call.number}", "created": 1, "created_at": 1, **message}
        if not call.json.get("stream"):
            return json_body(body)
        return events(*(part + b"\n\n" for part in stream_of(dialect, message, call.json).split(b"\n\n")[:-1]))

    return reply


@asynccontextmanager
async def gateway_before(script: Callable[[Call], Reply] | None = None) -> AsyncIterator[tuple[StubUpstream, Running]]:
    async with StubUpstream() as u:
        if script is not None:
            u.always(script)
        async with running_gateway({"upstreams": [upstream(u.url, models=["m1"])]}) as gateway:
            yield u, gateway


def client(gateway: Running) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=http)


def async_client(gateway: Running) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=http)


def chat_body(more: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": "m1", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **more}


def shown(answer: BaseModel) -> dict[str, Any]:
    """An answer without its identity and the helper's own fields."""
    whole = orjson.loads(answer.model_dump_json(exclude={"id", "created", "created_at"}))
    return said_only(whole)


def said_only(value: Any) -> Any:
    """A message without nulls, and without what the client adds of its own."""
    if isinstance(value, dict):
        added = ("parsed", "parsed_arguments", "index")
        return {k: said_only(v) for k, v in value.items() if k not in added and v is not None}
    return [said_only(item) for item in value] if isinstance(value, list) else value


async def chat_async_plain(gateway: Running, body: dict[str, Any]) -> Any:
    async with async_client(gateway) as c:
        return shown(await c.chat.completions.create(**body))


async def chat_sync_plain(gateway: Running, body: dict[str, Any]) -> Any:
    def read() -> Any:
        with client(gateway) as c:
            return shown(c.chat.completions.create(**body))

    return await asyncio.to_thread(read)


async def chat_async_stream(gateway: Running, body: dict[str, Any]) -> Any:
    async with (
        async_client(gateway) as c,
        c.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream,
    ):
        return shown(await stream.get_final_completion())


async def chat_sync_stream(gateway: Running, body: dict[str, Any]) -> Any:
    def read() -> Any:
        with client(gateway) as c, c.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
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
        with client(gateway) as c:
            return list(c.chat.completions.create(**chat_body({}), stream=True))

    async with gateway_before(speaks(CHAT, completion(content=text))) as (u, gateway), async_client(gateway) as c:
        for _ in range(2):
            check([chunk async for chunk in await c.chat.completions.create(**chat_body({}), stream=True)])
            check(await asyncio.to_thread(read_sync, gateway))
        assert u.n == 1


async def test_structured_output_is_parsed_from_misses_and_hits() -> None:
    async with (
        gateway_before(speaks(CHAT, completion(content=JSON_TEXT))) as (u, gateway),
        async_client(gateway) as c,
    ):
        for _ in range(2):
            answer = await c.chat.completions.parse(**chat_body({}), response_format=Weather)
            assert answer.choices[0].message.parsed == Weather(city="Paris", celsius=21)
        assert u.n == 1


async def test_a_stream_that_breaks_raises_in_the_client() -> None:  # O-27
    def broken(call: Call) -> Reply:
        return speaks(CHAT, completion(content="one two three four five six seven"))(call).cut(after=2, then="close")

    async with gateway_before(broken) as (u, gateway), async_client(gateway) as c:
        for _ in range(2):
            with pytest.raises(openai.APIError, match="mid-stream"):
                _ = [chunk async for chunk in await c.chat.completions.create(**chat_body({}), stream=True)]
        assert u.n == 2


# Completions


async def test_completions_are_read_alike_in_both_forms() -> None:
    body = {"model": "m1", "prompt": "Hi", "temperature": 0}
    async with gateway_before() as (u, gateway), async_client(gateway) as c:
        plain = [(await c.completions.create(**body)).choices[0].text for _ in range(2)]
        streamed = [chunk async for chunk in await c.completions.create(**body, stream=True)]
        assert plain == ["ans-1", "ans-1"]
        assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == "ans-1"
        assert u.n == 1


# Responses


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
    async with async_client(gateway) as c:
        return shown(await c.responses.create(**response_body()))


async def response_async_stream(gateway: Running) -> Any:
    async with async_client(gateway) as c, c.responses.stream(**response_body()) as stream:
        return shown(await stream.get_final_response())


async def response_sync_plain(gateway: Running) -> Any:
    def read() -> Any:
        with client(gateway) as c:
            return shown(c.responses.create(**response_body()))

    return await asyncio.to_thread(read)


async def response_sync_stream(gateway: Running) -> Any:
    def read() -> Any:
        with client(gateway) as c, c.responses.stream(**response_body()) as stream:
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
    async with gateway_before(speaks(RESPONSES, response(said(text)))) as (_, gateway), async_client(gateway) as c:
        for _ in range(2):
            async with c.responses.stream(**response_body()) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert "".join(deltas) == text and len(deltas) >= 3


async def test_structured_output_of_a_response_is_parsed_from_misses_and_hits() -> None:
    async with (
        gateway_before(speaks(RESPONSES, response(said(JSON_TEXT)))) as (u, gateway),
        async_client(gateway) as c,
    ):
        for _ in range(2):
            answer = await c.responses.parse(**response_body(), text_format=Weather)
            assert answer.output_parsed == Weather(city="Paris", celsius=21)
        assert u.n == 1


async def test_a_response_kept_upstream_is_asked_for_each_time() -> None:
    async with gateway_before() as (u, gateway), async_client(gateway) as c:
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

    async with gateway_before(broken) as (u, gateway), async_client(gateway) as c:
        for _ in range(2):
            read = [event async for event in await c.responses.create(**response_body(), stream=True)]
            assert [event.type for event in read].count("error") == 1
            assert read[-1].type == "error" and "mid-stream" in read[-1].message
        assert u.n == 2


# Embeddings


async def test_embeddings_through_the_client_with_its_own_encoding() -> None:
    async with gateway_before() as (u, gateway), async_client(gateway) as c:
        for texts in (["a"], ["b", "a", "c"], ["a", "b", "a"]):
            answer = await c.embeddings.create(model="m1", input=texts)
            assert [vector.embedding for vector in answer.data] == [known_vector(text) for text in texts]
            assert [vector.index for vector in answer.data] == list(range(len(texts)))
            assert answer.usage.prompt_tokens == 10 * len(texts)
        assert [call.json["input"] for call in u.calls] == [["a"], ["b", "c"]]
