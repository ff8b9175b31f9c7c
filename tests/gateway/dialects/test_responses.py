"""OpenAI Responses: the typed event stream, what the API keeps upstream, and what of an answer is the caller's own."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.dialects.responses import Responses
from policies.cacheability import Turn, judge
from tests.gateway.dialects.reading import NOW, collect, data_of, events_of, joined, plain_of, sse, stream_of

RESPONSES = Responses()
USAGE = {
    "input_tokens": 20,
    "input_tokens_details": {"cached_tokens": 8},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 27,
}
REASONING = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "I thought about it."}],
    "content": [{"type": "reasoning_text", "text": "Step one. Step two."}],
    "encrypted_content": "ENC",
    "status": "completed",
}
SAID = {
    "id": "msg_1",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "你好🙂", "annotations": [{"type": "file_path"}], "logprobs": []}],
}
CALL = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "f",
    "arguments": '{"x": 1}',
    "status": "completed",
}
CUSTOM = {"id": "ct_1", "type": "custom_tool_call", "call_id": "call_2", "name": "g", "input": "print(1)"}


def response(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": "m",
        "output": list(output),
        "metadata": {"of": "the first caller"},
        "user": "first",
        "store": False,
        "usage": USAGE,
        **more,
    }


def stream(whole: dict[str, Any], *, kind: str | None = None, items: list[Any] | None = None) -> bytes:
    """As an upstream sends it: the beginning, what it streams of each item, and the end."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**whole, "status": "in_progress"}}]
    for index, item in enumerate(whole["output"] if items is None else items):
        events += [
            {"type": "response.output_item.added", "output_index": index, "item": item},
            {"type": "response.output_text.delta", "output_index": index, "delta": "…"},
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
    events.append({"type": kind or f"response.{whole['status']}", "response": whole})
    return sse(*({"sequence_number": n, **event} for n, event in enumerate(events)), named=True)


RICH = response(REASONING, SAID, CALL, CUSTOM, instructions="Be brief.")


def test_the_end_of_the_stream_is_the_answer() -> None:
    message = joined(RESPONSES, stream(RICH))
    own = ("id", "created_at", "metadata", "user", "store")
    assert message == {name: value for name, value in RICH.items() if name not in own}
    assert RESPONSES.read({}, orjson.dumps(RICH)).message == collect(RESPONSES, stream(RICH))[0].message
    assert collect(RESPONSES, stream(RICH))[0].usage == {"prompt": 20, "output": 7, "cached": 8}


def test_a_replay_has_the_events_of_the_api_numbered_from_0() -> None:
    message = joined(RESPONSES, stream(RICH))
    events = data_of(stream_of(RESPONSES, message))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.name for event in events_of(stream_of(RESPONSES, message))] == [event["type"] for event in events]
    kinds = [event["type"].removeprefix("response.") for event in events]
    runs = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    text_part = ["content_part.added", "output_text.delta", "output_text.annotation.added", "output_text.done"]
    reasoning = ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    kind = "reasoning_summary"
    summary = [f"{kind}_part.added", f"{kind}_text.delta", f"{kind}_text.done", f"{kind}_part.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    custom = ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    around = [
        ["output_item.added", *parts, "output_item.done"]
        for parts in ([*summary, *reasoning], [*text_part, "content_part.done"], arguments, custom)
    ]
    assert runs == ["created", "in_progress", *(kind for item in around for kind in item), "completed"]
    for event in events:
        if event["type"] == "response.output_item.added":
            assert not any(event["item"].get(name) for name in ("content", "summary", "arguments", "input"))
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


def test_all_events_of_a_replay_speak_of_one_fresh_response_and_its_old_items() -> None:
    """Encrypted reasoning is bound to the id of its item, so the items keep theirs."""
    events = data_of(stream_of(RESPONSES, joined(RESPONSES, stream(RICH))))
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1 and ids != {"resp_1"}
    assert {event["response"]["created_at"] for event in events if "response" in event} == {int(NOW)}
    assert {event["item_id"] for event in events if "item_id" in event} == {"rs_1", "msg_1", "fc_1", "ct_1"}


def test_bookkeeping_is_echoed_to_the_caller_it_belongs_to() -> None:
    message = joined(RESPONSES, stream(RICH))
    body = {"metadata": {"of": "the second"}, "user": "second", "store": False, "safety_identifier": "s"}
    for whole in (plain_of(RESPONSES, message, body), data_of(stream_of(RESPONSES, message, body))[-1]["response"]):
        assert {name: whole[name] for name in body} == body
        assert whole["prompt_cache_key"] is None
        assert b"first" not in orjson.dumps(whole)
    assert plain_of(RESPONSES, message, {})["metadata"] == {}
    assert all(name in RESPONSES.excluded for name in ("metadata", "user", "store", "safety_identifier"))


def test_when_it_was_completed_is_not_repeated() -> None:
    assert plain_of(RESPONSES, joined(RESPONSES, stream(response(SAID, completed_at=2))))["completed_at"] is None


def test_items_of_unknown_types_are_replayed_whole() -> None:
    search = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"query": "x"}}
    message = joined(RESPONSES, stream(response(search, SAID)))
    added, done = (event["item"] for event in data_of(stream_of(RESPONSES, message))[2:4])
    assert (added, done) == ({**search, "status": "in_progress"}, search)


@pytest.mark.parametrize(
    ("whole", "finishes", "fault"),
    [
        (response(SAID), ("stop",), ""),
        (response(SAID, CALL), ("tool_calls",), ""),
        (response(SAID, CUSTOM), ("tool_calls",), ""),
        (response(), (), "incomplete: no output"),
        (
            response(SAID, status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
            ("length",),
            "",
        ),
        (
            response(SAID, status="incomplete", incomplete_details={"reason": "content_filter"}),
            ("content_filter",),
            "refused",
        ),
        (response(SAID, status="incomplete"), ("unknown",), ""),
        (
            response({**SAID, "content": [{"type": "refusal", "refusal": "I cannot."}]}),
            ("refusal",),
            "refused",
        ),
    ],
)
def test_how_a_response_ends(whole: dict[str, Any], finishes: tuple[str, ...], fault: str) -> None:  # O-15, O-16
    for outcome in (
        RESPONSES.read({}, orjson.dumps(whole)).outcome,
        collect(RESPONSES, stream(whole))[0].outcome,
    ):
        assert (outcome.finishes, outcome.fault) == (finishes, fault)


@pytest.mark.parametrize("status", ["in_progress", "queued", "cancelled"])
def test_a_response_under_way_is_no_answer(status: str) -> None:
    outcome = RESPONSES.read({}, orjson.dumps(response(SAID, status=status))).outcome
    assert outcome.fault == f"incomplete: status {status}"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (stream(response(SAID), items=[]), "a response that differs from the items before it"),
        (stream(response(SAID), items=[SAID, CALL]), "a response that differs from the items before it"),
        (stream(response(SAID), items=[{**SAID, "content": []}]), "a response that differs"),
        (stream(response(SAID), kind="response.incomplete"), "an end that contradicts the response's status"),
        (stream(response(SAID)) + sse({"type": "response.more"}, named=True), "an event after the end"),
        (stream(response(SAID, status="failed", error={"message": "no"})), "an error with a success status"),
        (stream(response(SAID, status="failed")), "incomplete: status failed"),
        (stream(response(SAID)).split(b"event: response.completed")[0], "incomplete: the stream did not end"),
        (sse({"type": "error", "message": "no"}, named=True), "an error event"),
        (stream(response({"type": "message"})), "unknown form"),
        (stream(response("odd")), "unknown form"),  # type: ignore[arg-type]
        (stream({**response(SAID), "object": "other"}), "unknown form"),
        (sse({"no": "type"}) + stream(response(SAID)), "unknown form"),
    ],
)
def test_what_is_not_surely_whole_is_not_kept(raw: bytes, why: str) -> None:
    answer = collect(RESPONSES, raw)[0]
    assert answer.message is None or answer.outcome.fault.startswith("incomplete")
    assert why in answer.outcome.fault


def test_reasoning_that_is_encrypted_anew_each_time_is_no_contradiction() -> None:
    items = [{**REASONING, "encrypted_content": "OTHER"}, SAID]
    assert joined(RESPONSES, stream(response(REASONING, SAID), items=items))["output"] == [REASONING, SAID]


def test_done_behind_the_end_does_no_harm() -> None:
    raw = stream(response(SAID)) + b"data: [DONE]\n\n"
    answer, asked, _ = collect(RESPONSES, raw)
    assert asked == raw and answer.message is not None


@pytest.mark.parametrize("answer", [b"x", b"[]", b"{}", b'{"object":"response","output":{}}'])
def test_plain_answers_of_unknown_form_are_not_kept(answer: bytes) -> None:
    assert RESPONSES.read({}, answer).message is None


@pytest.mark.parametrize(
    ("body", "verdict", "opted_in"),
    [
        ({"store": False}, "deterministic: temperature 0", "caller opted in"),
        ({}, "kept upstream unless store is false", "caller opted in"),
        ({"store": None}, "kept upstream unless store is false", "caller opted in"),
        ({"store": True}, "side effect: store: true", "side effect: store: true"),
        ({"store": False, "background": True}, "side effect: background: true", "side effect: background: true"),
        (
            {"store": False, "conversation": "conv_1"},
            "side effect: a conversation kept upstream",
            "side effect: a conversation kept upstream",
        ),
        (
            {"store": False, "previous_response_id": "resp_0"},
            "answer depends on the world: an earlier answer kept upstream",
            "caller opted in",
        ),
        (
            {"store": False, "prompt": {"id": "p"}},
            "answer depends on the world: a prompt kept upstream",
            "caller opted in",
        ),
        *(
            (
                {"store": False, "input": [reference]},
                "answer depends on the world: items kept upstream",
                "caller opted in",
            )
            for reference in ({"type": "item_reference", "id": "x"}, {"id": "x"}, {"id": "x", "type": None})
        ),
        *(
            (
                {"store": False, "tools": [{"type": tool}]},
                "answer depends on the world: a hosted tool",
                "caller opted in",
            )
            for tool in ("web_search", "file_search", "computer_use_preview", "code_interpreter", "mcp")
        ),
        ({"store": False, "tools": [{"type": "function"}]}, "deterministic: temperature 0", "caller opted in"),
    ],
)
def test_what_may_be_cached(body: dict[str, Any], verdict: str, opted_in: str) -> None:
    ask = RESPONSES.ask({"temperature": 0, **body})
    assert judge(ask, sampled="never", opted_in=False).reason == verdict
    assert judge(ask, sampled="never", opted_in=True).reason == opted_in


def test_turns() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_image"}]},
        {"type": "function_call_output", "output": "x"},
    ]
    assert list(RESPONSES.ask({"input": "Hi", "instructions": "Be brief."}).turns) == [
        Turn("system", "Be brief."),
        Turn("user", "Hi"),
    ]
    turns = [Turn("user", "Hi"), Turn("user", "Hi"), Turn("user", None), Turn("", None)]
    assert list(RESPONSES.ask({"input": items}).turns) == turns


def test_errors_have_openais_form() -> None:
    assert orjson.loads(RESPONSES.error(404, "No.", "gone"))["error"]["code"] == "gone"
    (event,) = events_of(RESPONSES.error_event("No.", "upstream_error"))
    assert event.name == "error"
    assert orjson.loads(event.data or b"")["type"] == "error"
