"""Field cases, section C: streams, passed on as they come and given again from the cache."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anthropic
import openai
import orjson
import pytest

from loadtest.stub_upstream import answer, delta, events, json_body
from loadtest.stub_upstream.answers import UsageAs
from tests.field.conftest import B, Bench, both_paths, one_world
from tests.field.reading import ASKS, events_of, json_events, message_of_chunks

STREAMED = B | {"stream": True}
WITH_USAGE = STREAMED | {"stream_options": {"include_usage": True}}
DONE = b"data: [DONE]"


def data(event: dict[str, Any], after: bytes = b" ") -> bytes:
    """A ``data:`` line in JSON, characters as they are."""
    return b"data:" + after + orjson.dumps(event)


def stream_of(*blocks: bytes, end: bytes = b"\n") -> bytes:
    """Blocks of lines as a stream with this line end."""
    return b"".join(block.replace(b"\n", end) + end + end for block in blocks)


def spoken(*texts: str) -> list[bytes]:
    """Chunks that say these texts and end well."""
    chunks = [delta(role="assistant", content=""), *(delta(content=text) for text in texts), delta("stop")]
    return [*(data(chunk) for chunk in chunks), DONE]


GREETING = "你好🙂 é — ✓"


@one_world
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("pieces", ["bytes", "pairs", "random", "one write"])
async def test_o20_characters_and_line_ends_may_be_cut_anywhere(bench: Bench, end: bytes, pieces: str) -> None:
    whole = stream_of(*spoken(*GREETING.split(" ")), end=end)
    offsets = {
        "bytes": range(1, len(whole)),
        "pairs": range(2, len(whole), 2),
        "random": sorted(random.Random(20).sample(range(1, len(whole)), 40)),
        "one write": (),
    }
    bench.u.reply(events(whole).regroup(at=list(offsets[pieces])))
    missed = await bench.miss(WITH_USAGE)
    assert missed.response.content == whole
    for ask in (STREAMED, B):
        hit = await bench.hit(ask)
        assert hit.text == missed.text == GREETING.replace(" ", "")
        assert "\ufffd" not in hit.response.text


async def test_o20_byte_by_byte_in_every_world(bench: Bench) -> None:
    whole = stream_of(*spoken(GREETING))
    bench.u.reply(events(whole).regroup(every=1))
    assert (await bench.miss(WITH_USAGE)).response.content == whole
    assert (await bench.hit(STREAMED)).text == (await bench.hit(B)).text == GREETING


@one_world
@pytest.mark.parametrize("api", ["completions", "messages", "responses"])
async def test_o20_in_every_api(bench: Bench, api: str) -> None:
    path, ask = ASKS[api]
    bench.u.reply(answer(deltas=[GREETING, GREETING]).regroup(every=1))
    missed = await bench.miss({**ask, "stream": True}, path)
    hit, plain = await bench.hit({**ask, "stream": True}, path), await bench.hit(ask, path)
    assert missed.text == hit.text == plain.text == GREETING * 2


def grammatical(end: bytes, compact: bool) -> bytes:
    """A stream with everything the grammar allows."""
    broken = orjson.dumps(delta(content="two lines ")).replace(b'{"content"', b'\ndata: {"content"')
    named = b"id: 7\nretry: 100\nevent: message\n"
    return stream_of(
        b": WAITING",
        data(delta(role="assistant", content=""), b"" if compact else b" "),
        b":",
        data(delta(content="one "), b"" if compact else b" "),
        b"event: ping\ndata: {}",
        b"data: " + broken,
        b": 1\n" + named + data(delta(content="named ")) + b"\n: 2",
        data(delta("stop", content="end")),
        b"data:[DONE]" if compact else DONE,
        end=end,
    )


@one_world
async def test_o21_a_stream_is_read_by_its_grammar(bench: Bench) -> None:
    kept = []
    for number, (end, compact) in enumerate((end, c) for end in (b"\n", b"\r\n", b"\r") for c in (True, False)):
        ask = WITH_USAGE | {"seed": number}
        whole = grammatical(end, compact)
        bench.u.reply(events(whole).regroup(every=7))
        missed = await bench.miss(ask)
        assert [e for e in missed.events if e] == [e for e in json_events(whole) if e], "exactly the upstream's events"
        assert missed.text == "one two lines named end"
        hit = await bench.hit(ask)
        assert [event for event in events_of(hit.response.content) if event.data is None] == []
        assert hit.text == missed.text
        plain = (await bench.hit(B | {"seed": number})).response.json()
        kept.append({name: value for name, value in plain.items() if name not in ("id", "created")})
    assert all(one == kept[0] for one in kept)
    assert "WAITING" not in str(kept)


@one_world
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_o21_comments_between_the_events_do_no_harm(bench: Bench, api: str) -> None:
    path, ask = ASKS[api]
    ask = {**ask, "stream": True}
    plain = await bench.miss(ask, path)
    commented = b": keep-alive\n\n" + plain.response.content.replace(b"\n\n", b"\n\n: keep-alive\n\n")
    other = {**ask, "seed": 1}
    bench.u.reply(events(commented))
    assert (await bench.miss(other, path)).events == plain.events
    assert (await bench.hit(other, path)).text == plain.text


RICH = [
    delta(role="assistant", content=None, x_vendor={"trace": [1, {"a": None}]}),
    delta(reasoning_content="First, "),
    delta(reasoning_content="think."),
    delta(content="Look"),
    delta(content="ing up."),
    delta(tool_calls=[{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]),
    delta(tool_calls=[{"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": '{"'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x": '}}]),
    delta(tool_calls=[{"index": 1, "function": {"arguments": 'y":2}'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '"ü"}'}}]),
    delta(refusal="Not "),
    delta(refusal="that."),
    delta("tool_calls"),
]


async def test_o22_a_hit_has_all_that_the_first_stream_had(bench: Bench) -> None:
    bench.u.reply(events(*RICH, "[DONE]"))
    missed = message_of_chunks((await bench.miss(WITH_USAGE)).events)
    assert missed["tool_calls"][0]["function"]["arguments"] == '{"x": "ü"}'
    hit = message_of_chunks((await bench.hit(STREAMED)).events)
    assert hit == missed
    choice = (await bench.hit(B)).response.json()["choices"][0]
    assert choice["finish_reason"] == missed.pop("finish_reason") == "tool_calls"
    assert choice["message"] == missed


@one_world
async def test_o22_every_choice_and_every_logprob(bench: Bench) -> None:
    ask = STREAMED | {"n": 2, "logprobs": True}
    tokens = [{"token": t, "logprob": -0.25, "bytes": None, "top_logprobs": []} for t in "abcd"]

    def chunk(index: int, token: int) -> dict[str, Any]:
        made = delta(content=tokens[token]["token"], index=index)
        made["choices"][0]["logprobs"] = {"content": [tokens[token]], "refusal": None}
        return made

    ends = [delta("stop", index=0), delta("stop", index=1)]
    starts = [delta(role="assistant", content="", index=i) for i in (1, 0)]
    bench.u.reply(events(*starts, chunk(1, 2), chunk(0, 0), chunk(0, 1), chunk(1, 3), *ends, "[DONE]"))
    await bench.miss(ask)
    choices = (await bench.hit({**ask, "stream": False})).response.json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["ab", "cd"]
    assert [choice["logprobs"]["content"] for choice in choices] == [tokens[:2], tokens[2:]]
    streamed = (await bench.hit(ask)).events
    for index in (0, 1):
        parts = [part for event in streamed for part in event["choices"] if part["index"] == index]
        got = [token for part in parts for token in (part.get("logprobs") or {}).get("content") or ()]
        assert got == choices[index]["logprobs"]["content"]


def thinking_message(usage: dict[str, int]) -> list[bytes]:
    """An Anthropic stream with thinking, text and a tool call."""
    start = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m1", "content": [], "stop_reason": None}
    deltas = [
        (0, {"type": "thinking", "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": "Hm, "}, {"type": "thinking_delta", "thinking": "so."},
            {"type": "signature_delta", "signature": "c2ln"}]),
        (1, {"type": "text", "text": ""}, [{"type": "text_delta", "text": "Loo"}, {"type": "text_delta", "text": "k"}]),
        (2, {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}, [
            {"type": "input_json_delta", "partial_json": piece} for piece in ('{"q": ', '1}')]),
    ]  # fmt: skip
    stages: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**start, "stop_sequence": None, "usage": {**usage, "output_tokens": 1}}}
    ]
    for index, block, pieces in deltas:
        stages.append({"type": "content_block_start", "index": index, "content_block": block})
        stages += [{"type": "content_block_delta", "index": index, "delta": piece} for piece in pieces]
        stages.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    stages += [{"type": "message_delta", "delta": stop, "usage": {"output_tokens": 9}}, {"type": "message_stop"}]
    return [b"event: %s\ndata: %s\n\n" % (stage["type"].encode(), orjson.dumps(stage)) for stage in stages]


def anthropic_arguments() -> dict[str, Any]:
    """The question as the client takes it; it has no parameter for the temperature any more."""
    ask = dict(ASKS["messages"][1])
    return {"extra_body": {"temperature": ask.pop("temperature")}, **ask}


@both_paths
async def test_o22_the_anthropic_client_reads_miss_and_hit_alike(bench: Bench) -> None:
    bench.u.reply(events(*thinking_message({"input_tokens": 50})))
    client = anthropic.AsyncAnthropic(base_url=bench.gateway.url, api_key="k", max_retries=0)
    ask: Any = anthropic_arguments()
    async with client:
        read = []
        for _ in range(2):
            async with client.messages.stream(**ask) as stream:
                read.append((await stream.get_final_message()).model_dump(exclude={"id"}))
        read.append((await client.messages.create(**ask)).model_dump(exclude={"id"}))
    assert bench.u.n == 1
    assert [block["type"] for block in read[0]["content"]] == ["thinking", "text", "tool_use"]
    assert read[0]["content"][2]["input"] == {"q": 1}
    assert read[1] == read[0]
    assert read[2] == read[0]


@both_paths
async def test_o23_a_hit_streams_in_several_deltas_to_both_clients(bench: Bench) -> None:
    words = [f"word{i} " for i in range(10)]
    bench.u.reply(answer(deltas=words))
    await bench.miss(STREAMED)
    ask: Any = {**STREAMED}

    def read_sync() -> list[Any]:
        with openai.OpenAI(base_url=f"{bench.gateway.url}/v1", api_key="k", max_retries=0) as client:
            return list(client.chat.completions.create(**ask))

    async with openai.AsyncOpenAI(base_url=f"{bench.gateway.url}/v1", api_key="k", max_retries=0) as client:
        by_async = [chunk async for chunk in await client.chat.completions.create(**ask)]
    for chunks in (await asyncio.to_thread(read_sync), by_async):
        choices = [chunk.choices[0] for chunk in chunks]
        assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert sum(bool(choice.delta.content) for choice in choices) > 1
        assert "".join(choice.delta.content or "" for choice in choices) == "".join(words)
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert bench.u.n == 1
    raw = (await bench.hit(STREAMED)).response.content
    assert raw.count(DONE) == 1
    assert raw.endswith(DONE + b"\n\n")


@pytest.mark.parametrize("api", ASKS)
async def test_o24_one_entry_serves_stream_and_plain(bench: Bench, api: str) -> None:
    path, ask = ASKS[api]
    for seed, order in enumerate([(True, False), (False, True)]):
        texts = []
        for position, stream in enumerate([*order, *order]):
            body = {**ask, "seed": seed, "stream": stream}
            reply = await (bench.miss if position == 0 else bench.hit)(body, path)
            assert reply.streamed is stream
            assert reply.response.headers["content-type"].partition(";")[0] == (
                "text/event-stream" if stream else "application/json"
            )
            texts.append(reply.text)
        assert texts == [f"ans-{seed + 1}"] * 4


@one_world
async def test_o24_an_upstream_that_answers_in_the_other_form_is_passed_on_as_what_it_is(bench: Bench) -> None:
    """Derived: asked for a stream, it answers in one piece, and the other way round."""
    message = {"role": "assistant", "content": "whole"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    pieces = [block + b"\n\n" for block in spoken("pieces")]
    bench.u.reply(json_body({"object": "chat.completion", "model": "m1", "choices": [choice]}), events(*pieces))
    for ask, text in ((STREAMED | {"seed": 1}, "whole"), (B | {"seed": 2}, "pieces")):
        wanted = "stream" in ask
        missed, hit = await bench.miss(ask), await bench.hit(ask)
        assert (missed.streamed, missed.text) == (not wanted, text)
        assert (hit.streamed, hit.text) == (wanted, text)


@pytest.mark.parametrize("odd", [1, "true"])
async def test_o24_where_upstreams_may_read_stream_differently_none_is_spoken_for(bench: Bench, odd: object) -> None:
    """Derived: many take these for true, so that a kept answer in one piece would be of the wrong form."""
    bench.u.always(answer("streamed"))
    await bench.miss(B)
    reply = await bench.send(B | {"stream": odd})
    assert (reply.rose, reply.streamed) == (1, True)
    assert reply.cache_status == "warmgate; fwd=bypass; detail=\"'stream' is neither true nor false\""


USAGES: list[UsageAs] = ["separate", "with_choice", "merged"]
OPTIONS: list[dict[str, Any]] = [
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": False}},
    {"stream_options": None},
    {},
]


@both_paths
@pytest.mark.parametrize("usage_as", USAGES)
@pytest.mark.parametrize("first", range(len(OPTIONS)), ids=["asked", "declined", "null", "absent"])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_o25_usage_comes_once_to_those_who_asked(bench: Bench, api: str, usage_as: UsageAs, first: int) -> None:
    path, ask = ASKS[api]
    bench.u.reply(answer(usage_as=usage_as))
    order = [first, *(i for i in range(len(OPTIONS)) if i != first)]
    for position, option in enumerate(order):
        body = {**ask, "stream": True, **OPTIONS[option]}
        reply = await (bench.miss if position == 0 else bench.hit)(body, path)
        reports = [event["usage"] for event in reply.events if event.get("usage")]
        asked = option == 0
        assert [report["total_tokens"] for report in reports] == [15] * asked
        assert reply.text == "ans-1"
        if not asked:
            assert all(event["choices"] for event in reply.events), "a client may read choices[0] of each"
            assert not any("usage" in event for event in reply.events if position)
    told = {(row["prompt_tokens"], row["output_tokens"]) for row in await bench.rows()}
    assert told == {(10, 5)}, "the gateway knows the numbers whoever asked"


@both_paths
async def test_o26_nothing_is_held_back(bench: Bench) -> None:
    """Each event comes before the upstream writes the next one."""
    clock, reply = asyncio.get_running_loop().time, answer(deltas=["x" * 120] * 4)
    gates = [asyncio.Event() for _ in range(7)]  # before all but the first of its 8 events
    for number in reversed(range(len(gates))):
        reply = reply.held(gates[number], before=number + 1)
    bench.u.reply(reply)
    events, late = 0, []
    async with bench.streaming(WITH_USAGE, accept_encoding="gzip") as response:
        assert response.headers["x-accel-buffering"] == "no"
        assert "no-cache" in response.headers["cache-control"]
        assert "no-transform" in response.headers["cache-control"]
        assert "content-encoding" not in response.headers
        asked = clock()
        async for piece in response.aiter_raw():
            events += piece.count(b"\n\n")
            late.append(clock() - asked)
            if events <= len(gates):
                gates[events - 1].set()
            asked = clock()
    assert events == len(bench.u.calls[0].writes) == len(gates) + 1
    assert sorted(late)[len(late) // 2] < 0.1
    hit = await bench.hit(STREAMED)
    assert hit.response.headers["x-accel-buffering"] == "no"
    assert "no-cache" in hit.response.headers["cache-control"]
