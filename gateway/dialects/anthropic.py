"""What Anthropic's APIs share: headers that change the answer, the error form, usage, tools that the provider runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.openai import counts
from policies.cacheability import Turn

VARY = ("anthropic-version", "anthropic-beta")

EXCLUDED = {
    "stream": "delivery: one entry serves both forms",
    "metadata": "bookkeeping of the provider",
    "cache_salt": "replaced by the gateway's own",
}
"""``cache_control`` is in the key wherever it stands: the marks change no answer, but they stand in tools, system and
messages beside what the model reads, and the usage of an answer tells what was cached.
"""

_KINDS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_RUN_BY_CALLER = ("bash_", "computer_", "memory_", "text_editor_")
"""Anthropic's own tools that the caller runs; a type that is not known is taken for one that the provider runs."""


def error_body(status: int, message: str, request_id: str = "") -> bytes:
    """Anthropic's error form."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"request_id": request_id} if request_id else {}
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}, **told})


def usage_of(usage: object) -> dict[str, int]:
    """Tokens as the ledger counts them. Anthropic's ``input_tokens`` leaves out what was read from or written to the
    provider's cache; ``prompt`` includes it.
    """
    if not isinstance(usage, dict):
        return {}
    found = counts(
        prompt=usage.get("input_tokens"),
        output=usage.get("output_tokens"),
        cached=usage.get("cache_read_input_tokens"),
        cache_write=usage.get("cache_creation_input_tokens"),
    )
    if "prompt" in found:
        found["prompt"] += found.get("cached", 0) + found.get("cache_write", 0)
    return found


def turns_of(body: Mapping[str, Any]) -> list[Turn]:
    """System and messages as turns."""
    messages = body.get("messages")
    system = [Turn("system", _text(body["system"]))] if body.get("system") else []
    return system + [_turn(message) for message in messages] if isinstance(messages, list) else system


def world_of(body: Mapping[str, Any]) -> str:
    """What the answer reads besides the prompt; the empty string for nothing."""
    tools = body.get("tools")
    if isinstance(tools, list) and any(_run_by_provider(tool) for tool in tools):
        return "a tool that the provider runs"
    return next((what for name, what in _KEPT_BY_PROVIDER.items() if body.get(name)), "")


_KEPT_BY_PROVIDER = {
    "mcp_servers": "MCP servers",
    "container": "a container",
    "diagnostics": "the caller's last answer",
}


def _run_by_provider(tool: object) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else "unknown"
    return kind not in (None, "custom") and not str(kind).startswith(_RUN_BY_CALLER)


def _turn(message: object) -> Turn:
    if not isinstance(message, dict):
        return Turn("", None)
    extra = message.keys() - {"role", "content"}
    return Turn(str(message.get("role")), None if extra else _text(message.get("content")))


def _text(content: object) -> str | None:
    """Content that is one plain text; None for any other."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        block = content[0]
        content = block["text"] if block.keys() == {"type", "text"} and block["type"] == "text" else None
    return content if isinstance(content, str) else None
