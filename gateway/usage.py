"""Usage put right on its way: an upstream that got a prompt computed counts all of it as cached, which is not what the
request as a whole found.
"""

from __future__ import annotations

from typing import Any

from cache.response.canonical import BadBody, parse, respell
from gateway.encoding import Decoder
from gateway.sse import Event, EventReader, EventTooLarge, events, frame

MOST = 8 * 1024 * 1024
"""Bytes of a plain answer that is looked at; a larger one passes as it is."""


class PromptDetails:
    """A `Decoder` that puts ``details`` in place of ``usage.prompt_tokens_details``, behind the answer's own ``codec``.
    All else passes as it came.
    """

    def __init__(self, details: Any, codec: Decoder | None, *, stream: bool) -> None:
        self._details, self._codec, self._stream = details, codec, stream
        self._reader = EventReader()
        self._held: list[bytes] | None = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        decoded = self._codec.feed(data) if self._codec is not None else data
        return self._events(decoded) if self._stream else self._hold(decoded)

    def finish(self) -> bytes:
        rest = self._codec.finish() if self._codec is not None else b""
        if self._stream:
            return self._events(rest) + b"".join(self._event(e) for e in self._reader.finish()) + self._reader.rest()
        rest = self._hold(rest)
        if self._held is None:
            return rest
        return self._patched(b"".join(self._held))

    def _events(self, data: bytes) -> bytes:
        try:
            whole = self._reader.whole(data)
        except EventTooLarge:
            return self._reader.rest()  # the reader behind this one will say so
        return b"".join(self._event(event) for event in events(whole)) if b'"usage"' in whole else whole

    def _event(self, event: Event) -> bytes:
        if event.data is None or b'"usage"' not in event.data:
            return event.raw
        patched = self._patched(event.data)
        return event.raw if patched is event.data else frame(patched, event.name)

    def _hold(self, data: bytes) -> bytes:
        if self._held is None:
            return data
        self._held.append(data)
        self._size += len(data)
        if self._size <= MOST:
            return b""
        held, self._held = self._held, None
        return b"".join(held)

    def _patched(self, text: bytes) -> bytes:
        try:
            body = parse(text)
        except BadBody:
            return text
        usage = body.get("usage")
        if not isinstance(usage, dict):
            return text
        if self._details is None:
            usage.pop("prompt_tokens_details", None)
        else:
            usage["prompt_tokens_details"] = self._details
        return respell(body)
