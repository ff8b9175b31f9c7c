"""One streamed chat request as its caller sees it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

End = Literal["ok", "refused", "lost", "broken"]


@dataclass(slots=True)
class Told:
    """What came back. ``end``: ``ok``, ``refused`` (an error status), ``lost`` (not a byte of an answer), ``broken``
    (behind the first). ``first``: seconds to the first event with text; ``usage``: as reported, empty if it was not.
    """

    end: End = "lost"
    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    said: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first: float | None = None
    seconds: float = 0.0

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.usage.get("prompt_tokens") or 0

    @property
    def cached(self) -> int:
        """Those of them that the engine held."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def ask(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str] | None = None) -> Told:
    """Sends a chat request and reads its stream to the end; never raises for what the other side does."""
    told, began, ended = Told(), time.monotonic(), False
    wanted = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=wanted, headers=headers) as response:
            told.status, told.headers = response.status_code, response.headers
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: ") and response.status_code == 200:
                    event = json.loads(line[6:])
                    told.usage = event.get("usage") or told.usage
                    text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())
                    if text and told.first is None:
                        told.first = time.monotonic() - began
                    told.said += text
    except (httpx.TransportError, json.JSONDecodeError):
        ended = False
    told.seconds = time.monotonic() - began
    if told.status and told.status != 200:
        told.end = "refused"
    else:
        told.end = "ok" if ended else "broken" if told.said else "lost"
    return told
