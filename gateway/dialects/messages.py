"""Anthropic Messages: ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from cache.response.canonical import respell
from gateway.dialects.anthropic import EXCLUDED, VARY, error_body, turns_of, usage_of, world_of
from gateway.dialects.base import Answer, Dialect, Lazily, Rendered
from gateway.dialects.curated import CAPS, DELIVERY, SAMPLING, given, room_for
from gateway.dialects.events import EventCollector
from gateway.dialects.hints import breakpoints
from gateway.dialects.joining import load, member
from gateway.dialects.message_events import Blocks, message_events
from gateway.ids import unique
from gateway.sse import frame
from policies.cacheability import Ask, Outcome

_CURATED_DESPITE = DELIVERY | SAMPLING | CAPS | {"messages"}
_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
"""Stop reasons by the names that the configuration uses for all dialects."""
_NEVER = {"refusal": "refused", "pause_turn": "incomplete: the model paused"}
"""Stop reasons that no configuration makes storable."""
_START = b'event: message_start\ndata: {"type":"message_start","message":{'


class Messages(Dialect):
    """Messages in, content blocks out."""

    name = "messages"
    path = "/v1/messages"
    excluded = EXCLUDED
    vary = VARY

    def ask(self, body: Mapping[str, Any]) -> Ask:
        return Ask(
            turns=Lazily(lambda: turns_of(body)),
            temperature=body.get("temperature"),
            tools=bool(body.get("tools")),
            world=world_of(body),
        )

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def hint(self, body: Mapping[str, Any], salt: str) -> dict[str, Any]:
        return breakpoints(body)

    def wants_usage(self, body: Mapping[str, Any]) -> bool:
        return True

    def read(self, body: Mapping[str, Any], answer: bytes) -> Answer:
        try:
            message = load(answer)
        except ValueError:
            return Answer(None, Outcome(fault="not JSON"))
        if not isinstance(message, dict):
            return Answer(None, Outcome(fault="not a JSON object"))
        if message.get("type") == "error" or message.get("error"):
            return Answer(None, Outcome(fault="an error with a success status"))
        return _answer(message)

    def usage_in(self, answer: bytes) -> dict[str, int]:
        return usage_of(member(answer, "usage"))

    def collector(self, body: Mapping[str, Any]) -> MessageCollector:
        return MessageCollector()

    def render(self, message: bytes) -> Rendered:
        whole: dict[str, Any] = load(message)
        first, *others = message_events(whole)
        rest = b"".join(frame(respell(event), event["type"]) for event in others)
        stream = (_START, respell(first["message"])[1:] + b"}\n\n" + rest)
        return Rendered((b"{", respell(whole)[1:]), stream, stream)

    def identity(self, now: float) -> bytes:
        return b'"id":"msg_%s",' % unique(24).encode()

    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        asked = given(body)
        if not asked.keys() <= _CURATED_DESPITE or not room_for(text, asked):
            return None
        return orjson.dumps(
            {
                "type": "message",
                "role": "assistant",
                "model": model,
                "content": [{"type": "text", "text": text}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }
        )

    def error(self, status: int, message: str, code: str | None = None, request_id: str = "") -> bytes:
        return error_body(status, message, request_id)

    def error_event(self, message: str, code: str) -> bytes:
        return frame(error_body(502, message), "error")


class MessageCollector(EventCollector):
    """Joins the events of one message."""

    marks = (b"message_", b"error")

    def __init__(self) -> None:
        super().__init__()
        self._blocks = Blocks()

    def join(self, name: str, data: dict[str, Any]) -> None:
        self.done = data.get("type") == "message_stop"
        self._blocks.add(data)

    def usage(self) -> dict[str, int]:
        return usage_of(self._blocks.usage)

    def answer(self) -> Answer:
        return _answer(self._blocks.whole())


def _answer(message: dict[str, Any]) -> Answer:
    """A plain message as an answer; the identity is left out."""
    usage = usage_of(message.get("usage"))
    content = message.get("content")
    if message.get("type") != "message" or "output" not in usage or not _sound(content):
        return Answer(None, Outcome(fault="unknown form"), usage)
    kept = respell({name: value for name, value in message.items() if name != "id"})
    reason = message.get("stop_reason")
    if not isinstance(reason, str):
        return Answer(None, Outcome(fault="incomplete: no stop reason"), usage)
    if not content and reason not in _NEVER:
        return Answer(None, Outcome(fault="incomplete: no content"), usage)
    return Answer(kept, Outcome((_FINISHES.get(reason, reason),), _NEVER.get(reason, "")), usage)


def _sound(content: object) -> bool:
    """Whether it is a list of content blocks that can be taken apart."""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        return False
    texts = {"text": "text", "thinking": "thinking"}
    for block in content:
        kind = block.get("type")
        if not isinstance(kind, str) or (kind in texts and not isinstance(block.get(texts[kind]), str)):
            return False
    return True
