"""Where a request stands in its caller's trace (W3C Trace Context, https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.ids import unique

# Later versions may add fields behind the flags; version ff is none, and ids of zeros alone are none either.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Trace:
    """Ids in hexadecimal: the trace's, our span's, its parent's (empty: this is where the trace begins). ``sampled``:
    whoever began the trace wants it recorded.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    sampled: bool = True

    @property
    def header(self) -> bytes:
        """``traceparent`` for those whom we ask."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}".encode()


def begin(traceparent: str | None = None) -> Trace:
    """A span of our own in the caller's trace, or in a new one where the caller named none that is well-formed."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None or (found[1] == "00" and found[5]):
        return Trace(unique(32), unique(16))
    return Trace(found[2], unique(16), found[3], bool(int(found[4], 16) & 1))
