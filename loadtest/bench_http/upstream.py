"""The upstream of the benchmark: as cheap as Python can make it, so that it is never what is measured."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

_TEXT = "warm " * 190
_USAGE = {"prompt_tokens": 400, "completion_tokens": 190, "total_tokens": 590}
_IDENTITY = {"id": "chatcmpl-1", "created": 1, "model": "m1"}


def _plain() -> bytes:
    message = {"role": "assistant", "content": _TEXT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({**_IDENTITY, "object": "chat.completion", "choices": [choice], "usage": _USAGE}).encode()


def _events() -> list[bytes]:
    def event(choices: list[object], **more: object) -> bytes:
        chunk = {**_IDENTITY, "object": "chat.completion.chunk", "choices": choices, **more}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    step = len(_TEXT) // 13
    pieces = [_TEXT[i : i + step] for i in range(0, len(_TEXT), step)]
    texts = [event([{"index": 0, "delta": {"content": piece}, "finish_reason": None}]) for piece in pieces]
    end = event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    return [*texts, end, event([], usage=_USAGE) + b"data: [DONE]\n\n"]


def _response(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


PLAIN = _response(_plain())
MODELS = _response(b'{"object":"list","data":[{"id":"m1"}]}')
CHUNKS = [b"%x\r\n%s\r\n" % (len(event), event) for event in _events()]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Upstream(asyncio.Protocol):
    """Knows just enough HTTP for the clients of the benchmark."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n") + 4
        if end == 3:
            return
        head = self._data[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 : head.index(b"\r\n", at)]) if at >= 0 else 0
        if len(self._data) < end + length:
            return
        body, self._data = self._data[end : end + length], self._data[end + length :]
        if head.startswith(b"get"):
            self._transport.write(MODELS)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(HEAD)
            self._stream(0)
        else:
            self._transport.write(PLAIN)

    def _stream(self, number: int) -> None:
        if self._transport.is_closing():
            return
        last = number == len(CHUNKS) - 1
        self._transport.write(CHUNKS[number] + (b"0\r\n\r\n" if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(0.001, self._stream, number + 1)


async def serve(port: int) -> None:
    """Until it is ended."""
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
