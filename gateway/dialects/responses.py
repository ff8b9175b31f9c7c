"""OpenAI Responses: ``POST /v1/responses``.

The API keeps each answer upstream unless ``store`` is false, so that a later ``previous_response_id`` may name it; a
cached answer has an id that no upstream knows. So ``store: true`` is never answered from here, and a request that says
nothing of ``store`` only at the caller's explicit wish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from cache.response.canonical import respell
from gateway.dialects.base import Answer, Dialect, Lazily, Rendered, Unjoinable
from gateway.dialects.curated import CAPS, DELIVERY, SAMPLING, given, room_for
from gateway.dialects.events import EventCollector
from gateway.dialects.hints import prompt_cache_key
from gateway.dialects.joining import load, member
from gateway.dialects.openai import EXCLUDED, VARY, error_body, usage_of
from gateway.dialects.response_events import response_events
from gateway.ids import unique
from gateway.sse import frame
from policies.cacheability import Ask, Outcome, Turn

_ECHOED = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user")
"""Fields of the answer that repeat the caller's own bookkeeping."""
_IDENTITY = frozenset(("id", "created_at", *_ECHOED))
_CURATED_DESPITE = DELIVERY | SAMPLING | CAPS | {"input", "store", "truncation"}
_KEPT_UPSTREAM = {
    "previous_response_id": "an earlier answer kept upstream",
    "prompt": "a prompt kept upstream",
}
_CALLS = frozenset(("function_call", "custom_tool_call"))
_FINISHES = {"max_output_tokens": "length"}


class Responses(Dialect):
    """Items in, items out."""

    name = "responses"
    path = "/v1/responses"
    vary = VARY
    excluded: ClassVar = {name: f"{why}; echoed afresh" if name in _ECHOED else why for name, why in EXCLUDED.items()}

    def ask(self, body: Mapping[str, Any]) -> Ask:
        return Ask(
            turns=Lazily(lambda: _turns(body)),
            temperature=body.get("temperature"),
            tools=bool(body.get("tools")),
            side_effects=_side_effects(body),
            world=_world(body),
            reservation="" if body.get("store") is False else "kept upstream unless store is false",
        )

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def hint(self, body: Mapping[str, Any], salt: str) -> dict[str, Any]:
        return prompt_cache_key(body, salt, body.get("tools"), body.get("instructions"))

    def wants_usage(self, body: Mapping[str, Any]) -> bool:
        return True

    def read(self, body: Mapping[str, Any], answer: bytes) -> Answer:
        try:
            response = load(answer)
        except ValueError:
            return Answer(None, Outcome(fault="not JSON"))
        if not isinstance(response, dict):
            return Answer(None, Outcome(fault="not a JSON object"))
        return _answer(response)

    def usage_in(self, answer: bytes) -> dict[str, int]:
        return usage_of(member(answer, "usage"))

    def collector(self, body: Mapping[str, Any]) -> ResponseCollector:
        return ResponseCollector()

    def render(self, message: bytes) -> Rendered:
        whole: dict[str, Any] = load(message)
        segments = [b""]
        for event in response_events(whole):
            response = event.pop("response", None)
            head = b"event: %s\ndata: " % event["type"].encode()
            if response is None:
                segments[-1] += head + respell(event) + b"\n\n"
            else:
                segments[-1] += head + respell(event)[:-1] + b',"response":{'
                segments.append(respell(response)[1:] + b"}\n\n")
        stream = tuple(segments)
        return Rendered((b"{", respell(whole)[1:]), stream, stream)

    def identity(self, now: float) -> bytes:
        return b'"id":"resp_%s","created_at":%d,' % (unique(48).encode(), int(now))

    def echo(self, body: Mapping[str, Any]) -> bytes:
        echoed = {name: body.get(name) for name in _ECHOED}
        echoed["metadata"] = echoed["metadata"] or {}
        echoed["store"] = body.get("store") is not False
        return respell(echoed)[1:-1] + b","

    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        asked = given(body)
        if not asked.keys() <= _CURATED_DESPITE or body.get("store") is not False or not room_for(text, asked):
            return None
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {
            "id": f"msg_{hashlib.sha256(text.encode()).hexdigest()[:48]}",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
        return orjson.dumps(_CURATED | {"model": model, "output": [item]})

    def error(self, status: int, message: str, code: str | None = None, request_id: str = "") -> bytes:
        return error_body(status, message, code)

    def error_event(self, message: str, code: str) -> bytes:
        error = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return frame(orjson.dumps(error), "error")


class ResponseCollector(EventCollector):
    """The terminal event carries the whole response; it is believed where it agrees with the items that were streamed
    before it.
    """

    marks = (b"response.completed", b"response.incomplete", b"response.failed", b"error")

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, Any] = {}
        self._response: dict[str, Any] = {}

    def join(self, name: str, data: dict[str, Any]) -> None:
        kind = data["type"]
        if kind == "response.output_item.done":
            self._items[data["output_index"]] = data["item"]
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self.done = True
            self._response = data["response"]
            if kind != f"response.{self._response['status']}":
                raise Unjoinable("an end that contradicts the response's status")

    def usage(self) -> dict[str, int]:
        return usage_of(self._response.get("usage"))

    def answer(self) -> Answer:
        streamed = [_visible(self._items[index]) for index in sorted(self._items)]
        if streamed != [_visible(item) for item in self._response["output"]]:
            raise Unjoinable("a response that differs from the items before it")
        return _answer(self._response)


_CURATED: dict[str, Any] = {
    "object": "response",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "usage": {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    },
}


def _answer(response: dict[str, Any]) -> Answer:
    """A plain response as an answer. The ids of its items stay: encrypted reasoning is bound to them."""
    usage = usage_of(response.get("usage"))
    if response.get("error"):
        return Answer(None, Outcome(fault="an error with a success status"), usage)
    if response.get("object") != "response" or not _sound(response.get("output")):
        return Answer(None, Outcome(fault="unknown form"), usage)
    kept = {name: value for name, value in response.items() if name not in _IDENTITY}
    if "completed_at" in kept:
        kept["completed_at"] = None
    return Answer(respell(kept), _outcome(response), usage)


def _outcome(response: dict[str, Any]) -> Outcome:
    items, status = response["output"], response.get("status")
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    if any(part["type"] == "refusal" for part in parts):
        return Outcome(("refusal",), fault="refused")
    if status == "completed":
        if not items:
            return Outcome(fault="incomplete: no output")
        return Outcome(("tool_calls" if any(item["type"] in _CALLS for item in items) else "stop",))
    if status == "incomplete":
        details = response.get("incomplete_details")
        reason = str(details.get("reason")) if isinstance(details, dict) else "unknown"
        if reason == "content_filter":
            return Outcome((reason,), fault="refused")
        return Outcome((_FINISHES.get(reason, reason),))
    return Outcome(fault=f"incomplete: status {str(status)[:40]}")


def _sound(output: object) -> bool:
    """Whether it is a list of items that can be taken apart."""
    if not isinstance(output, list):
        return False
    for item in output:
        if not isinstance(item, dict) or not isinstance(item.get("type"), str):
            return False
        if item["type"] == "message" and not _parts(item.get("content")):
            return False
        if item["type"] == "reasoning" and not (_parts(item.get("summary")) and _parts(item.get("content") or [])):
            return False
        if item["type"] == "function_call" and not isinstance(item.get("arguments"), str):
            return False
        if item["type"] == "custom_tool_call" and not isinstance(item.get("input"), str):
            return False
    return True


def _parts(content: object) -> bool:
    spoken = ("output_text", "reasoning_text", "summary_text")
    return isinstance(content, list) and all(
        isinstance(part, dict)
        and isinstance(part.get("type"), str)
        and (part["type"] not in spoken or isinstance(part.get("text"), str))
        for part in content
    )


def _visible(item: Any) -> Any:
    """An item without what is encrypted anew each time it is sent."""
    return {name: value for name, value in item.items() if name != "encrypted_content"}


def _side_effects(body: Mapping[str, Any]) -> str:
    if body.get("store") is True:
        return "store: true"
    if body.get("background"):
        return "background: true"
    return "a conversation kept upstream" if body.get("conversation") is not None else ""


def _world(body: Mapping[str, Any]) -> str:
    tools, items = body.get("tools"), body.get("input")
    if isinstance(tools, list) and any(
        not isinstance(tool, dict) or tool.get("type") not in ("function", "custom") for tool in tools
    ):
        return "a hosted tool"
    if isinstance(items, list) and any(_is_reference(item) for item in items):
        return "items kept upstream"
    return next((what for name, what in _KEPT_UPSTREAM.items() if body.get(name) is not None), "")


def _is_reference(item: object) -> bool:
    """Whether an item of the input is but the name of one: its type may be left out, as that of a message may."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)


def _turns(body: Mapping[str, Any]) -> list[Turn]:
    """Instructions and input as turns."""
    instructions, given_input = body.get("instructions"), body.get("input")
    turns = [Turn("system", instructions if isinstance(instructions, str) else None)] if instructions else []
    if isinstance(given_input, list):
        return turns + [_turn(item) for item in given_input]
    return [*turns, Turn("user", given_input if isinstance(given_input, str) else None)]


def _turn(item: object) -> Turn:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return Turn("", None)
    content = item.get("content")
    if isinstance(content, list):
        only = content[0] if len(content) == 1 else None
        plain = isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] == "input_text"
        content = only["text"] if plain and only is not None else None
    extra = item.keys() - {"type", "role", "content"}
    return Turn(str(item.get("role")), content if isinstance(content, str) and not extra else None)
