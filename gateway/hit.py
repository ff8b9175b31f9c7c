"""The response to a hit: a kept message in the form the caller asked for, with an identity of its own."""

from __future__ import annotations

from gateway.http import EVENT_STREAM, JSON, NO_BUFFERING, Headers, Response
from gateway.plan import Plan


def segments_for(plan: Plan, message: bytes) -> tuple[bytes, ...]:
    """The bytes of a message in this caller's form, with gaps for its identity."""
    rendered = plan.dialect.render(message)
    if not plan.streams:
        return rendered.plain
    return rendered.stream_with_usage if plan.dialect.wants_usage(plan.body) else rendered.stream


def kept_response(plan: Plan, segments: tuple[bytes, ...], now: float, headers: Headers) -> Response:
    """A kept message as a response with these ``headers``. ``now``: unix seconds."""
    own = plan.dialect.identity(now) + plan.dialect.echo(plan.body)
    body = own.join(segments)
    if plan.streams:
        return Response(200, [EVENT_STREAM, *NO_BUFFERING, *headers], body)
    return Response(200, [JSON, *headers], body)


def hit_headers(outcome: str, age: float, expires_in: float) -> Headers:
    """``Cache-Status`` (RFC 9211) and ``Age`` (RFC 9111) of an answer from the store."""
    status = b"warmgate; hit; ttl=%d; detail=%s" % (expires_in, outcome.encode())
    return [(b"cache-status", status), (b"age", b"%d" % age)]
