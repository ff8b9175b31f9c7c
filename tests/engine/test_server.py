"""The engine's HTTP surface over a tiny model: OpenAI's forms, errors that name the field, streaming, cancelling."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch

from engine.core import Generation
from engine.errors import RequestError
from engine.sampling import Sampler
from engine.server import EngineApp, bind
from engine.worker import Worker
from tests.engine import tiny

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(tiny.config(), opener=lambda _: tiny.files())
    ready = asyncio.Event()
    worker.start(on_ready=ready.set, on_failure=ready.set)
    await ready.wait()
    assert worker.failure is None
    yield worker
    worker.stop()
    worker.core.check_integrity()
    assert worker.core.manager.free == worker.core.manager.total


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(EngineApp(worker).asgi)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 12}
    return chat | {"ignore_eos": True} | fields


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_answer_has_openais_form(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json=body())).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


async def test_a_stream_joins_to_the_plain_answer(client: httpx.AsyncClient) -> None:
    plain = (await client.post(CHAT, json=body())).json()
    got = events(await client.post(CHAT, json=body(stream=True, stream_options={"include_usage": True})))
    deltas = [event["choices"][0]["delta"] for event in got if event["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(d.get("content", "") for d in deltas) == plain["choices"][0]["message"]["content"]
    assert [e["choices"][0]["finish_reason"] for e in got if e["choices"]].count("length") == 1
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert len({event["id"] for event in got}) == 1


async def test_usage_is_streamed_only_when_asked_for(client: httpx.AsyncClient) -> None:
    got = events(await client.post(CHAT, json=body(stream=True)))
    assert all(event["choices"] and "usage" not in event for event in got)


async def test_text_completions_take_texts_and_token_ids(client: httpx.AsyncClient) -> None:
    ask = {"model": "tiny", "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    as_text = (await client.post(TEXT, json={**ask, "prompt": "abc"})).json()
    ids = tiny.tokenizer().encode("abc")
    as_ids = (await client.post(TEXT, json={**ask, "prompt": ids})).json()
    both = (await client.post(TEXT, json={**ask, "prompt": ["abc", "abc"], "n": 2})).json()
    assert as_text["object"] == "text_completion"
    assert as_ids["choices"][0]["text"] == as_text["choices"][0]["text"]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in both["choices"]} == {as_text["choices"][0]["text"]}


async def test_logprobs_cover_every_token(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json=body(logprobs=True, top_logprobs=3))).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0  # greedy takes the likeliest
    got = events(await client.post(CHAT, json=body(logprobs=True, top_logprobs=3, stream=True)))
    streamed = [e for event in got for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_a_seed_repeats_and_choices_differ(client: httpx.AsyncClient) -> None:
    ask = body(temperature=1.5, seed=7, n=3)
    one, two = [(await client.post(CHAT, json=ask)).json() for _ in range(2)]
    texts = [choice["message"]["content"] for choice in one["choices"]]
    assert texts == [choice["message"]["content"] for choice in two["choices"]]
    assert len(set(texts)) == 3


async def test_cached_tokens_are_reported_and_a_reset_forgets_them(client: httpx.AsyncClient) -> None:
    ask = body(messages=[{"role": "user", "content": "x" * 40}], max_tokens=1)

    async def cached() -> int:
        answer = (await client.post(CHAT, json=ask)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() >= 40
    assert (await client.post("/reset_prefix_cache")).status_code == 200
    assert await cached() == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 200}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json=body(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"model":"\\ud835"}', b'{"model":NaN}'])
async def test_a_broken_body_is_a_400(client: httpx.AsyncClient, raw: bytes) -> None:
    response = await client.post(CHAT, content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=body(model="gpt-9"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_unknown_paths_and_methods_keep_the_error_form(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await client.get(CHAT)).status_code == 405


async def test_harmless_fields_are_ignored(client: httpx.AsyncClient) -> None:
    extra = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "x_unknown": [1]}
    plain, more = [(await client.post(CHAT, json=body(**fields))).json() for fields in ({}, extra)]
    assert plain["choices"] == more["choices"]


async def test_content_parts_of_text_are_joined(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    joined = (await client.post(CHAT, json=body(messages=[{"role": "user", "content": parts}]))).json()
    assert joined["choices"] == (await client.post(CHAT, json=body())).json()["choices"]


async def test_o37_an_image_is_a_clear_400(client: httpx.AsyncClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    parts = [{"type": "text", "text": "What is it?"}, image]
    response = await client.post(CHAT, json=body(messages=[{"role": "user", "content": parts}]))
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]


@pytest.mark.parametrize("length", [256, 257, 2000])
async def test_o66_a_prompt_over_the_context_is_a_400_and_nothing_is_kept(
    client: httpx.AsyncClient, worker: Worker, length: int
) -> None:
    response = await client.post(TEXT, json={"model": "tiny", "prompt": "x" * length})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert worker.core.counters.prompt_tokens == 0


async def test_an_answer_longer_than_the_context_allows_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json={"model": "tiny", "prompt": "x" * 200, "max_tokens": 57})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_without_a_limit_the_answer_ends_with_the_context(client: httpx.AsyncClient) -> None:
    ask = body(messages=[{"role": "user", "content": "x" * 150}])
    del ask["max_tokens"]
    answer = (await client.post(CHAT, json=ask)).json()
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_models_health_and_metrics(client: httpx.AsyncClient) -> None:
    [card] = (await client.get("/v1/models")).json()["data"]
    assert card["id"] == "tiny"
    assert (await client.get("/v1/models/tiny")).status_code == 200
    assert (await client.get("/v1/models/other")).status_code == 404
    assert (await client.get("/health")).status_code == 200
    await client.post(CHAT, json=body())
    metrics = (await client.get("/metrics")).text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 12.0' in metrics
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in metrics


async def test_while_loading_requests_get_a_503(worker: Worker, client: httpx.AsyncClient) -> None:
    worker.ready = False
    assert (await client.get("/health")).status_code == 503
    response = await client.post(CHAT, json=body())
    assert response.status_code == 503
    assert "retry-after" in response.headers
    worker.ready = True


async def test_a_closed_stream_cancels_the_generation(worker: Worker) -> None:
    prompt = tiny.tokenizer().encode("abc")
    stream = worker.generate(Generation("left", prompt, 200, ignore_eos=True))
    await anext(stream)
    await stream.aclose()
    await worker.ask(lambda: None)
    assert worker.core.jobs() == []
    assert worker.core.counters.finished == {"abort": 1}


async def test_a_failing_step_is_a_500_and_the_engine_lives_on(
    worker: Worker, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(step: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(worker.core.runner, "run", explode)
        response = await client.post(CHAT, json=body())
        assert response.status_code == 500
        assert "boom" not in response.text
    assert (await client.post(CHAT, json=body())).status_code == 200


async def test_a_request_that_cannot_be_taken_in_is_a_500(
    worker: Worker, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(worker.core, "add", explode)
        assert (await client.post(CHAT, json=body())).status_code == 500
    assert (await client.post(CHAT, json=body())).status_code == 200


async def test_too_many_prompts_are_refused_before_any_is_taken_in(client: httpx.AsyncClient) -> None:
    for many in (["a"] * 1025, [[1]] * 1025):
        response = await client.post(TEXT, json={"model": "tiny", "prompt": many})
        assert response.status_code == 400
        assert "1024" in response.json()["error"]["message"]
    assert (await client.post(TEXT, json={"model": "tiny", "prompt": [1] * 200})).status_code == 200


async def test_a_request_whose_token_cannot_be_chosen_fails_alone(
    worker: Worker, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Sampler.choose

    def choose(sampler: Sampler, logits: torch.Tensor) -> int:
        if sampler.params.seed == 13:
            raise RuntimeError("boom")
        return usual(sampler, logits)

    monkeypatch.setattr(Sampler, "choose", choose)
    good, bad = (client.post(CHAT, json=body(seed=seed, max_tokens=50)) for seed in (12, 13))
    assert [answer.status_code for answer in await asyncio.gather(good, bad)] == [200, 500]
    assert worker.core.counters.finished == {"length": 1, "error": 1}
    assert worker.core.manager.free == worker.core.pool.blocks


async def test_an_engine_that_cannot_even_give_up_a_step_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, ended = Worker(tiny.config(), opener=lambda _: tiny.files()), asyncio.Event()
    ready = asyncio.Event()
    worker.start(on_ready=ready.set, on_failure=ended.set)
    await ready.wait()

    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(worker.core.runner, "run", explode)
    monkeypatch.setattr(worker.core, "cancel", explode)
    with pytest.raises(RequestError, match="engine failed"):
        await anext(worker.generate(Generation("first", tiny.tokenizer().encode("abc"), 5)))
    await ended.wait()
    assert worker.broken and not worker.ready
    worker.stop()


async def test_what_is_sent_goes_out_at_once() -> None:
    """Held back until what went before is acknowledged, each event of a stream could take 40 ms."""
    sent: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=bind("127.0.0.1", 0)) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await sent
        writer.close()
