"""What the tests of the stub upstream say to it, and how they read what it says."""

import asyncio
import json

import httpx

from loadtest.stub_upstream import StubUpstream

CHAT = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "Say A"}]}
STREAM = {**CHAT, "stream": True}
URL = "/v1/chat/completions"


def data_lines(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def streamed_text(http: httpx.AsyncClient) -> str:
    text = (await http.post(URL, json=STREAM)).text
    chunks = [json.loads(line) for line in data_lines(text) if line != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


class Socket:
    """A client at the level of the socket: each `post` on a connection of its own."""

    def __init__(self, u: StubUpstream) -> None:
        self._port = u.port
        self._writers: list[asyncio.StreamWriter] = []

    async def send(self, data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(data)
        return reader

    async def post(self, request: dict[str, object]) -> asyncio.StreamReader:
        data = json.dumps(request).encode()
        return await self.send(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (URL.encode(), len(data)) + data)

    def leave(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
