"""2,000 mixed requests through the HTTP surface over small pools: no growth of memory, no block lost, nothing left."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from engine.kv.pool import KVPool
from engine.server import EngineApp
from engine.worker import Worker
from tests.cache.prefix.helpers import RedisServer
from tests.engine import tiny
from tests.engine.test_guide import FORMAT
from tests.engine.test_server import CHAT, TEXT

REQUESTS, WARM_UP, AT_ONCE = 2000, 600, 12
MIB = 2**20
BLOCK = KVPool.block_bytes(tiny.SPEC, 4, torch.float32)


def mixed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body: what the endpoints offer, in all combinations; one in twenty is nonsense."""
    head = f"tenant rules {rng.randrange(12)} " * rng.randrange(1, 5)
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": rng.choice([1, 4, 16, 40]),
        "temperature": rng.choice([0, 1]),
    }
    body |= rng.choice([{}, {"cache_salt": rng.choice("ABC")}, {"priority": rng.randrange(3)}, {"n": 2}])
    body |= rng.choice([{}, {"stop": ["a"]}, {"seed": 1}, {"top_k": 5}, {"repetition_penalty": 1.2}])
    if rng.random() < 0.1:
        body |= {"response_format": FORMAT, "max_tokens": 60}
    if rng.random() < 0.05:
        body |= rng.choice([{"temperature": 9}, {"model": "other"}, {"max_tokens": 10_000}, {"lora_path": "x"}])
    if rng.random() < 0.5:
        return TEXT, body | {"prompt": head + str(rng.randrange(50)), "logprobs": rng.choice([None, 2])}
    return CHAT, body | {"messages": [{"role": "user", "content": head}], "stream": rng.random() < 0.5}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    redis = RedisServer(tmp_path)
    config = tiny.config(
        96, max_running=8, kv_host_bytes=200 * BLOCK, kv_host_quota=80 * BLOCK, kv_remote=redis.url, kv_remote_quota=MIB
    )
    worker = Worker(config, opener=lambda _: tiny.files())
    ready = asyncio.Event()
    worker.start(on_ready=ready.set, on_failure=ready.set)
    await ready.wait()
    rng, seen, numbers = random.Random(4), Counter[str](), iter(range(REQUESTS))
    memory: list[int] = []
    objects: list[int] = []

    async def user(client: httpx.AsyncClient) -> None:
        for number in numbers:
            if number in (WARM_UP, REQUESTS - 1):
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)
                objects.append(len(gc.get_objects()))
            path, body = mixed(rng)
            try:
                async with asyncio.timeout(rng.uniform(0.001, 0.1) if rng.random() < 0.1 else 60):
                    seen[str((await client.post(path, json=body)).status_code)] += 1
            except TimeoutError:
                seen["left"] += 1

    transport = httpx.ASGITransport(EngineApp(worker).asgi)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
        await asyncio.gather(*(user(client) for _ in range(AT_ONCE)))
    async with asyncio.timeout(30):
        while worker.core.busy:
            await asyncio.sleep(0.01)
    core = worker.core
    worker.stop()
    redis.kill()
    with capsys.disabled():
        grown = (memory[1] - memory[0]) / MIB
        print(f"\n{dict(seen)}: memory {grown:+.1f} MiB, {objects[1] - objects[0]:+d} objects, ", end="")
        print(f"{core.scheduler.preemptions} preemptions, {core.manager.evictions} evictions")
    assert seen.keys() == {"200", "400", "404", "left"}
    assert seen.total() == REQUESTS
    core.check_integrity()
    assert core.manager.free == core.manager.total == 96
    assert not worker._streams
    assert core.manager.evictions > 100
    assert core.lower is not None
    assert core.lower.stack.host is not None
    core.lower.stack.host.check_integrity()
    assert grown < 16
    assert objects[1] - objects[0] < 20_000
