"""Anthropic's message stream, both ways: ``message_start``, content blocks one after another, ``message_delta`` with
the reason of the end and cumulative usage, ``message_stop``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cache.response.canonical import respell
from gateway.dialects.base import Unjoinable
from gateway.dialects.joining import cut, load

_AT_THE_END = ("stop_reason", "stop_sequence", "stop_details", "container")
"""Fields of a message that its stream tells in ``message_delta``."""
_BESIDE_THE_END = ("context_management",)
"""Fields of a message that stand beside the ``delta`` of ``message_delta``."""


class Blocks:
    """A message in the making. `add` each event's data, in order."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.usage: dict[str, Any] = {}
        self.stopped = False
        self._blocks: list[_Block] = []

    def add(self, event: dict[str, Any]) -> None:
        """Raises `Unjoinable`, or KeyError, TypeError, AttributeError for unknown forms."""
        kind = event["type"]
        if kind == "message_start":
            if self.message:
                raise Unjoinable("a second message_start")
            self.message = dict(event["message"])
            self.usage = dict(self.message.get("usage") or {})
            if self.message.get("content"):
                raise Unjoinable("content in message_start")
        elif not self.message:
            raise Unjoinable("an event before message_start")
        elif kind == "content_block_start":
            if event["index"] != len(self._blocks):
                raise Unjoinable("content blocks out of order")
            self._blocks.append(_Block(event["content_block"]))
        elif kind == "content_block_delta":
            self._block(event["index"]).add(event["delta"])
        elif kind == "content_block_stop":
            self._block(event["index"]).closed = True
        elif kind == "message_delta":
            _update(self.message, event["delta"])
            _update(self.message, {k: v for k, v in event.items() if k not in ("type", "delta", "usage")})
            _update(self.usage, event.get("usage") or {})
        elif kind == "message_stop":
            self.stopped = True
        else:
            raise Unjoinable(f"an event of type {str(kind)[:40]!r}")

    def whole(self) -> dict[str, Any]:
        """The plain message; raises `Unjoinable`."""
        if not all(block.closed for block in self._blocks):
            raise Unjoinable("a content block without an end")
        content = [block.whole() for block in self._blocks]
        return {**self.message, "content": content, "usage": self.usage}

    def _block(self, index: int) -> _Block:
        if not 0 <= index < len(self._blocks) or self._blocks[index].closed:
            raise Unjoinable("a delta outside its content block")
        return self._blocks[index]


def _update(into: dict[str, Any], new: dict[str, Any]) -> None:
    """What comes later holds, and null leaves what was there: counts are cumulative, never to be added."""
    into.update({name: value for name, value in new.items() if value is not None or name not in into})


class _Block:
    """A content block in the making."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.closed = False
        self._start = dict(start)
        self._texts: dict[str, list[str]] = {}
        self._citations: list[Any] = []

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta["type"]
        if kind == "text_delta":
            self._grow("text", delta["text"])
        elif kind == "thinking_delta":
            self._grow("thinking", delta["thinking"])
        elif kind == "input_json_delta":
            self._grow("input", delta["partial_json"])
        elif kind == "citations_delta":
            self._citations.append(delta["citation"])
        elif kind == "signature_delta" and not self._start.get("signature"):
            self._start["signature"] = delta["signature"]
        else:
            raise Unjoinable(f"a delta of type {str(kind)[:40]!r}")

    def whole(self) -> dict[str, Any]:
        block = self._start
        for name, pieces in self._texts.items():
            text = "".join(pieces)
            if name != "input":
                block[name] = block.get(name, "") + text
            elif text:
                if block.get("input"):
                    raise Unjoinable("tool input that came twice")
                try:
                    block["input"] = load(text.encode())
                except ValueError:
                    raise Unjoinable("tool input that is not JSON") from None
        if self._citations:
            block["citations"] = [*(block.get("citations") or []), *self._citations]
        return block

    def _grow(self, name: str, piece: str) -> None:
        if not isinstance(piece, str):
            raise Unjoinable(f"a piece of {name} that is not a text")
        self._texts.setdefault(name, []).append(piece)


def message_events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data of each event of a plain message, in order."""
    counted_last = {name: value for name, value in message["usage"].items() if name.startswith("output_tokens")}
    counted_first = {name: value for name, value in message["usage"].items() if name not in counted_last}
    begun = {name: value for name, value in message.items() if name not in _BESIDE_THE_END}
    begun |= {name: None for name in _AT_THE_END if name in message}
    begun |= {"content": [], "usage": {**counted_first, "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        start, deltas = _taken_apart(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    beside = {name: message[name] for name in _BESIDE_THE_END if name in message}
    ending = {name: message[name] for name in _AT_THE_END if name in message}
    yield {"type": "message_delta", "delta": ending, "usage": counted_last, **beside}
    yield {"type": "message_stop"}


def _taken_apart(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as the start of its stream, and its deltas."""
    start = dict(block)
    deltas: list[dict[str, Any]] = []
    if block["type"] == "text":
        start["text"] = ""
        deltas += [{"type": "text_delta", "text": piece} for piece in cut(block["text"])]
        if block.get("citations"):
            start["citations"] = []
            deltas += [{"type": "citations_delta", "citation": citation} for citation in block["citations"]]
    elif block["type"] == "thinking":
        start["thinking"] = ""
        deltas += [{"type": "thinking_delta", "thinking": piece} for piece in cut(block["thinking"])]
        if block.get("signature"):
            start["signature"] = ""
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
    elif block["type"].endswith("tool_use") and isinstance(block.get("input"), dict):
        start["input"] = {}
        text = respell(block["input"]).decode() if block["input"] else ""
        deltas += [{"type": "input_json_delta", "partial_json": piece} for piece in cut(text) or [""]]
    return start, deltas
