"""The embedded engine over the tiny model, with its HTTP server and its KV events, in the test's own process: it can be
lost with all it holds and brought back at the same addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from engine.server import EngineApp
from engine.worker import Worker
from tests.engine import tiny
from tests.services import free_port

SPEC = replace(tiny.SPEC, context=4096)
BLOCK = 4
"""Tokens in one block; a token is a byte."""


def tokenizer_folder(folder: Path) -> Path:
    """The tiny model's tokenizer and chat template, for a gateway to read."""
    tiny.tokenizer().save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(tiny.TEMPLATE)
    return folder


class EmbeddedEngine:
    """`start` and `stop` it as often as wanted; ``blocks``: the size of its pool."""

    def __init__(self, blocks: int = 1024) -> None:
        self._blocks = blocks
        self.port, self._live, self._replay = free_port(), free_port(), free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_events(self) -> dict[str, str]:
        """For the configuration of a gateway."""
        return {"bind": f"tcp://127.0.0.1:{self._live}", "replay": f"tcp://127.0.0.1:{self._replay}"}

    async def start(self) -> None:
        """Serves when this returns, and holds nothing."""
        endpoints = {"kv_events": self.kv_events["bind"], "kv_events_replay": self.kv_events["replay"]}
        self._worker = Worker(tiny.config(self._blocks, **endpoints), opener=lambda _: tiny.files(SPEC))
        ready = asyncio.Event()
        self._worker.start(on_ready=ready.set, on_failure=ready.set)
        await ready.wait()
        assert self._worker.failure is None
        app = EngineApp(self._worker).asgi
        config = uvicorn.Config(app, port=self.port, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server._serve())  # `serve` would take the signals
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """All it held is lost."""
        self._server.should_exit = True
        await self._serving
        await asyncio.to_thread(self._worker.stop)

    def upstream(self, name: str, folder: Path, **more: Any) -> dict[str, Any]:
        """The configuration of this engine as an upstream that tells what it holds."""
        told = {"kv_events": self.kv_events, "tokenizer": str(folder)}
        return {"name": name, "url": self.url, "models": ["tiny"], **told, **more}


@contextlib.asynccontextmanager
async def embedded_engines(count: int) -> AsyncIterator[list[EmbeddedEngine]]:
    """Some that run."""
    engines = [EmbeddedEngine() for _ in range(count)]
    for engine in engines:
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()
