"""One request as the stub upstream received it, and what became of it."""

import asyncio
import time
from typing import Any

import orjson


class Call:
    """Everything a test may want to know of a request. Times are `time.monotonic()` seconds."""

    def __init__(self) -> None:
        self.number = 0  # 1 is the first counted call; 0 for one that does not count (GET and the like)
        self.method = ""
        self.target = ""  # as sent, with the query
        self.api = ""  # the path below the stub's base path, such as /chat/completions; empty outside of it
        self.raw_headers: list[tuple[bytes, bytes]] = []  # as sent
        self.body = b""
        self.raw = b""  # every byte of the request, chunk framing included
        self.began = time.monotonic()
        self.writes: list[float] = []  # when each piece of the body was written
        self.answered = asyncio.Event()  # the reply was written to its end
        self.closed_by_peer = asyncio.Event()  # the client closed the connection before that
        self.ended = 0.0  # when either of the two happened

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def headers(self) -> dict[str, str]:
        """Names in lower case; of repeated headers, the last."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.raw_headers}

    @property
    def json(self) -> Any:
        """The body as JSON. Raises ValueError if it is none."""
        return orjson.loads(self.body)
