"""OpenAI chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.base import Lazily, Unjoinable
from gateway.dialects.choices import ChoicesDialect
from gateway.dialects.curated import CAPS, DELIVERY, SAMPLING, given, room_for
from gateway.dialects.hints import prompt_cache_key
from gateway.dialects.joining import cut, merge
from policies.cacheability import Ask, Turn

_SEARCHES = frozenset(("web_search_options", "search_parameters", "enable_search", "plugins"))
"""Fields by which providers are told to look something up."""
_CURATED_DESPITE = DELIVERY | SAMPLING | CAPS | {"messages", "store"}
_SPOKEN_FIRST = ("reasoning_content", "reasoning", "content", "refusal")
_ARGUMENTS = {"function": "arguments", "custom": "input"}


class ChatCompletions(ChoicesDialect):
    """Messages in, messages out."""

    name = "chat"
    path = "/v1/chat/completions"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def ask(self, body: Mapping[str, Any]) -> Ask:
        return Ask(
            turns=Lazily(lambda: _turns(body)),
            temperature=body.get("temperature"),
            tools=bool(body.get("tools") or body.get("functions")),
            side_effects=_side_effects(body),
            world=_world(body),
        )

    def hint(self, body: Mapping[str, Any], salt: str) -> dict[str, Any]:
        messages = body.get("messages")
        told = itertools.takewhile(_is_instruction, messages) if isinstance(messages, list) else ()
        return prompt_cache_key(body, salt, body.get("tools"), list(told))

    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        asked = given(body)
        if not asked.keys() <= _CURATED_DESPITE or body.get("store") is True or not room_for(text, asked):
            return None
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return orjson.dumps({"object": self.answer_object, "model": model, "choices": [choice], "usage": usage})

    def is_sound(self, choice: dict[str, Any]) -> bool:
        message = choice.get("message")
        if not isinstance(message, dict) or not isinstance(choice.get("logprobs"), dict | None):
            return False
        calls = message.get("tool_calls")
        return calls is None or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls))

    def refuses(self, choice: dict[str, Any]) -> bool:
        message = choice["message"]
        return bool(message.get("refusal")) and not message.get("content") and not message.get("tool_calls")

    def split(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        message, logprobs = dict(choice["message"]), choice.get("logprobs")
        first = {"role": message.pop("role", "assistant")}
        if not message.get("content"):
            first["content"] = message.pop("content", None)
        deltas = [first]
        for name in _SPOKEN_FIRST:
            if (text := message.get(name)) and isinstance(text, str):
                del message[name]
                whole = logprobs and name in ("content", "refusal")
                deltas += [{name: piece} for piece in ([text] if whole else cut(text))]
        calls = message.pop("tool_calls") if message.get("tool_calls") else []
        if message:
            deltas.append(message)
        deltas += [{"tool_calls": [piece]} for i, call in enumerate(calls) for piece in _call_pieces(i, call)]
        parts = [{"delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if logprobs is not None:
            spoken = (p for p in parts if p["delta"].get("content") or p["delta"].get("refusal"))
            next(spoken, parts[0])["logprobs"] = logprobs
        rest = {name: value for name, value in choice.items() if name not in ("index", "message", "logprobs")}
        return [*parts, {"delta": {}, "logprobs": None, **rest}]

    def add(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        if "message" in part:
            raise Unjoinable("a chunk with a whole message")
        merge(choice.setdefault("message", {}), part.pop("delta", None) or {})
        merge(choice, part)

    def complete(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **choice["message"]}
        return {"logprobs": None, **choice, "message": message}

    def is_empty(self, part: dict[str, Any]) -> bool:
        delta = part.get("delta") or {}
        return not part.get("finish_reason") and isinstance(delta, dict) and not any(delta.values())


def _side_effects(body: Mapping[str, Any]) -> str:
    if body.get("store") is True:
        return "store: true"
    modalities = body.get("modalities")
    if body.get("audio") or (isinstance(modalities, list) and "audio" in modalities):
        return "spoken answers are kept by the provider"
    return ""


def _world(body: Mapping[str, Any]) -> str:
    tools = body.get("tools")
    if isinstance(tools, list) and any(
        not isinstance(tool, dict) or tool.get("type") not in ("function", "custom") for tool in tools
    ):
        return "a hosted tool"
    if _SEARCHES.isdisjoint(body):
        return ""
    return "web search" if any(body.get(name) not in (None, False) for name in _SEARCHES) else ""


def _is_instruction(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _turns(body: Mapping[str, Any]) -> list[Turn]:
    messages = body.get("messages")
    return [_turn(message) for message in messages] if isinstance(messages, list) else []


def _turn(message: object) -> Turn:
    if not isinstance(message, dict):
        return Turn("", None)
    content = message.get("content")
    if isinstance(content, list):
        only = content[0] if len(content) == 1 else None
        plain = isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] == "text"
        content = only["text"] if plain and only is not None else None
    extra = message.keys() - {"role", "content"}
    return Turn(str(message.get("role")), content if isinstance(content, str) and not extra else None)


def _call_pieces(index: int, call: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool call as the pieces of its stream: who is called first, then the arguments."""
    for inner, field in _ARGUMENTS.items():
        named = call.get(inner)
        if not isinstance(named, dict):
            continue
        text = named.get(field)
        if isinstance(text, str) and text:
            head = {**call, "index": index, inner: {**named, field: ""}}
            return [head, *({"index": index, inner: {field: piece}} for piece in cut(text))]
    return [{**call, "index": index}]
