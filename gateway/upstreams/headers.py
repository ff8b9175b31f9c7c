"""Which headers cross the gateway, both ways: allow-lists, so that nothing of one caller reaches another by default."""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime

from gateway.http import HOP_BY_HOP, Headers, Request

_TO_UPSTREAM = frozenset(
    (
        b"accept",
        b"accept-language",
        b"content-type",
        b"idempotency-key",
        b"traceparent",
        b"tracestate",
        b"user-agent",
    )
)
_PREFIXES_TO_UPSTREAM = (b"openai-", b"anthropic-", b"x-stainless-")
_CREDENTIALS = (b"authorization", b"x-api-key")

_TO_CALLER = frozenset(
    (b"content-type", b"content-language", b"request-id", b"retry-after", b"retry-after-ms", b"x-should-retry")
)
_PREFIXES_TO_CALLER = (b"openai-", b"anthropic-", b"x-ratelimit-", b"ratelimit")

_NUMBER = re.compile(rb"[0-9]+(\.[0-9]+)?")
_OURS = (b"x-warmgate-", b"x-forwarded-")
_NEVER_BACK = frozenset((b"set-cookie", b"content-length", b"date", b"server", b"x-request-id"))


def retry_after(headers: Headers, now: float) -> float | None:
    """Seconds for which an upstream asks to be left alone (RFC 9110 section 10.2.3, and OpenAI's in milliseconds); None
    where it does not. ``now``: unix seconds.
    """
    named = dict(headers)
    milliseconds, text = (
        named.get(b"retry-after-ms", b"").strip(),
        named.get(b"retry-after", b"").strip().decode("latin-1"),
    )
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    try:
        return float(text) if text.isdigit() else max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except ValueError:
        return None


def credentials(api: str, api_key: str | None, request: Request, *, open_gateway: bool) -> Headers:
    """What proves us to the upstream: its configured key; without one, on an open gateway, the caller's own.

    A caller's key for this gateway never leaves it.
    """
    if api_key is not None:
        return (
            [(b"x-api-key", api_key.encode())]
            if api == "anthropic"
            else [(b"authorization", b"Bearer " + api_key.encode())]
        )
    return [(name, value) for name, value in request.headers if name in _CREDENTIALS] if open_gateway else []


def passed_on(headers: Headers) -> Headers:
    """Those of a caller's headers that go on to a known endpoint. No content coding is invited, since the answer is
    read on its way.
    """
    kept = [(n, v) for n, v in headers if n in _TO_UPSTREAM or n.startswith(_PREFIXES_TO_UPSTREAM)]
    return [*kept, (b"accept-encoding", b"identity")]


def to_upstream(request: Request, request_id: str, proof: Headers) -> Headers:
    """Request headers for a known endpoint; last comes what differs from request to request (`request_head`)."""
    kept = request.passed_on
    if kept is None:
        kept = request.passed_on = passed_on(request.headers)
    return [*kept, *proof, (b"x-request-id", request_id.encode())]


def to_caller(headers: Headers) -> Headers:
    """Response headers of a known endpoint that concern the caller whose request went upstream."""
    return [(n, v) for n, v in headers if n in _TO_CALLER or n.startswith(_PREFIXES_TO_CALLER)]


def through_to_upstream(request: Request, request_id: str, proof: Headers) -> Headers:
    """Request headers of an endpoint that is passed through untouched: all but what belongs to this hop or this
    gateway.
    """
    dropped = (*_CREDENTIALS, b"cookie", b"x-request-id", b"host", b"content-length")
    kept = [(n, v) for n, v in request.headers if n not in HOP_BY_HOP and n not in dropped and not n.startswith(_OURS)]
    return [*kept, *proof, (b"x-request-id", request_id.encode())]


def through_to_caller(headers: Headers) -> Headers:
    """Response headers of an endpoint that is passed through untouched."""
    return [(n, v) for n, v in headers if n not in HOP_BY_HOP and n not in _NEVER_BACK]
