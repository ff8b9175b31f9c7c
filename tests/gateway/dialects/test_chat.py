"""Chat completions: what joins to an answer, what is refused, and who is told of usage."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.dialects.base import BrokenStream
from gateway.dialects.chat import ChatCompletions
from policies.cacheability import Turn
from tests.gateway.dialects.reading import (
    DONE,
    bare_stream_of,
    collect,
    data_of,
    events_of,
    joined,
    plain_of,
    sse,
    stream_of,
)

CHAT = ChatCompletions()
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 4}}


def chunk(*parts: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": list(parts), **top}


def part(finish: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


def stream(*deltas: dict[str, Any], finish: str = "stop") -> bytes:
    return sse(*(chunk(part(**delta)) for delta in deltas), chunk(part(finish)), DONE)


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    name = more.pop("name", None)
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, **more, "function": function}


RICH = stream(
    {"role": "assistant", "content": None},
    {"reasoning_content": "Let me "},
    {"reasoning_content": "think."},
    {"content": "你好"},
    {"content": "🙂"},
    {"refusal": "I can"},
    {"refusal": "not."},
    {"tool_calls": [call(0, "", id="call_a", type="function", name="f")]},
    {"tool_calls": [call(0, '{"x":'), call(1, '{"y', id="call_b", type="function", name="g")]},
    {"tool_calls": [call(1, '":2}'), call(0, "1}")]},
    {"x_vendor": {"a": {"b": 1}}},
    finish="tool_calls",
)
RICH_MESSAGE = {
    "role": "assistant",
    "content": "你好🙂",
    "reasoning_content": "Let me think.",
    "refusal": "I cannot.",
    "tool_calls": [
        {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "g", "arguments": '{"y":2}'}},
    ],
    "x_vendor": {"a": {"b": 1}},
}


def test_every_kind_of_delta_joins_and_is_replayed_in_both_forms() -> None:  # O-22
    message = joined(CHAT, RICH)
    assert message["choices"] == [
        {"index": 0, "logprobs": None, "finish_reason": "tool_calls", "message": RICH_MESSAGE}
    ]
    assert joined(CHAT, stream_of(CHAT, message)) == message
    assert plain_of(CHAT, message)["choices"] == message["choices"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1_000_000])
def test_characters_and_line_ends_may_be_cut_anywhere(size: int) -> None:  # O-20
    crlf = RICH.replace(b"\n", b"\r\n")
    for raw in (RICH, crlf):
        answer, asked, _ = collect(CHAT, [raw[at : at + size] for at in range(0, len(raw), size)])
        assert asked == raw
        assert answer.message == collect(CHAT, RICH)[0].message
        assert answer.message is not None and "\ufffd".encode() not in answer.message


def test_comments_pings_and_other_sse_fields_are_no_part_of_the_answer() -> None:  # O-21
    hello, end = chunk(part(content="Hel")), chunk(part("stop"))
    raw = (
        b": WAITING\n\n"
        + sse(hello)
        + b":\n"
        + b"id: 7\nretry: 10\nevent: message\ndata:"
        + orjson.dumps(chunk(part(content="lo")))
        + b"\n\nevent: ping\ndata: {}\n\n"
        + b"data: "
        + orjson.dumps(end).replace(b',"choices"', b',\ndata: "choices"')
        + b"\n\n"
        + DONE
    )
    answer, asked, unasked = collect(CHAT, raw)
    assert asked == unasked == raw
    assert answer.message == collect(CHAT, stream({"content": "Hel"}, {"content": "lo"}))[0].message


def test_a_replay_comes_in_pieces_with_one_role_one_end_and_one_done() -> None:  # O-23
    text = "The quick brown fox jumps over the lazy dog, again and again and again. " * 3
    replayed = stream_of(CHAT, joined(CHAT, stream({"role": "assistant", "content": ""}, {"content": text})))
    parts = [choice for event in data_of(replayed) for choice in event["choices"]]
    assert "".join(p["delta"].get("content") or "" for p in parts) == text
    assert len([p for p in parts if p["delta"].get("content")]) >= 5
    assert ["role" in p["delta"] for p in parts] == [True] + [False] * (len(parts) - 1)
    assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert [event.data for event in events_of(replayed)].count(b"[DONE]") == 1
    assert replayed.endswith(DONE)
    assert len({(event["id"], event["created"]) for event in data_of(replayed)}) == 1


def test_a_second_done_is_not_passed_on() -> None:
    raw = stream({"content": "a"})
    answer, asked, _ = collect(CHAT, raw + DONE)
    assert asked == raw and answer.message is not None


def test_a_replay_gives_vendor_fields_once_and_log_probabilities_with_their_text() -> None:
    found = {"content": [{"token": "a"}], "refusal": None}
    text = "a text that would otherwise come in several pieces"
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": found, "finish_reason": "stop"}
    events = data_of(stream_of(CHAT, {"object": "x", "model": "m", "x_vendor": 1, "choices": [choice, choice]}))
    assert [event["x_vendor"] for event in events if "x_vendor" in event] == [1]
    logged = [part for event in events for part in event["choices"] if part["logprobs"]]
    assert [(part["delta"], part["logprobs"]) for part in logged] == [({"content": text}, found)] * 2


@pytest.mark.parametrize(
    "usage_at",
    [
        [chunk(part(content="Hi")), chunk(part("stop")), chunk(usage=USAGE)],
        [chunk(part(content="Hi")), chunk(part("stop")), chunk({"index": 0, "delta": {}}, usage=USAGE)],
        [chunk(part(content="Hi")), chunk(part("stop", content=""), usage=USAGE)],
        [chunk(part(content="Hi"), usage=None), chunk(part("stop"), usage=None), chunk(usage=USAGE)],
        [chunk(part(content="Hi"), usage={**USAGE, "completion_tokens": 1}), chunk(part("stop"), usage=USAGE)],
    ],
    ids=["separate", "with an empty choice", "merged", "null before", "continuous"],
)
def test_usage_goes_to_those_who_asked_and_always_into_the_account(usage_at: list[dict[str, Any]]) -> None:  # O-25
    answer, asked, unasked = collect(CHAT, sse(*usage_at, DONE))
    assert answer.usage == {"prompt": 10, "output": 5, "cached": 4}
    assert asked == sse(*usage_at, DONE)
    assert not any(event.get("usage") for event in data_of(unasked))
    assert all(event["choices"] for event in data_of(unasked))
    assert answer.message is not None
    message = orjson.loads(answer.message)
    assert message["usage"] == USAGE
    assert message["choices"][0]["message"]["content"] == "Hi"
    replayed = [event["usage"] for event in data_of(stream_of(CHAT, message)) if event.get("usage")]
    assert replayed == [USAGE]
    assert not any("usage" in event for event in data_of(bare_stream_of(CHAT, message)))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (stream({"x": "ha"}, {"x": "ha"}), "cannot be joined: the field 'x' came twice"),
        (stream({"x": ["a"]}, {"x": ["b"]}), "cannot be joined: the field 'x' came twice"),
        (stream({"x": {"y": "a"}}, {"x": {"y": "b"}}), "cannot be joined: the field 'y' came twice"),
        (stream({"content": [{"type": "text"}]}, {"content": [{"type": "text"}]}), "'content' came twice"),
        (stream({"content": "a"}, {"content": [1]}), "'content' came twice"),
        (stream({"audio": {"data": "AA"}}, {"audio": {"data": "BB"}}), "'data' came twice"),
        (stream({"tool_calls": [{"id": "a"}]}), "a list item without an index"),
        (stream({"tool_calls": [call(1, "{}")]}), "indexes that are not 0 to 0"),
        (stream({"tool_calls": [call(0, "", id="a")]}, {"tool_calls": [call(0, "", id="b")]}), "'id' came twice"),
        (stream({"tool_calls": 5}, {"tool_calls": [call(0, "")]}), "a list that came after something else"),
        (sse(chunk({**part(content="a"), "message": {"content": "a"}}), DONE), "a chunk with a whole message"),
        (sse(chunk(part(content="a")), chunk(part("stop"), model="n"), DONE), "came twice with two values"),
        (sse(chunk(part("stop", index=1)), DONE), "choices that are not numbered from 0"),
        (sse(chunk({**part("stop"), "index": "0"}), DONE), "a choice without a number"),
        (sse(chunk(part("stop")), chunk(part("length")), DONE), "'finish_reason' came twice"),
        (sse(chunk(part("stop")), chunk(7), DONE), "unknown form"),  # type: ignore[arg-type]
        (stream({"content": "a"}) + sse(chunk(part(content="b"))), "an event after the end"),
        (b"event: extra\ndata: {}\n\n" + stream({"content": "a"}), "an event named 'extra'"),
        (b'data: {"choices":[],"x":NaN}\n\n' + stream({"content": "a"}), "JSON that not every reader takes"),
        (b'data: {"choices":[],"x":"\\ud83d"}\n\n' + stream({"content": "a"}), "JSON that not every reader takes"),
    ],
)
def test_what_no_rule_joins_surely_is_passed_on_and_not_kept(raw: bytes, why: str) -> None:
    answer, asked, _ = collect(CHAT, raw)
    assert why in answer.outcome.fault
    assert answer.message is None
    assert raw.startswith(asked)
    assert asked.endswith(DONE)


def test_known_constants_booleans_and_empty_values_may_come_again() -> None:
    raw = stream(
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "content": "Hi", "flag": True, "x": None},
        {"role": "assistant", "content": "", "flag": True, "x": "once"},
        {"content": " there", "x": None, "tool_calls": []},
    )
    message = joined(CHAT, raw)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi there", "tool_calls": [], "flag": True, "x": "once"}


def test_log_probabilities_and_token_ids_are_appended() -> None:
    def logged(*tokens: str) -> dict[str, Any]:
        found = {"content": [{"token": token, "logprob": -0.5} for token in tokens], "refusal": None}
        return {**part(content="".join(tokens)), "logprobs": found, "token_ids": [len(token) for token in tokens]}

    raw = sse(chunk(logged("a", "bc")), chunk({**part(content="d"), "logprobs": None}), chunk(logged("e")))
    choice = joined(CHAT, raw + sse(chunk(part("stop")), DONE))["choices"][0]
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["a", "bc", "e"]
    assert choice["token_ids"] == [1, 2, 1]


def test_fields_of_the_whole_answer_may_come_in_any_chunk() -> None:
    raw = sse(
        chunk(model="", prompt_filter_results=[{"severity": "safe"}]),
        chunk(part(content="Hi"), system_fingerprint=None, x_groq={"id": "r"}),
        chunk(part("stop"), system_fingerprint="fp", x_groq={"usage": {"queue": 1}}, obfuscation="abc"),
        DONE,
    )
    message = joined(CHAT, raw)
    assert (message["model"], message["system_fingerprint"]) == ("m", "fp")
    assert message["x_groq"] == {"id": "r", "usage": {"queue": 1}}
    assert message["prompt_filter_results"] == [{"severity": "safe"}]
    assert "obfuscation" not in message and "id" not in message and "created" not in message


def test_padding_is_no_part_of_the_answer() -> None:
    raw = sse(chunk(part(content="Hi"), p="abcdefg"), chunk(part("stop"), p="abcdefghijklmnopqrstuvwxyz0123"), DONE)
    assert "p" not in joined(CHAT, raw)
    answer = collect(CHAT, sse(chunk(part(content="Hi"), p="x"), chunk(part("stop"), p="y"), DONE))[0]
    assert "'p' came twice" in answer.outcome.fault


def test_whole_numbers_of_any_size_keep_every_digit() -> None:
    raw = sse(chunk(part(content="Hi", x_seed=1))).replace(b'"x_seed":1', b'"x_seed":123456789012345678901234567890')
    answer = collect(CHAT, raw + sse(chunk(part("stop")), DONE))[0]
    assert answer.message is not None and b'"x_seed":123456789012345678901234567890' in answer.message
    rendered = CHAT.render(answer.message)
    assert b'"x_seed":123456789012345678901234567890' in b"".join(rendered.plain)
    assert b'"x_seed":123456789012345678901234567890' in b"".join(rendered.stream)


def test_a_stream_of_something_else_is_broken() -> None:  # O-27
    with pytest.raises(BrokenStream, match="not JSON"):
        collect(CHAT, b"data: {broken\n\n")
    with pytest.raises(BrokenStream, match="not a JSON object"):
        collect(CHAT, b"data: [1]\n\n")


@pytest.mark.parametrize("raw", [sse({"error": {"message": "no"}}), b'event: error\ndata: {"message":"no"}\n\n'])
def test_an_error_event_ends_the_stream_and_is_passed_on_once(raw: bytes) -> None:
    collector = CHAT.collector({"stream": True})
    event = events_of(raw)[0]
    assert collector.feed(event).asked == event.raw
    assert collector.ended
    assert collector.close().outcome.fault == "an error event"


@pytest.mark.parametrize(
    ("raw", "n", "why"),
    [
        (sse(chunk(part(content="a"))), 1, "incomplete: the stream did not end as it should"),
        (sse(chunk(part(content="a")), DONE), 1, "incomplete: a choice without a finish reason"),
        (stream({"content": "a"}), 2, "incomplete: a choice without a finish reason"),
        (sse(chunk(part("stop"), part(content="b", index=1)), DONE), 2, "incomplete: a choice without a finish reason"),
        (sse(chunk(), DONE), 1, "incomplete: no choices"),
        (DONE, 1, "incomplete: no choices"),
    ],
)
def test_a_stream_is_an_answer_only_when_every_choice_has_ended(raw: bytes, n: int, why: str) -> None:  # O-14, O-19
    answer = collect(CHAT, raw, {"n": n})[0]
    assert answer.outcome.fault == why


@pytest.mark.parametrize(
    ("finish", "message", "why"),
    [
        ("content_filter", {"content": "a"}, "refused"),
        ("stop", {"content": None, "refusal": "I cannot."}, "refused"),
        ("stop", {"content": "Part of it", "refusal": "I cannot."}, ""),
        ("stop", {"content": "a", "refusal": None}, ""),
    ],
)
def test_a_refusal_is_no_answer_in_either_form(finish: str, message: dict[str, Any], why: str) -> None:  # O-16
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    assert CHAT.read({}, orjson.dumps({"choices": [choice]})).outcome.fault == why
    assert collect(CHAT, stream(message, finish=finish))[0].outcome.fault == why


def test_older_names_of_finish_reasons_count_as_the_newer() -> None:
    assert collect(CHAT, stream({"content": "a"}, finish="function_call"))[0].outcome.finishes == ("tool_calls",)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"error":{"message":"no"}}', "an error with a success status"),
        (b'{"choices":[]}', "incomplete: no choices"),
        (b'{"choices":[{"finish_reason":"stop"}]}', "unknown form"),
        (b'{"choices":[{"message":"a","finish_reason":"stop"}]}', "unknown form"),
        (b'{"choices":[{"message":{"tool_calls":[1]},"finish_reason":"stop"}]}', "unknown form"),
        (b'{"choices":[{"index":1,"message":{},"finish_reason":"stop"}]}', "unknown form"),
        (b'{"choices":[{"message":{"content":"a"},"finish_reason":null}]}', "incomplete: a choice without"),
    ],
)
def test_plain_answers_of_unknown_form_are_not_kept(answer: bytes, why: str) -> None:
    assert CHAT.read({}, answer).outcome.fault.startswith(why)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ({"stream": True}, {"stream_options": {"include_usage": True}}),
        (
            {"stream": True, "stream_options": {"include_usage": False, "x": 1}},
            {"stream_options": {"include_usage": True, "x": 1}},
        ),
        ({"stream": True, "stream_options": {"include_usage": True}}, {}),
        ({"stream": True, "stream_options": 5}, {}),
        ({"stream": False}, {}),
        ({}, {}),
    ],
)
def test_every_stream_is_asked_for_usage(body: dict[str, Any], changes: dict[str, Any]) -> None:
    assert CHAT.prepare(body) == changes


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "side_effects", "world", "tools"),
    [
        ({}, "", "", False),
        ({"store": False}, "", "", False),
        ({"store": True}, "store: true", "", False),
        ({"modalities": ["text", "audio"]}, "spoken answers are kept by the provider", "", False),
        ({"tools": [FUNCTION, {"type": "custom"}]}, "", "", True),
        ({"tools": [FUNCTION, {"type": "web_search"}]}, "", "a hosted tool", True),
        ({"web_search_options": {}}, "", "web search", False),
        ({"enable_search": False}, "", "", False),
        ({"plugins": [{"id": "web"}]}, "", "web search", False),
    ],
)
def test_what_the_policy_is_told(body: dict[str, Any], side_effects: str, world: str, tools: bool) -> None:
    ask = CHAT.ask(body)
    assert (ask.side_effects, ask.world, ask.tools) == (side_effects, world, tools)


def test_turns_are_plain_texts_or_unknown() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
        {"role": "user", "content": "Hi", "name": "bob"},
        "odd",
    ]
    texts = ["Be brief.", "Hi", None, None]
    roles = ["system", "user", "user", "user"]
    expected = [Turn(role, text) for role, text in zip(roles, texts, strict=True)]
    assert list(CHAT.ask({"messages": messages}).turns) == [*expected, Turn("", None)]
