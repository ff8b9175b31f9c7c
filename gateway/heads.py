"""Request heads that the short path understands, read once each: a client sends the same head again and again.

The reading is strict: one spelling of white space, every header known, none twice, one ``Content-Length`` and no other
framing. Whatever is not surely so is left to the full path's parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.http import Request
from gateway.runtime import Runtime
from gateway.shortcut import Caught, Shortcut
from gateway.upstreams.headers import passed_on

MAX_HEAD = 16 * 1024
"""Bytes; a longer head is left to the full path."""
_MAX_HEADS = 1024
_HEAD = re.compile(
    rb"POST (/v1/[a-z/_]+) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [!-~](?:[ -~]*[!-~])?\r\n)+)\r\n"
)
_KNOWN = frozenset(
    b"host content-length content-type accept accept-encoding accept-language user-agent connection authorization "
    b"x-api-key x-request-id".split()
)
_TRACE = frozenset((b"traceparent", b"tracestate"))
"""Of no consequence to an answer, unless this gateway tells of its own part of the trace."""
_KNOWN_PREFIXES = (b"x-stainless-", b"openai-", b"anthropic-")


@dataclass(frozen=True, slots=True)
class Head:
    """An understood head: its own length and that of the body, in bytes, the request without its body, and what it says
    of the caller.
    """

    length: int
    body_length: int
    request: Request
    caught: Caught


class Heads:
    """Understood heads by their bytes; `forget` when the configuration changes, since a head decides the caller."""

    def __init__(self, shortcut: Shortcut, runtime: Runtime) -> None:
        self._shortcut = shortcut
        self._runtime = runtime
        self._read: dict[bytes, Head | None] = {}

    def forget(self) -> None:
        """Reads every head anew."""
        self._read.clear()

    def get(self, head: bytes) -> Head | None:
        """The head, which ends with its blank line; None where the full path must read it."""
        if head in self._read:
            return self._read[head]
        if len(self._read) >= _MAX_HEADS:
            self._read.clear()
        understood = self._read[head] = self._understand(head)
        return understood

    def _understand(self, head: bytes) -> Head | None:
        match = _HEAD.fullmatch(head)
        if match is None:
            return None
        path, lines = match.groups()
        split = (line.split(b": ", 1) for line in lines.split(b"\r\n")[:-1])
        headers = [(name.lower(), value) for name, value in split]
        values = dict(headers)
        if len(values) != len(headers) or b"host" not in values:
            return None
        known = _KNOWN | _TRACE if self._runtime.otlp is None else _KNOWN
        if not all(name in known or name.startswith(_KNOWN_PREFIXES) for name in values):
            return None
        if values.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return None
        length = values.get(b"content-length", b"")
        if not (length.isdigit() and len(length) < 12 and 0 < int(length) <= self._runtime.config.limits.max_body):
            return None
        request = Request("POST", path.decode(), b"", headers, b"", path, passed_on(headers))
        caught = self._shortcut.understand(request)
        return Head(len(head), int(length), request, caught) if caught is not None else None
