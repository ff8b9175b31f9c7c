"""Server-sent events, read by their grammar (WHATWG HTML, section 9.2.6) from bytes split anywhere, each with its raw
bytes kept.

Only whole events are decoded, so a character cut by a chunk border is never seen cut.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_BLANK_LINE = re.compile(rb"[\r\n](?:(?<=\n)|(?<=\r)(?!\n)|(?<=\r)\n)(?:\r\n|\n|\r(?!\n))")
"""Two line ends, ``(CRLF|LF|CR){2}``; begun with a set of signs, which the search can skip to."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event grew past the bound without ending."""


class Event(NamedTuple):
    """One event: its bytes as they came, the event name (empty: unnamed), and its data, or None for a comment or a
    blank.
    """

    raw: bytes
    name: str
    data: bytes | None


class EventReader:
    """Feed it bytes; it gives the events that are complete. ``max_event`` bounds what one unfinished event may hold,
    in bytes.
    """

    def __init__(self, max_event: int = 16 * 1024 * 1024) -> None:
        self._pending = bytearray()
        self._scanned = 0
        self._max_event = max_event

    def feed(self, data: bytes) -> list[Event]:
        """Adds bytes and returns the events that they complete; raises `EventTooLarge`."""
        return events(self.whole(data))

    def whole(self, data: bytes) -> bytes:
        """Adds bytes and returns those of all events that they complete; raises `EventTooLarge`."""
        pending = self._pending
        if not pending and data.endswith(b"\n\n") and b"\r" not in data:
            return data  # as nearly every upstream sends it
        pending += data
        end = 0
        while match := _BLANK_LINE.search(pending, max(end, self._scanned)):
            if match.end() == len(pending) and pending[-1] == 0x0D:
                break  # the other half of a CRLF may still come
            end = self._scanned = match.end()
        whole = bytes(pending[:end])
        del pending[:end]
        self._scanned = max(0, len(pending) - 3)
        if len(pending) > self._max_event:
            raise EventTooLarge(f"an event of over {self._max_event} bytes")
        return whole

    def finish(self) -> list[Event]:
        """The event that a last ``CR`` completes, now that its ``LF`` will not come; by the grammar an unfinished event
        is not an event.
        """
        match = _BLANK_LINE.search(self._pending)
        if match is None:
            return []
        end = match.end()
        raw = bytes(self._pending[:end])
        del self._pending[:end]
        return [_event(raw)]

    def rest(self) -> bytes:
        """What came after the last whole event."""
        return bytes(self._pending)


def frame(data: bytes, name: str = "") -> bytes:
    """One event on the wire; ``data`` without line ends."""
    return b"".join((b"event: ", name.encode(), b"\ndata: ", data, b"\n\n")) if name else b"data: " + data + b"\n\n"


def events(whole: bytes) -> list[Event]:
    """The events of bytes that hold whole ones only; a blank line too many is one without data."""
    if b"\r" not in whole:
        *parts, tail = whole.split(b"\n\n")
        found = [_event(part + b"\n\n") for part in parts]
        return [*found, Event(tail, "", None)] if tail else found
    found, start = [], 0
    while match := _BLANK_LINE.search(whole, start):
        found.append(_event(whole[start : match.end()]))
        start = match.end()
    return found


def _event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return Event(raw, "", raw[6:-2])
    name = ""
    data: list[bytes] = []
    for line in _LINE_END.split(raw.removeprefix(_BOM)):
        if not line or line[0] == 0x3A:
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
    return Event(raw, name, b"\n".join(data) if data else None)
