"""OpenAI completions, the older text form: ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.choices import ChoicesDialect
from gateway.dialects.curated import CAPS, DELIVERY, SAMPLING, given, room_for
from gateway.dialects.joining import cut, merge
from policies.cacheability import Ask, Turn

_CURATED_DESPITE = DELIVERY | SAMPLING | CAPS | {"prompt"}


class Completions(ChoicesDialect):
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
        asked = given(body)
        if not asked.keys() <= _CURATED_DESPITE or "max_tokens" not in asked or not room_for(text, asked):
            return None  # the default limit of 16 tokens would have cut it
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return orjson.dumps({"object": self.answer_object, "model": model, "choices": [choice], "usage": usage})

    def expected(self, body: Mapping[str, Any]) -> int:
        prompt = body.get("prompt")
        batch = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return super().expected(body) * batch

    def is_sound(self, choice: dict[str, Any]) -> bool:
        return isinstance(choice.get("text"), str) and isinstance(choice.get("logprobs"), dict | None)

    def refuses(self, choice: dict[str, Any]) -> bool:
        return False

    def split(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        text, logprobs = choice["text"], choice.get("logprobs")
        pieces = [text] if logprobs or not text else cut(text)
        parts = [{"text": piece, "logprobs": None, "finish_reason": None} for piece in pieces]
        parts[0]["logprobs"] = logprobs
        rest = {name: value for name, value in choice.items() if name not in ("index", "text", "logprobs")}
        return [*parts, {"text": "", "logprobs": None, **rest}]

    def add(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        merge(choice, part)

    def complete(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {"text": "", "logprobs": None, **choice}

    def is_empty(self, part: dict[str, Any]) -> bool:
        return not part.get("finish_reason") and not part.get("text")
