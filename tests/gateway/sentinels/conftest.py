"""A gateway in front of a real engine (a tiny model) over a real Redis, with sentinels that wait to be told."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from engine.kv.pool import KVPool
from engine.server import EngineApp
from engine.worker import Worker
from gateway.runtime import Runtime
from tests.engine import tiny
from tests.harness import FakeClock, Running, running_gateway
from tests.services import RedisServer, free_port

MODEL = "tiny"
BLOCK = 16


@dataclass
class Engine:
    """The embedded engine in this process, with KV events, and a folder with its tokenizer."""

    url: str
    worker: Worker
    events: str
    tokenizer: Path

    def upstream(self, **more: Any) -> dict[str, Any]:
        """How a gateway's configuration names it; one gateway at a time can bind the address for its events."""
        told = {"bind": self.events, **more.pop("kv_events", {})}
        return {
            "name": "e",
            "url": self.url,
            "cache_salt": True,
            "kv_events": told,
            "tokenizer": str(self.tokenizer),
            **more,
        }


def write_tokenizer(folder: Path, template: str = tiny.TEMPLATE) -> Path:
    """The tiny model's tokenizer as a Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    tiny.pipeline().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@asynccontextmanager
async def running_engine(folder: Path, blocks: int = 1024, **settings: Any) -> AsyncIterator[Engine]:
    """A tiny model with room for canaries (its tokens are bytes) and for so many blocks."""
    spec = replace(tiny.SPEC, context=4096)
    events = f"tcp://127.0.0.1:{free_port()}"
    sizes = {"block_size": BLOCK, "prefill_chunk": 128, "step_tokens": 256}
    config = tiny.config(kv_events=events, **sizes, **settings)
    config = replace(config, kv_bytes=blocks * KVPool.block_bytes(spec, BLOCK, torch.float32))
    worker = Worker(config, opener=lambda _: tiny.files(spec))
    ready = asyncio.Event()
    worker.start(on_ready=ready.set, on_failure=ready.set)
    await ready.wait()
    assert worker.failure is None
    server = uvicorn.Server(uvicorn.Config(EngineApp(worker).asgi, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Engine(f"http://127.0.0.1:{port}", worker, events, write_tokenizer(folder / "tokenizer"))
    server.should_exit = True
    await serving
    worker.stop()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    """One for each test, since most do it some harm."""
    async with running_engine(tmp_path) as running:
        yield running


@dataclass
class Watched:
    """A gateway whose sentinels make a round when told to."""

    running: Running
    clock: FakeClock

    @property
    def runtime(self) -> Runtime:
        return self.running.app.runtime

    async def round(self) -> dict[str, str]:
        """A minute later: the state of each light, by its name, upstream and tier."""
        self.clock.advance(60)
        await self.running.app.sentinels.round()
        return {" ".join(filter(None, light.place)): light.state for light in self.runtime.board.lights}

    async def reds(self) -> dict[str, str]:
        """A minute later: what is red, and the setting that is pointed at."""
        await self.round()
        return {light.name: light.setting for light in self.runtime.board.lights if light.state == "red"}


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round but those that a test makes."""
    monkeypatch.setattr("gateway.sentinels.rounds.FIRST", 1e9)


@asynccontextmanager
async def watched(**config: Any) -> AsyncIterator[Watched]:
    """A gateway with these settings and sentinels."""
    clock = FakeClock()
    async with running_gateway({"sentinels": {"every": "60s"}, **config}, clock) as running:
        yield Watched(running, clock)


@pytest.fixture
def in_redis(redis_process: RedisServer) -> dict[str, Any]:
    """A cache in a corner of its own of the shared Redis."""
    return {"redis": {"url": redis_process.url, "prefix": uuid.uuid4().hex, "timeout": "1s"}}
