"""What OpenAI's APIs share: bookkeeping fields, the error form, and usage."""

from __future__ import annotations

from typing import Any

import orjson

VARY = ("openai-beta",)

EXCLUDED = {
    "stream": "delivery: one entry serves both forms",
    "stream_options": "delivery",
    "user": "bookkeeping of the provider",
    "metadata": "bookkeeping of the provider",
    "store": "bookkeeping of the provider; where true, nothing is kept here",
    "safety_identifier": "bookkeeping of the provider",
    "prompt_cache_key": "a hint where the prefix may be cached",
    "prompt_cache_retention": "a hint how long the prefix may be cached",
    "cache_salt": "replaced by the gateway's own",
    "kv_transfer_params": "between engines; a caller's own are not sent",
    "priority": "order of service",
}

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(status: int, message: str, code: str | None) -> bytes:
    """OpenAI's error form."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def usage_of(usage: object) -> dict[str, int]:
    """Tokens as the ledger counts them, of an OpenAI ``usage`` object; fields that are missing or absurd stay out.

    Both spellings are read: ``prompt_tokens``/``completion_tokens`` and ``input_tokens``/``output_tokens``. ``prompt``
    includes ``cached``.
    """
    if not isinstance(usage, dict):
        return {}
    details: Any = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    if not isinstance(details, dict):
        details = {}
    return counts(
        prompt=usage.get("prompt_tokens", usage.get("input_tokens")),
        output=usage.get("completion_tokens", usage.get("output_tokens")),
        cached=details.get("cached_tokens"),
        cache_write=details.get("cache_write_tokens"),
    )


def counts(**found: object) -> dict[str, int]:
    """Those of the counts that are sane numbers."""
    return {name: count for name, count in found.items() if type(count) is int and 0 <= count < 2**40}
