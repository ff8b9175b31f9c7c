"""Anthropic's token counting: ``POST /v1/messages/count_tokens``. The count is a function of the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.anthropic import EXCLUDED, VARY, error_body, turns_of, world_of
from gateway.dialects.base import Answer
from gateway.dialects.joining import load
from gateway.dialects.plain import PlainDialect
from gateway.sse import frame
from policies.cacheability import Ask, Outcome

NOTHING_USED = {"prompt": 0, "output": 0, "cached": 0}
"""Counting computes nothing and costs nothing."""


class CountTokens(PlainDialect):
    """Messages in, a number out."""

    name = "count_tokens"
    path = "/v1/messages/count_tokens"
    excluded = EXCLUDED
    vary = VARY
    interchangeable = False  # each model counts by its own tokens

    def ask(self, body: Mapping[str, Any]) -> Ask:
        return Ask(turns=turns_of(body), world=world_of(body), always_deterministic=True)

    def read(self, body: Mapping[str, Any], answer: bytes) -> Answer:
        try:
            count = load(answer)
        except ValueError:
            return Answer(None, Outcome(fault="not JSON"))
        if not isinstance(count, dict) or type(count.get("input_tokens")) is not int or count.get("error"):
            return Answer(None, Outcome(fault="unknown form"))
        return Answer(answer, Outcome(("stop",)), NOTHING_USED)

    def error(self, status: int, message: str, code: str | None = None, request_id: str = "") -> bytes:
        return error_body(status, message, request_id)

    def error_event(self, message: str, code: str) -> bytes:
        return frame(error_body(502, message), "error")
