"""A gateway on a real socket inside the test's own event loop, with a clock that tests can move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.app import Gateway, create_app
from gateway.clock import Clock
from gateway.config import Config
from gateway.reload import Source
from gateway.server import Server, server_config
from gateway.wire import WireProtocol
from tests.waiting import until


class FakeClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self._time = time.time()
        self._monotonic = 1000.0

    def time(self) -> float:
        return self._time

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._time += seconds
        self._monotonic += seconds


class FullPath(WireProtocol):
    """The gateway's protocol without the short path."""

    def data_received(self, data: bytes) -> None:
        HttpToolsProtocol.data_received(self, data)


@dataclass(frozen=True)
class Running:
    """A running gateway: its address, the application, and a client for it."""

    url: str
    app: Gateway
    client: httpx.AsyncClient

    async def chat(self, body: Mapping[str, Any], **headers: str) -> httpx.Response:
        """``POST /v1/chat/completions``; header names are given with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post("/v1/chat/completions", json=dict(body), headers=named)

    async def joined(self, *counts: int) -> None:
        """Waits until so many requests share an upstream call each (its telling other gateways counts as one more)."""
        flights, wanted = self.app.runtime.flights, sorted(counts)
        await until(lambda: sorted(one.followers for one in flights.values()) == wanted, f"{counts} share their calls")


@asynccontextmanager
async def running_gateway(
    config: Mapping[str, Any], clock: Clock | None = None, source: Source | None = None, *, short_path: bool = True
) -> AsyncIterator[Running]:
    """Serves a gateway with this configuration until the block ends; without a disk cache, a ledger's file, a
    hold-out or sentinels unless it names them.
    """
    cache = {"disk": "off", "holdout": 0, **config.get("cache", {})}
    plain = {"ledger": "off", "sentinels": "off", **config, "cache": cache}
    app = create_app(Config.model_validate(plain), clock=clock, source=source)
    async with (
        serving(app, short_path=short_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as client,
    ):
        yield Running(url, app, client)


@asynccontextmanager
async def serving(app: Gateway, *, short_path: bool = True) -> AsyncIterator[str]:
    """Serves a gateway on a free port, as the worker does, with the short path or without; gives its address."""
    config = server_config(app, grace=2)
    if not short_path:
        config.http = FullPath
    server = Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


def upstream(url: str, name: str = "u", **more: Any) -> dict[str, Any]:
    """The configuration of one upstream."""
    return {"name": name, "url": url, **more}
