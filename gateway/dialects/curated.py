"""When a curated text may answer a request: only where every field that was given leaves it a right answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DELIVERY = frozenset(
    (
        "cache_salt",
        "metadata",
        "model",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream",
        "stream_options",
        "user",
    )
)
"""Fields that change how an answer is delivered or booked."""

SAMPLING = frozenset(
    (
        "best_of",
        "frequency_penalty",
        "min_p",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    )
)
"""Fields that choose among the answers of a model."""

CAPS = frozenset(("max_tokens", "max_completion_tokens", "max_output_tokens"))
"""Fields that bound the length of an answer, in tokens."""


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something: null is the same as absent."""
    return {name: value for name, value in body.items() if value is not None}


def room_for(text: str, asked: Mapping[str, Any]) -> bool:
    """Whether one answer is asked for, and the text surely fits (no token is shorter than a byte)."""
    if any(asked.get(name, 1) != 1 for name in ("n", "best_of")):
        return False
    caps = [asked[name] for name in CAPS if name in asked]
    return all(isinstance(cap, int) and cap >= len(text.encode()) for cap in caps)
