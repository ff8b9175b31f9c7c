"""Reading answers as a caller would: a rendered message or an upstream's bytes, through the dialect and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from gateway.dialects.base import Answer, Dialect
from gateway.sse import Event, EventReader, frame

NOW = 1_800_000_000.0


def stream_of(dialect: Dialect, message: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> bytes:
    """A kept message as the stream of a caller who asked for usage."""
    own = dialect.identity(NOW) + dialect.echo(body or {})
    return own.join(dialect.render(orjson.dumps(message)).stream_with_usage)


def bare_stream_of(dialect: Dialect, message: Mapping[str, Any]) -> bytes:
    """A kept message as the stream of a caller who did not ask for usage."""
    return dialect.identity(NOW).join(dialect.render(orjson.dumps(message)).stream)


def plain_of(dialect: Dialect, message: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A kept message as a caller's plain answer."""
    own = dialect.identity(NOW) + dialect.echo(body or {})
    return orjson.loads(own.join(dialect.render(orjson.dumps(message)).plain))


def events_of(stream: bytes) -> list[Event]:
    """The events of a stream that carry data."""
    reader = EventReader()
    events = [event for event in reader.feed(stream) if event.data is not None]
    assert reader.rest() == b""
    return events


def data_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of every event but ``[DONE]``."""
    return [orjson.loads(event.data) for event in events_of(stream) if event.data and event.data != b"[DONE]"]


def collect(
    dialect: Dialect, stream: bytes | Iterable[bytes], body: Mapping[str, Any] | None = None
) -> tuple[Answer, bytes, bytes]:
    """Runs an upstream's stream through the collector: the answer, and what the two kinds of callers were passed."""
    collector = dialect.collector(body or {"stream": True})
    reader = EventReader()
    asked, unasked = bytearray(), bytearray()
    for part in [stream] if isinstance(stream, bytes) else stream:
        for event in reader.feed(part):
            piece = collector.feed(event)
            asked += piece.asked
            unasked += piece.unasked
    return collector.close(), bytes(asked), bytes(unasked)


def joined(dialect: Dialect, stream: bytes, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The message that a complete stream joins to."""
    answer = collect(dialect, stream, body)[0]
    assert answer.message is not None, answer.outcome
    return orjson.loads(answer.message)


def sse(*items: Mapping[str, Any] | bytes, named: bool = False) -> bytes:
    """A stream of JSON events (named by their type, if so wished) and bytes as they are."""
    return b"".join(
        item if isinstance(item, bytes) else frame(orjson.dumps(item), item["type"] if named else "") for item in items
    )


DONE = b"data: [DONE]\n\n"
