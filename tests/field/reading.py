"""One question in every API, and what its answers say: read by the grammar of each API, apart from the gateway's own
code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "Say A"}]},
    ),
    "completions": ("/v1/completions", {"model": "m1", "temperature": 0, "prompt": "Say A"}),
    "messages": (
        "/v1/messages",
        {"model": "m1", "temperature": 0, "max_tokens": 100, "messages": [{"role": "user", "content": "Say A"}]},
    ),
    "responses": ("/v1/responses", {"model": "m1", "temperature": 0, "store": False, "input": "Say A"}),
}
"""Path and body, by API."""


class Event(NamedTuple):
    """A server-sent event: its name (empty: unnamed) and its data; None for a block of comments."""

    name: str
    data: str | None

    @property
    def json(self) -> Any:
        return orjson.loads(self.data or "")


def events_of(stream: bytes) -> list[Event]:
    """Every block of a stream by the grammar (WHATWG HTML 9.2.6); an unfinished last block is not an event."""
    text = stream.decode().replace("\r\n", "\n").replace("\r", "\n")
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = "", []
        for line in block.lstrip("\n").split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data.append(value)
            elif field == "event":
                name = value
        found.append(Event(name, "\n".join(data) if data else None))
    return found


def json_events(stream: bytes) -> list[Any]:
    """The data of every event that is JSON: all but comments and the end mark."""
    return [event.json for event in events_of(stream) if event.data is not None and event.data != "[DONE]"]


def text_of(answer: dict[str, Any]) -> str:
    """What a plain answer says (its first choice)."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return "".join(part["text"] for part in parts)


def text_of_stream(stream: bytes) -> str:
    """What a streamed answer says (its first choice)."""
    return "".join(map(_piece, json_events(stream)))


def _piece(event: dict[str, Any]) -> str:
    if "choices" in event:
        parts = [choice for choice in event["choices"] if choice["index"] == 0]
        return "".join((part["delta"].get("content") if "delta" in part else part["text"]) or "" for part in parts)
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return event["delta"].get("text", "") if event.get("type") == "content_block_delta" else ""


def message_of_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a chat stream builds up (its first choice), with its finish reason; nulls left out."""
    message: dict[str, Any] = {"tool_calls": {}}
    for part in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0):
        for name, value in {**part["delta"], "finish_reason": part.get("finish_reason")}.items():
            if name == "tool_calls":
                for piece in value:
                    _add_call(message["tool_calls"].setdefault(piece["index"], {}), piece)
            elif isinstance(value, str) and name not in ("role", "finish_reason"):
                message[name] = message.get(name, "") + value
            elif value is not None:
                assert name not in message, f"{name} came twice"
                message[name] = value
    return {**message, "tool_calls": [message["tool_calls"][index] for index in sorted(message["tool_calls"])]}


def _add_call(call: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        if name == "function":
            for inner, text in value.items():
                held = call.setdefault("function", {})
                held[inner] = held.get(inner, "") + text
        elif name != "index":
            assert call.get(name) is None, f"{name} came twice"
            call[name] = value
