"""The stub upstream answers as the real services do: their own SDKs understand it."""

import base64
import json
import struct
from typing import Literal

import anthropic
import httpx
import openai
import pytest

from loadtest.stub_upstream import StubUpstream, answer, known_vector
from tests.loadtest.stub_upstream.talk import CHAT, STREAM, URL, data_lines


async def test_plain_answers_are_numbered(u: StubUpstream, sdk: openai.AsyncOpenAI) -> None:
    for number in (1, 2):
        made = await sdk.chat.completions.create(**CHAT)
        assert made.choices[0].message.content == f"ans-{number}"
        assert (made.choices[0].finish_reason, made.model) == ("stop", "m1")
        assert made.usage is not None
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (10, 5)
    assert u.n == 2


async def test_streamed_chat(sdk: openai.AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**STREAM)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == "ans-1"
    assert sum(bool(d.content) for d in deltas) >= 2
    assert [d.role for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_a_stream_ends_with_done(http: httpx.AsyncClient) -> None:
    response = await http.post(URL, json=STREAM)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert data_lines(response.text).count("[DONE]") == 1
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("usage_as", "choices"),
    [
        ("separate", []),
        ("with_choice", [{"delta": {}, "finish_reason": None}]),
        ("merged", [{"finish_reason": "stop"}]),
    ],
)
async def test_streamed_usage_when_asked_for(
    u: StubUpstream,
    http: httpx.AsyncClient,
    usage_as: Literal["separate", "with_choice", "merged"],
    choices: list[dict[str, object]],
) -> None:
    u.always(answer(usage_as=usage_as))
    text = (await http.post(URL, json={**STREAM, "stream_options": {"include_usage": True}})).text
    chunks = [json.loads(line) for line in data_lines(text)[:-1]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["total_tokens"] == 15
    assert len(chunks[-1]["choices"]) == len(choices)
    assert all(want.items() <= got.items() for want, got in zip(choices, chunks[-1]["choices"], strict=True))


async def test_plain_and_streamed_completions(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.completions.create(model="m1", prompt="x")
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("ans-1", "stop")
    chunks = [chunk async for chunk in await sdk.completions.create(model="m1", prompt="x", stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ans-2"


async def test_plain_and_streamed_responses(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.responses.create(model="m1", input="x")
    assert (made.output_text, made.status) == ("ans-1", "completed")
    async with sdk.responses.stream(model="m1", input="x") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (final.output_text, final.status) == ("ans-2", "completed")
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens) == (10, 5)


async def test_plain_and_streamed_messages(u: StubUpstream, claude: anthropic.AsyncAnthropic) -> None:
    ask = {"model": "m1", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    made = await claude.messages.create(**ask)  # type: ignore[arg-type]
    assert (made.content[0].text, made.stop_reason) == ("ans-1", "end_turn")  # type: ignore[union-attr]
    async with claude.messages.stream(**ask) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == ("ans-2", "end_turn")  # type: ignore[union-attr]
    assert (final.usage.input_tokens, final.usage.output_tokens) == (10, 5)
    assert u.calls[0].headers["anthropic-version"]


@pytest.mark.parametrize("repeat", [False, True])
async def test_message_usage_comes_in_two_events(u: StubUpstream, http: httpx.AsyncClient, repeat: bool) -> None:
    usage = {
        "input_tokens": 50,
        "cache_read_input_tokens": 2400,
        "cache_creation_input_tokens": 120,
        "output_tokens": 9,
    }
    u.always(answer(usage=usage, repeat_usage=repeat))
    text = (await http.post("/v1/messages", json={"model": "m1", "stream": True})).text
    kinds = {event["type"]: event for event in map(json.loads, data_lines(text))}
    assert kinds["message_start"]["message"]["usage"] == {**usage, "output_tokens": 1}
    assert kinds["message_delta"]["usage"] == (usage if repeat else {"output_tokens": 9})


async def test_embeddings_are_known_from_the_text(u: StubUpstream, http: httpx.AsyncClient) -> None:
    made = (await http.post("/v1/embeddings", json={"model": "e", "input": ["b", "a", "b"]})).json()
    assert [item["index"] for item in made["data"]] == [0, 1, 2]
    assert [item["embedding"] for item in made["data"]] == [known_vector("b"), known_vector("a"), known_vector("b")]
    assert known_vector("a") != known_vector("b")
    one = {"model": "e", "input": "a", "dimensions": 3, "encoding_format": "base64"}
    packed = (await http.post("/v1/embeddings", json=one)).json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(packed))) == known_vector("a", 3)
    tokens = (await http.post("/v1/embeddings", json={"model": "e", "input": [[1, 2], [3]]})).json()
    assert [item["embedding"] for item in tokens["data"]] == [known_vector([1, 2]), known_vector([3])]
    assert len((await http.post("/v1/embeddings", json={"model": "e", "input": [1, 2]})).json()["data"]) == 1
    assert (await http.post("/v1/embeddings", json={"model": "e", "input": []})).status_code == 400
    assert u.n == 5


async def test_models_and_health_do_not_count(
    u: StubUpstream, sdk: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    assert [model.id async for model in sdk.models.list()] == ["m1"]
    assert (await sdk.models.retrieve("m1")).id == "m1"
    assert (await http.get("/health")).status_code == 200
    assert (u.n, [call.path for call in u.other_calls]) == (0, ["/v1/models", "/v1/models/m1", "/health"])


@pytest.mark.parametrize(
    "path", ["/chat/completions", "//chat/completions", "/v1/v1/chat/completions", URL + "/", "/v1"]
)
async def test_wrong_paths_are_counted_and_not_found(u: StubUpstream, http: httpx.AsyncClient, path: str) -> None:
    assert (await http.post(u.url + path, json=CHAT)).status_code == 404
    assert (u.n, u.calls[0].path) == (1, path)


async def test_another_base_path() -> None:
    async with StubUpstream(base_path="/api/x/v1") as u, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.post(u.url + "/api/x/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await http.post(u.url + URL, json=CHAT)).status_code == 404
