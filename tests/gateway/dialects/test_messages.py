"""Anthropic Messages: content blocks, usage over two events, ends, refusals, errors."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cache.response.canonical import parse
from gateway.dialects.base import BrokenStream
from gateway.dialects.count_tokens import CountTokens
from gateway.dialects.messages import Messages
from policies.cacheability import Turn
from tests.gateway.dialects.reading import collect, data_of, events_of, joined, plain_of, sse, stream_of

MESSAGES, COUNT = Messages(), CountTokens()
DELTA, START, STOP = "content_block_delta", "content_block_start", "content_block_stop"
PING = {"type": "ping"}
END = {"type": "message_stop"}


def begin(**usage: Any) -> dict[str, Any]:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
    usage = {"input_tokens": 10, "output_tokens": 1, **usage}
    return {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}}


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": START, "index": index, "content_block": start},
        *({"type": DELTA, "index": index, "delta": delta} for delta in deltas),
        {"type": STOP, "index": index},
    ]


def text(index: int, *pieces: str) -> list[dict[str, Any]]:
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces))


def finish(reason: str | None = "end_turn", /, **usage: Any) -> dict[str, Any]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9, **usage}}


def stream(*events: dict[str, Any]) -> bytes:
    return sse(*events, named=True)


CITATION = {"type": "char_location", "cited_text": "x", "document_index": 0}
RICH = stream(
    begin(service_tier="standard"),
    PING,
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Let me "},
        {"type": "thinking_delta", "thinking": "think."},
        {"type": "signature_delta", "signature": "SIG=="},
    ),
    *block(1, {"type": "redacted_thinking", "data": "SECRET"}),
    *block(
        2,
        {"type": "text", "text": "", "citations": []},
        {"type": "text_delta", "text": "你好"},
        {"type": "text_delta", "text": "🙂"},
        {"type": "citations_delta", "citation": CITATION},
    ),
    *block(
        3,
        {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"city": "Pa'},
        {"type": "input_json_delta", "partial_json": 'ris", "n": 1.50, "big": 123456789012345678901234567890}'},
    ),
    *block(4, {"type": "tool_use", "id": "toolu_b", "name": "g", "input": {}}),
    PING,
    finish("tool_use"),
    END,
)


def test_every_kind_of_block_joins_and_is_replayed_in_both_forms() -> None:
    answer = collect(MESSAGES, RICH)[0]
    assert answer.outcome.finishes == ("tool_calls",) and answer.outcome.fault == ""
    assert answer.message is not None
    message = orjson.loads(answer.message)
    thinking, redacted, said, call, empty = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Let me think.", "signature": "SIG=="}
    assert redacted == {"type": "redacted_thinking", "data": "SECRET"}
    assert said == {"type": "text", "text": "你好🙂", "citations": [CITATION]}
    assert (call["input"]["city"], call["input"]["n"], empty["input"]) == ("Paris", 1.5, {})
    assert b'"n":1.50,"big":123456789012345678901234567890' in answer.message
    rendered = MESSAGES.render(answer.message)
    again = collect(MESSAGES, MESSAGES.identity(0).join(rendered.stream))[0].message or b""
    assert parse(again) == parse(answer.message)
    assert b'"big":123456789012345678901234567890' in b"".join(rendered.plain)


@pytest.mark.parametrize("size", [1, 2, 3, 1_000_000])
def test_events_may_be_cut_anywhere(size: int) -> None:  # O-20
    answer, asked, _ = collect(MESSAGES, [RICH[at : at + size] for at in range(0, len(RICH), size)])
    assert asked == RICH
    assert answer.message == collect(MESSAGES, RICH)[0].message


@pytest.mark.parametrize(
    "repeated",
    [{}, {"input_tokens": 50, "cache_read_input_tokens": 2400, "cache_creation_input_tokens": 120}],
    ids=["output only", "all fields again"],
)
def test_usage_over_two_events_is_counted_once(repeated: dict[str, int]) -> None:  # O-28
    raw = stream(
        begin(input_tokens=50, cache_read_input_tokens=2400, cache_creation_input_tokens=120),
        *text(0, "Hi"),
        finish(**repeated),
        END,
    )
    answer = collect(MESSAGES, raw)[0]
    assert answer.usage == {"prompt": 2570, "cached": 2400, "cache_write": 120, "output": 9}
    message = joined(MESSAGES, raw)
    usage = {"input_tokens": 50, "output_tokens": 9, "cache_read_input_tokens": 2400}
    assert message["usage"] == {**usage, "cache_creation_input_tokens": 120}
    replayed = stream_of(MESSAGES, message)
    kinds = ["message_start", START, DELTA, STOP, "message_delta", "message_stop"]
    assert [event.name for event in events_of(replayed)] == kinds
    assert [event["type"] for event in data_of(replayed)] == kinds
    assert collect(MESSAGES, replayed)[0].usage == answer.usage
    begun = data_of(replayed)[0]["message"]
    assert (begun["stop_reason"], begun["content"], begun["usage"]["output_tokens"]) == (None, [], 0)
    assert plain_of(MESSAGES, message)["usage"] == message["usage"]


def test_what_is_counted_before_a_cut_is_still_counted() -> None:
    answer = collect(MESSAGES, stream(begin(cache_read_input_tokens=5), *text(0, "Hi")))[0]
    assert answer.usage == {"prompt": 15, "cached": 5, "output": 1}
    assert answer.outcome.fault == "incomplete: the stream did not end as it should"


@pytest.mark.parametrize(
    ("reason", "finishes", "fault"),
    [
        ("end_turn", ("stop",), ""),
        ("stop_sequence", ("stop",), ""),
        ("tool_use", ("tool_calls",), ""),
        ("max_tokens", ("length",), ""),
        ("model_context_window_exceeded", ("length",), ""),
        ("refusal", ("refusal",), "refused"),
        ("pause_turn", ("pause_turn",), "incomplete: the model paused"),
        ("compaction", ("compaction",), ""),
        (None, (), "incomplete: no stop reason"),
    ],
)
def test_stop_reasons(reason: str | None, finishes: tuple[str, ...], fault: str) -> None:  # O-16
    streamed = collect(MESSAGES, stream(begin(), *text(0, "Hi"), finish(reason), END))[0]
    assert (streamed.outcome.finishes, streamed.outcome.fault) == (finishes, fault)
    plain = {**begin()["message"], "content": [{"type": "text", "text": "Hi"}], "stop_reason": reason}
    outcome = MESSAGES.read({}, orjson.dumps(plain)).outcome
    assert (outcome.finishes, outcome.fault) == (finishes, fault)


def test_the_end_may_bring_more_than_a_reason() -> None:
    ending = finish("end_turn", server_tool_use={"web_search_requests": 0}, input_tokens=None)
    ending["delta"] |= {"stop_details": None, "container": {"id": "c"}}
    ending["context_management"] = {"applied_edits": []}
    message = joined(MESSAGES, stream(begin(), *text(0, "Hi"), ending, END))
    assert message["container"] == {"id": "c"} and message["context_management"] == {"applied_edits": []}
    assert message["usage"]["input_tokens"] == 10
    assert joined(MESSAGES, stream_of(MESSAGES, message)) == message


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([*text(0, "a"), finish(), END], "an event before message_start"),
        ([begin(), begin(), finish(), END], "a second message_start"),
        ([begin(), *text(1, "a"), finish(), END], "content blocks out of order"),
        ([begin(), *text(0, "a")[:-1], finish(), END], "a content block without an end"),
        ([begin(), *text(0, "a"), *text(0, "b")[1:], finish(), END], "a delta outside its content block"),
        ([begin(), *text(0, "a"), {"type": "message_news"}, finish(), END], "an event of type 'message_news'"),
        ([begin(), *block(0, {"type": "text", "text": ""}, {"type": "x_delta"}), finish(), END], "a delta of type"),
        ([begin(), *block(0, {"type": "text"}, {"type": "text_delta", "text": 5}), finish(), END], "not a text"),
        ([begin(), *text(0, "a"), finish(), END, *text(1, "b")], "an event after the end"),
        ([{"type": "message_start"}, *text(0, "a"), finish(), END], "unknown form"),
        (
            [
                begin(),
                *block(
                    0,
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    {"type": "input_json_delta", "partial_json": '{"cut": '},
                ),
                finish("tool_use"),
                END,
            ],
            "tool input that is not JSON",
        ),
        (
            [
                begin(),
                *block(
                    0,
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                    {"type": "input_json_delta", "partial_json": '{"b": 2}'},
                ),
                finish("tool_use"),
                END,
            ],
            "tool input that came twice",
        ),
    ],
)
def test_what_no_rule_joins_surely_is_passed_on_and_not_kept(events: list[dict[str, Any]], why: str) -> None:
    answer, asked, _ = collect(MESSAGES, stream(*events))
    assert answer.message is None
    assert why in answer.outcome.fault
    assert stream(*events).startswith(asked)


def test_an_answer_without_content_is_not_kept() -> None:
    assert collect(MESSAGES, stream(begin(), finish(), END))[0].outcome.fault == "incomplete: no content"


def test_an_error_event_is_passed_on_and_ends_the_stream() -> None:  # O-27
    error = stream({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
    answer, asked, _ = collect(MESSAGES, stream(begin(), *text(0, "Hi")) + error)
    assert asked.endswith(error)
    assert answer.outcome.fault == "an error event"
    with pytest.raises(BrokenStream):
        collect(MESSAGES, b"event: content_block_delta\ndata: {oops\n\n")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"oops", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"type":"error","error":{"type":"api_error","message":"no"}}', "an error with a success status"),
        (b'{"type":"message","content":[],"stop_reason":"end_turn"}', "unknown form"),
        (b'{"type":"message","content":[{"type":"text"}],"usage":{"output_tokens":1}}', "unknown form"),
        (b'{"type":"message","content":"Hi","usage":{"output_tokens":1}}', "unknown form"),
    ],
)
def test_plain_answers_of_unknown_form_are_not_kept(answer: bytes, why: str) -> None:
    assert MESSAGES.read({}, answer).outcome.fault == why


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_form(status: int, kind: str) -> None:
    for dialect in (MESSAGES, COUNT):
        error = orjson.loads(dialect.error(status, "No.", "code", "req_1"))
        assert error == {"type": "error", "error": {"type": kind, "message": "No."}, "request_id": "req_1"}


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    (event,) = events_of(MESSAGES.error_event("No.", "upstream_error"))
    assert event.name == "error"
    assert orjson.loads(event.data or b"") == {"type": "error", "error": {"type": "api_error", "message": "No."}}


@pytest.mark.parametrize(
    ("body", "world"),
    [
        ({"tools": [{"name": "f", "input_schema": {}}]}, ""),
        ({"tools": [{"type": "custom", "name": "f"}, {"type": "bash_20250124", "name": "bash"}]}, ""),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool that the provider runs"),
        ({"tools": [{"type": "code_execution_20250825", "name": "x"}]}, "a tool that the provider runs"),
        ({"tools": [{"type": "of_tomorrow", "name": "x"}]}, "a tool that the provider runs"),
        ({"mcp_servers": [{"url": "https://x"}]}, "MCP servers"),
        ({"container": "c_1"}, "a container"),
    ],
)
def test_what_the_policy_is_told(body: dict[str, Any], world: str) -> None:
    assert MESSAGES.ask(body).world == COUNT.ask(body).world == world


def test_turns_hold_the_system_text() -> None:
    body = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "Yes?"},
        ],
    }
    turns = [Turn("system", "Be brief."), Turn("user", "Hi"), Turn("user", None), Turn("assistant", "Yes?")]
    assert list(MESSAGES.ask(body).turns) == turns


def test_cache_marks_are_in_the_key_and_metadata_is_not() -> None:
    assert "metadata" in MESSAGES.excluded
    assert "cache_control" not in MESSAGES.excluded
    assert MESSAGES.vary == COUNT.vary == ("anthropic-version", "anthropic-beta")  # O-52


def test_a_token_count_is_kept_as_it_came() -> None:
    answer = COUNT.read({}, b'{ "input_tokens": 14 }')
    assert (answer.message, answer.outcome.fault) == (b'{ "input_tokens": 14 }', "")
    assert COUNT.ask({}).always_deterministic
    assert not COUNT.streams({"stream": True})
    assert COUNT.identity(0).join(COUNT.render(b'{"input_tokens":14}').plain) == b'{"input_tokens":14}'


@pytest.mark.parametrize("answer", [b"x", b"[]", b'{"input_tokens":"14"}', b'{"error":{},"input_tokens":true}'])
def test_anything_else_is_no_token_count(answer: bytes) -> None:
    assert COUNT.read({}, answer).message is None


def test_a_stream_of_token_counts_is_passed_on_and_not_kept() -> None:
    raw = sse({"input_tokens": 14}, b"data: [DONE]\n\n")
    answer, asked, _ = collect(COUNT, raw)
    assert asked == raw
    assert answer.message is None
