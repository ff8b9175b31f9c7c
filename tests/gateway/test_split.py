"""Requests split over a prefill and a decode upstream: the same answer as whole, and every request says what it was."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.gateway.nodes import CHAT, LONG, SETTINGS, TEXT, Two, chat, node, plain, route
from tests.harness import running_gateway

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (CHAT, chat()),
    "stream": (CHAT, chat(stream=True)),
    "stream with usage": (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "logprobs": (CHAT, chat(logprobs=True, top_logprobs=3)),
    "min_tokens": (CHAT, chat(min_tokens=10, ignore_eos=False, logit_bias={"256": 100})),
    "stop": (CHAT, chat(stop=["e", "\n"], max_tokens=60)),
    "max_completion_tokens": (CHAT, chat(max_completion_tokens=3)),
    "guided": (CHAT, chat(response_format={"type": "json_object"}, ignore_eos=False, max_tokens=30)),
    "tools": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])),
    "sampled": (CHAT, chat(temperature=0.9, top_p=0.8, seed=11, repetition_penalty=1.1)),
    "text": (TEXT, {"model": "tiny", "prompt": LONG, "max_tokens": 9, "temperature": 0, "logprobs": 2}),
    "text, streamed": (TEXT, {"model": "tiny", "prompt": LONG, "temperature": 0, "stream": True}),
    "token ids": (TEXT, {"model": "tiny", "prompt": list(LONG.encode()), "temperature": 0, "n": 1}),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_o68_a_split_answer_is_the_whole_answer(two: Two, name: str) -> None:
    path, body = REQUESTS[name]
    whole = await two.alone.post(path, json=body)
    split = await two.ask(body, path)
    assert split.status_code == whole.status_code == 200, split.text
    assert route(split) == "split=prefill"
    assert plain(split) == plain(whole)
    assert two.decode.core.counters.computed_tokens == 0
    assert two.prefill.core.counters.generated_tokens == 1


async def test_o68_a_stop_at_the_first_token_ends_it_there(two: Two) -> None:
    first = (await two.alone.post(CHAT, json=chat(max_tokens=2))).json()["choices"][0]["message"]["content"]
    body = chat(stop=[first[0]], max_tokens=20)
    split = await two.ask(body)
    assert route(split) == "split=prefill"
    assert plain(split) == plain(await two.alone.post(CHAT, json={**body, "cache_salt": "x"}))
    assert split.json()["choices"][0]["finish_reason"] == "stop"


async def test_cached_tokens_are_what_the_whole_request_found(two: Two) -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    cached = []
    for more, fields in (("", {}), ("A fox.", {}), ("A cat.", streamed)):
        body = chat(messages=[{"role": "user", "content": LONG + more}], **fields)
        split, whole = await two.ask(body), await two.alone.post(CHAT, json=body)
        assert route(split) == "split=prefill"
        last = [answer[-1] if fields else answer for answer in (plain(split), plain(whole))]
        assert last[0]["usage"] == last[1]["usage"]
        cached.append(last[0]["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 136, 144]


@pytest.mark.parametrize(
    ("body", "path", "why"),
    [
        (chat(messages=[{"role": "user", "content": "Hi"}]), CHAT, "short"),
        (chat(max_tokens=1), CHAT, "one token"),
        (chat(store=True), CHAT, "side effects"),
        ({"model": "tiny", "prompt": [LONG, LONG + "!"]}, TEXT, "several prompts"),
        (chat(n=2, temperature=1.2), CHAT, "several answers"),
        (chat(prompt_logprobs=1), CHAT, "numbers of the prompt wanted"),
    ],
)
async def test_what_is_not_split_says_why(two: Two, body: dict[str, Any], path: str, why: str) -> None:
    answer = await two.ask(body, path)
    assert answer.status_code == 200, answer.text
    assert route(answer) == f'whole="{why}"'
    assert not two.prefill.core.counters.prompt_tokens
    metrics = (await two.gateway.client.get("/metrics")).text
    assert f'warmgate_splits_total{{result="{why}",worker=' in metrics


async def test_what_the_decode_side_holds_stays_whole(two: Two) -> None:
    body = chat(messages=[{"role": "user", "content": LONG + "\n" * 60}])
    assert route(await two.ask(body)) == "split=prefill"
    assert route(await two.ask({**body, "max_tokens": 11})) == 'whole="warm"'
    assert two.prefill.events["offered"] == 1


async def test_an_error_of_the_caller_is_told_as_it_is(two: Two) -> None:
    body = chat(temperature=5)
    split, whole = await two.ask(body), await two.alone.post(CHAT, json=body)
    assert (split.status_code, split.json()) == (whole.status_code, whole.json())
    assert route(split) == 'whole="prefill failed: status 400"'


async def test_a_callers_own_parameters_are_not_sent(two: Two) -> None:
    lie = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": "00" * 16}
    answer = await two.ask(chat(kv_transfer_params=lie, messages=[{"role": "user", "content": "Hi"}]))
    assert answer.status_code == 200
    assert not two.decode.events


@pytest.mark.parametrize(
    ("enabled", "roles", "mark"),
    [("off", ("prefill", "decode"), ""), ("auto", ("decode",), ""), ("on", ("decode",), 'whole="no prefill pool"')],
)
async def test_without_pools_or_by_order_all_is_whole(enabled: str, roles: tuple[str, ...], mark: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node(role)) for role in roles]
        settings = {"upstreams": [each.upstream() for each in nodes], "disaggregation": {"enabled": enabled}}
        gateway = await stack.enter_async_context(running_gateway({**SETTINGS, **settings}))
        answer = await gateway.client.post(CHAT, json=chat())
        assert answer.headers["x-warmgate-upstream"] == "decode"
        assert answer.headers["x-warmgate-route"].partition("; ")[2] == mark


async def test_the_ledger_counts_each_side_once(two: Two) -> None:
    calls: list[Any] = []
    two.gateway.app.runtime.relay._spent = calls.append
    whole = (await two.ask(chat())).json()["usage"]
    told = {call.upstream: call.usage for call in calls}
    assert told == {
        "prefill": {"prompt": whole["prompt_tokens"], "output": 0, "cached": 0},
        "decode": {"prompt": 0, "output": whole["completion_tokens"], "cached": 0},
    }
    for member in two.gateway.app.runtime.pool.members:
        assert (member.in_flight, member.engine.running, member.engine.pending) == (0, 0, 0)
