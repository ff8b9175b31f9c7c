"""Embedded engines over the tiny model behind real sockets, in the test's own process, so that they can be looked into
and cut off at any point.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import torch
import uvicorn

from engine.core import EngineCore
from engine.pd.link import Link
from engine.server import EngineApp
from engine.worker import Worker
from tests.engine import tiny
from tests.harness import Running, upstream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = (
    "The quick brown fox jumps over the lazy dog, again and again and again, until all the others have gone. "
    "Then it sleeps beneath a hedge. "
)
SETTINGS: dict[str, Any] = {"disaggregation": {"enabled": "on", "min_tokens": 32}, "routing": {"probe": "0s"}}


class Node:
    """One engine. ``name`` is also its role."""

    def __init__(self, name: str, worker: Worker, server: uvicorn.Server) -> None:
        self.name, self._worker, self._server = name, worker, server
        self.gone = False
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    @property
    def core(self) -> EngineCore:
        return self._worker.core

    @property
    def link(self) -> Link:
        assert self.core.link is not None
        return self.core.link

    @property
    def events(self) -> Counter[str]:
        """What became of the prompts that it offered and fetched."""
        return sum(self.link.counts().values(), Counter())

    def upstream(self) -> dict[str, Any]:
        """Its place in a gateway's configuration."""
        return upstream(self.url, self.name, role=self.name, cache_salt=True)

    def cut_off(self) -> None:
        """As if its machine had gone: no connection lives on, and none is accepted any more."""
        self.gone = True
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        self.link.close()

    async def at_rest(self) -> None:
        """Waits until nothing is held any more."""
        async with asyncio.timeout(20):
            while self.core.busy or self.core.manager.free < self.core.manager.total:
                await self._worker.ask(lambda: None)
                await asyncio.sleep(0.01)
        await self._worker.ask(self.core.check_integrity)


@asynccontextmanager
async def node(name: str, **changes: Any) -> AsyncIterator[Node]:
    """An engine that is ready; `changes` are to its configuration."""
    torch.set_num_threads(1)
    settings = {"blocks": 256, "kv_transfer": "127.0.0.1:0", "kv_transfer_lease": 1.0, **changes}
    worker = Worker(tiny.config(**settings), opener=lambda _: tiny.files())
    ready = asyncio.Event()
    worker.start(on_ready=ready.set, on_failure=ready.set)
    await ready.wait()
    assert worker.failure is None
    server = uvicorn.Server(
        uvicorn.Config(EngineApp(worker).asgi, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield Node(name, worker, server)
    finally:
        server.should_exit = True
        await task
        await asyncio.to_thread(worker.stop)


@dataclass(frozen=True)
class Two:
    """A gateway before a prefill and a decode engine, and a third engine that is asked for the whole."""

    gateway: Running
    prefill: Node
    decode: Node
    alone: httpx.AsyncClient

    async def ask(self, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        return await self.gateway.client.post(path, json=body)


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": LONG}], "temperature": 0, "max_tokens": 10}
    return {**asked, "ignore_eos": True, **fields}


def route(response: httpx.Response) -> str:
    return response.headers["x-warmgate-route"].partition("; ")[2].split("; ")[-1]


def plain(response: httpx.Response) -> Any:
    """What an answer says, without what differs from answer to answer."""
    if "text/event-stream" not in response.headers["content-type"]:
        return without_names(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [without_names(orjson.loads(line)) for line in lines[:-1]]


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}
