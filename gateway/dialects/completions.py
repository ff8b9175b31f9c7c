"""OpenAI completions, the older text form: ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.joining import cut, merge
from gateway.dialects.openai import OpenAIDialect
from policies.cacheability import Ask, Turn

_HARMLESS_TO_CURATED = frozenset(
    [
        "model",
        "prompt",
        "stream",
        "stream_options",
        "user",
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
        "best_of",
        "max_tokens",
    ]
)


class Completions(OpenAIDialect):
    """A prompt in, text out."""

    name = "completions"
    path = "/v1/completions"
    answer_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def ask(self, body: Mapping[str, Any]) -> Ask:
        prompt = body.get("prompt")
        return Ask(
            turns=[Turn("user", prompt if isinstance(prompt, str) else None)],
            temperature=body.get("temperature"),
            side_effects="store: true" if body.get("store") is True else "",
        )

    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        limit = body.get("max_tokens")
        if not body.keys() <= _HARMLESS_TO_CURATED or not isinstance(limit, int) or limit < len(text.encode()):
            return None  # the default limit of 16 tokens would have cut it
        if body.get("n") not in (None, 1):
            return None
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return orjson.dumps({"object": self.answer_object, "model": model, "choices": [choice], "usage": usage})

    def split(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        rest = {
            name: value for name, value in choice.items() if name not in ("index", "text", "finish_reason", "logprobs")
        }
        text, logprobs = choice.get("text") or "", choice.get("logprobs")
        pieces = [text] if logprobs or not text else cut(text)
        parts = [{"text": piece, "logprobs": None, "finish_reason": None} for piece in pieces]
        parts[0]["logprobs"] = logprobs
        return [*parts, {"text": "", "logprobs": None, "finish_reason": choice.get("finish_reason"), **rest}]

    def add(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        merge(choice, part)

    def complete(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {"text": "", "logprobs": None, **choice}

    def is_empty(self, part: dict[str, Any]) -> bool:
        return not part.get("finish_reason") and not part.get("text")
