"""OpenAI chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.base import Unjoinable
from gateway.dialects.joining import by_index, cut, merge
from gateway.dialects.openai import OpenAIDialect
from policies.cacheability import Ask, Turn

_HARMLESS_TO_CURATED = frozenset(
    [
        "model",
        "messages",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_salt",
        "priority",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "max_tokens",
        "max_completion_tokens",
    ]
)


class ChatCompletions(OpenAIDialect):
    """Messages in, messages out."""

    name = "chat"
    path = "/v1/chat/completions"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def ask(self, body: Mapping[str, Any]) -> Ask:
        messages = body.get("messages")
        turns = [_turn(message) for message in messages] if isinstance(messages, list) else []
        tools = body.get("tools")
        hosted = isinstance(tools, list) and any(
            not isinstance(tool, dict) or tool.get("type") not in ("function", "custom") for tool in tools
        )
        return Ask(
            turns=turns,
            temperature=body.get("temperature"),
            tools=bool(tools or body.get("functions")),
            side_effects="store: true" if body.get("store") is True else "",
            world="web search" if body.get("web_search_options") is not None else "a hosted tool" if hosted else "",
        )

    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        if not body.keys() <= _HARMLESS_TO_CURATED or body.get("store") is True or body.get("n") not in (None, 1):
            return None
        for limit in (body.get("max_tokens"), body.get("max_completion_tokens")):
            if limit is not None and not (isinstance(limit, int) and limit >= len(text.encode())):
                return None
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return orjson.dumps({"object": self.answer_object, "model": model, "choices": [choice], "usage": usage})

    def split(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        message = dict(choice.get("message") or {})
        logprobs = choice.get("logprobs")
        parts: list[dict[str, Any]] = []
        first: dict[str, Any] = {"role": message.pop("role", "assistant")}
        if message.get("content") is None:
            first["content"] = message.pop("content", None)
        parts.append(first)
        texts = [
            name
            for name in ("reasoning_content", "reasoning", "content", "refusal")
            if isinstance(message.get(name), str)
        ]
        calls = message.pop("tool_calls", None)
        for name in texts:
            text = message.pop(name)
            whole = name in ("content", "refusal") and logprobs
            parts += [{name: piece} for piece in ([text] if whole or not text else cut(text))]
        if message:
            parts.append(message)
        if calls is not None:
            parts += [
                {"tool_calls": [piece]} for index, call in enumerate(calls) for piece in _call_pieces(index, call)
            ]
        found = [{"delta": part, "finish_reason": None} for part in parts]
        if logprobs is not None:
            carrier = next(
                (part for part in found if "content" in part["delta"] or "refusal" in part["delta"]), found[0]
            )
            carrier["logprobs"] = logprobs
        rest = {name: value for name, value in choice.items() if name not in ("index", "message", "logprobs")}
        return [*found, {"delta": {}, "finish_reason": None, **rest}]

    def add(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        merge(choice.setdefault("message", {}), part.get("delta") or {})
        merge(choice, {name: value for name, value in part.items() if name != "delta"})

    def complete(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **choice.get("message", {})}
        if message.get("tool_calls"):
            message["tool_calls"] = by_index(message["tool_calls"], "tool_calls")
        if message.get("function_call") and not isinstance(message["function_call"], dict):
            raise Unjoinable("function_call is not an object")
        return {"logprobs": None, **choice, "message": message}

    def is_empty(self, part: dict[str, Any]) -> bool:
        return not part.get("finish_reason") and not any(value for value in (part.get("delta") or {}).values())


def _turn(message: object) -> Turn:
    if not isinstance(message, dict):
        return Turn("", None)
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = parts[0] if len(parts) == 1 else None
    extra = message.keys() - {"role", "content"}
    return Turn(str(message.get("role")), content if isinstance(content, str) and not extra else None)


def _call_pieces(index: int, call: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool call as the pieces of its stream: who is called first, then the arguments."""
    inner = next((name for name in ("function", "custom") if isinstance(call.get(name), dict)), None)
    if inner is None:
        return [{"index": index, **call}]
    field = "arguments" if inner == "function" else "input"
    text = call[inner].get(field)
    if not isinstance(text, str) or not text or field == "input":
        return [{"index": index, **call}]
    head = {"index": index, **call, inner: {**call[inner], field: ""}}
    return [head, *({"index": index, inner: {field: piece}} for piece in cut(text))]
