"""The response to a hit: a kept message in the form the caller asked for, with an identity of its own."""

from __future__ import annotations

from dataclasses import dataclass

from cache.response.entry import BadEntry
from gateway.http import EVENT_STREAM, JSON, NO_BUFFERING, Headers, Response
from gateway.plan import Plan

_CACHE_STATUS = b"warmgate; hit; ttl=%d; detail=%s"


@dataclass(frozen=True, slots=True)
class Ready:
    """A fresh hit made ready for one request body: all the bytes that its responses share.

    ``head`` is a template of the headers behind the server's own, for the seconds left to live, the age in seconds, the
    request id and the length of the body; ``segments`` are the body with gaps for the identity, of which ``echo`` is a
    part.
    """

    head: bytes
    segments: tuple[bytes, ...]
    echo: bytes

    def filled(self, identity: bytes, expires_in: float, age: float, request_id: str) -> bytes:
        """Headers and body of one response."""
        body = (identity + self.echo).join(self.segments)
        return self.head % (expires_in, age, request_id.encode(), len(body)) + body


def ready(plan: Plan, message: bytes) -> Ready:
    """Prepares a message for repeats of the request that ``plan`` was made of."""
    headers = [
        *_form(plan),
        (b"cache-status", _CACHE_STATUS.replace(b"%s", b"exact")),
        (b"age", b"%d"),
        (b"x-request-id", b"%s"),
        (b"content-length", b"%d"),
    ]
    head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return Ready(head + b"\r\n", segments_for(plan, message), plan.echo)


def segments_for(plan: Plan, message: bytes) -> tuple[bytes, ...]:
    """The bytes of a message in this caller's form, with gaps for its identity. Raises `BadEntry` for what another
    version, or another hand, has put into the store.
    """
    try:
        rendered = plan.dialect.render(message)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise BadEntry("answer") from None
    if not plan.streams:
        return rendered.plain
    return rendered.stream_with_usage if plan.dialect.wants_usage(plan.body) else rendered.stream


def kept_response(plan: Plan, message: bytes, now: float, headers: Headers) -> Response:
    """A kept message as a response with these ``headers``. ``now``: unix seconds."""
    own = plan.dialect.identity(now) + plan.echo
    return Response(200, [*_form(plan), *headers], own.join(segments_for(plan, message)))


def hit_headers(outcome: str, age: float, expires_in: float) -> Headers:
    """``Cache-Status`` (RFC 9211) and ``Age`` (RFC 9111) of an answer from the store."""
    return [(b"cache-status", _CACHE_STATUS % (expires_in, outcome.encode())), (b"age", b"%d" % age)]


def _form(plan: Plan) -> Headers:
    return [EVENT_STREAM, *NO_BUFFERING] if plan.streams else [JSON]
