"""Servers to measure: engines, Redis and LMCache servers of one's own, or anyone's OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "smollm2-135m-instruct"
DECODED = 48
LEFT = 128
"""Tokens of a prompt that even a full hit may leave to be computed: up to one of the engine's chunks."""


@dataclass
class Server:
    """A server to ask, and its process, whose processor time is taken with that of its children."""

    url: str
    model: str
    process: psutil.Process

    @classmethod
    def running(cls, url: str) -> Server:
        """Someone's server on this machine, whatever model it serves."""
        url = url.rstrip("/").removesuffix("/v1")
        port = httpx.URL(url).port
        listening = (c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and port in c.laddr)
        process = next((psutil.Process(c.pid) for c in listening if c.pid), None)
        if process is None:
            raise SystemExit(f"nothing on this machine listens at {url}")
        return cls(url, httpx.get(f"{url}/v1/models").json()["data"][0]["id"], process)

    def cpu(self) -> float:
        """Processor seconds so far."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(times.user + times.system for times in (member.cpu_times() for member in family))

    async def complete(self, client: httpx.AsyncClient, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A whole answer of exactly so many tokens, greedily."""
        ask = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{self.url}/v1/completions", json=ask)
        answer.raise_for_status()
        return answer.json()

    async def rested(self) -> None:
        """Waits until the server does nothing more, such as copying blocks to lower tiers behind an answer."""
        quiet = 0
        while quiet < 10:  # a busy machine leaves a server without the processor for a while
            before = self.cpu()
            await asyncio.sleep(0.3)
            quiet = quiet + 1 if self.cpu() - before < 0.02 else 0

    async def chat(self, client: httpx.AsyncClient, question: str, tokens: int) -> tuple[str, float, float]:
        """A whole chat answer of so many tokens, greedily, and the wall and processor seconds it took."""
        began, cpu = time.perf_counter(), self.cpu()
        ask = {"model": self.model, "messages": [{"role": "user", "content": question}], "max_tokens": tokens}
        answer = await client.post(f"{self.url}/v1/chat/completions", json=ask | {"temperature": 0, "ignore_eos": True})
        answer.raise_for_status()
        wall, used = time.perf_counter() - began, self.cpu() - cpu
        return answer.json()["choices"][0]["message"]["content"], wall, used

    async def first_token(self, client: httpx.AsyncClient, prompt: list[int]) -> tuple[float, float, str]:
        """Wall and processor seconds until a one-token answer to a prompt is there, and where its prefix came from.

        That is `cold`, a tier, or `partly TIER` if some of the prompt was computed or came from elsewhere. A few tokens
        at a prompt's end are always computed.
        """
        began, cpu = time.perf_counter(), self.cpu()
        answer = await self.complete(client, prompt, 1)
        wall, used = time.perf_counter() - began, self.cpu() - cpu
        details: dict[str, Any] = answer["usage"].get("prompt_tokens_details") or {}
        tiers: dict[str, int] = details.get("cached_by_tier") or {"hit": details.get("cached_tokens") or 0}
        place = max(tiers, key=lambda tier: tiers[tier])
        if not tiers[place]:
            return wall, used, "cold"
        return wall, used, place if tiers[place] >= len(prompt) - LEFT else f"partly {place}"

    async def first_event(self, client: httpx.AsyncClient, prompt: list[int], tokens: int) -> float:
        """Streams an answer to its end; seconds until its first event."""
        ask = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        asked, first = time.perf_counter(), 0.0
        async with client.stream("POST", f"{self.url}/v1/completions", json=ask | {"stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
        return first - asked

    async def decode(self, client: httpx.AsyncClient, batch: int) -> tuple[float, float]:
        """Wall and processor seconds per token of `batch` streams: what `DECODED` tokens more cost than one each."""
        short_wall, short_cpu = await self._burst(client, batch, 1)
        long_wall, long_cpu = await self._burst(client, batch, 1 + DECODED)
        return (long_wall - short_wall) / (batch * DECODED), (long_cpu - short_cpu) / (batch * DECODED)

    async def _burst(self, client: httpx.AsyncClient, batch: int, tokens: int) -> tuple[float, float]:
        began, cpu = time.perf_counter(), self.cpu()
        prompts = [words(64, random.randrange(1 << 30)) for _ in range(batch)]
        await asyncio.gather(*(self.complete(client, prompt, tokens) for prompt in prompts))
        return time.perf_counter() - began, self.cpu() - cpu

    async def computed(self, client: httpx.AsyncClient) -> int:
        """Prompt tokens really computed so far, by the engine's own metrics."""
        lines = (await client.get(f"{self.url}/metrics")).text.splitlines()
        wanted = (line for line in lines if line.startswith("warmgate_engine_prefill_tokens_total"))
        return int(float(next(wanted).split()[-1]))


def words(length: int, seed: int) -> list[int]:
    """Token ids that no other seed shares."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(length)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def engine(*options: str) -> Iterator[Server]:
    """An engine process of our own, ready; ended on leaving."""
    with started("engine", "--log-level", "warning", *options) as server:
        yield server


@contextlib.contextmanager
def started(module: str, *options: str) -> Iterator[Server]:
    """A server of our own, `python -m module --port …`, once its `/health` says 200."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", module, "--port", str(port), *options])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{module} did not start")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield Server(url, MODEL, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def redis() -> Iterator[str | None]:
    """A Redis server of our own, or None where there is no `redis-server`."""
    if shutil.which("redis-server") is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not path.exists():
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def lmcache(block_size: int = 32, gigabytes: float = 2) -> Iterator[str | None]:
    """An LMCache server of our own, in memory alone, or None where LMCache is not installed. Starts in seconds."""
    if importlib.util.find_spec("lmcache") is None:
        yield None
        return
    port, http = free_port(), free_port()
    command = lmcache_command(port, http, f"warmgate-bench-{os.getpid()}", block_size, gigabytes)
    process = subprocess.Popen(command, env=LMCACHE_ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not lmcache_answers(http):
            if process.poll() is not None:
                raise SystemExit("lmcache server did not start")
            time.sleep(0.1)
        yield f"lmcache://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


LMCACHE_ENVIRONMENT = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}


def lmcache_command(
    port: int, http: int, memory: str, block_size: int, gigabytes: float, *, redis: int = 0
) -> list[str]:
    """`lmcache server` on loopback, with a shared memory name, and a second level in the Redis at a port if not 0."""
    lower = {"type": "resp", "host": "127.0.0.1", "port": redis, "num_workers": 2}
    return [
        *[str(Path(sys.executable).parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)],
        *["--http-host", "127.0.0.1", "--http-port", str(http), "--prometheus-port", str(free_port())],
        *["--chunk-size", str(block_size), "--l1-size-gb", str(gigabytes), "--no-l1-use-lazy"],
        *["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven", "--shm-name", memory],
        *(["--l2-adapter", json.dumps(lower), "--l2-prefetch-policy", "retain"] if redis else []),
    ]


def lmcache_answers(http: int) -> bool:
    """Whether the LMCache server with this HTTP port is ready."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{http}/healthcheck").status_code == 200
    return False
