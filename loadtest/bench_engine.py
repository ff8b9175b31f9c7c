"""`make bench-engine`: what a prefix hit saves on each tier, and how fast the engine prefills and decodes.

Drives engines over HTTP only, its own or anyone's (`--url` for a running OpenAI-compatible server, throughput only).
The cases are interleaved, round by round, and given as median and spread. Beside the wall clock it takes the engine's
processor time, which is what holds on a busy machine. The text printed is Markdown, for `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

TAIL = 4  # tokens behind the last whole chunk: what a full hit still has to compute
DECODED = 32
MODEL = "smollm2-135m-instruct"


@dataclass
class Samples:
    """Wall and processor seconds of one case."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, wall: float, cpu: float) -> None:
        self.wall.append(wall)
        self.cpu.append(cpu)


@dataclass
class Engine:
    """A server to ask. `process` is None for one that is not ours: its processor time is then unknown."""

    url: str
    model: str
    process: psutil.Process | None = None

    def cpu(self) -> float:
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return times.user + times.system

    async def first_token(self, client: httpx.AsyncClient, prompt: list[int]) -> tuple[float, float, str]:
        """Wall and processor seconds until a one-token answer to a prompt is there, and where its prefix came from."""
        began, cpu = time.perf_counter(), self.cpu()
        ask = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = await client.post(f"{self.url}/v1/completions", json=ask)
        answer.raise_for_status()
        wall, used = time.perf_counter() - began, self.cpu() - cpu
        details: dict[str, Any] = answer.json()["usage"].get("prompt_tokens_details") or {}
        tiers: dict[str, int] = details.get("cached_by_tier") or {"hit": details.get("cached_tokens") or 0}
        return wall, used, max(tiers, key=lambda tier: tiers[tier]) if any(tiers.values()) else "cold"

    async def decode(self, client: httpx.AsyncClient, batch: int) -> tuple[float, float]:
        """Wall and processor seconds per token while `batch` streams decode together, after all have begun."""
        begun, marks = 0, (0.0, 0.0)

        async def stream(seed: int) -> None:
            nonlocal begun, marks
            ask = {"model": self.model, "prompt": words(64, seed), "max_tokens": DECODED, "stream": True}
            ask |= {"temperature": 0, "ignore_eos": True, "n": 1}
            async with client.stream("POST", f"{self.url}/v1/completions", json=ask) as response:
                response.raise_for_status()
                first = True
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and first:
                        first = False
                        begun += 1
                        marks = (time.perf_counter(), self.cpu())

        await asyncio.gather(*(stream(random.randrange(1 << 30)) for _ in range(batch)))
        tokens = batch * (DECODED - 1)  # those before the last stream's first token are few: a lower bound
        return (time.perf_counter() - marks[0]) / tokens, (self.cpu() - marks[1]) / tokens


def words(length: int, seed: int) -> list[int]:
    """Token ids that no other seed shares."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(length)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def engine(*options: str) -> Iterator[Engine]:
    """An engine process of our own, ready; ended on leaving."""
    port = free_port()
    command = [sys.executable, "-m", "engine", "--port", str(port), "--log-level", "warning", *options]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit("the engine did not start")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield Engine(url, MODEL, psutil.Process(process.pid))
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
        while not path.exists():
            time.sleep(0.05)
        yield f"unix://{path}"
        process.terminate()
        process.wait()


async def bench_tiers(options: argparse.Namespace, remote: str | None) -> dict[tuple[int, str], Samples]:
    """Time to first token by prompt length and by where the prefix was found."""
    samples: dict[tuple[int, str], Samples] = defaultdict(Samples)
    flags = ["--dtype", options.dtype, "--threads", str(options.threads), "--kv-host", "2GiB"]
    flags += ["--kv-remote", remote] if remote else []
    prompts = [(length, round_) for round_ in range(options.rounds) for length in options.lengths]
    async with httpx.AsyncClient(timeout=900) as client:
        with engine(*flags) as server:
            await server.first_token(client, words(300, -1))
            for length, round_ in prompts:
                prompt = words(length + TAIL, length * 1000 + round_)
                for reset in (False, False, True):  # cold, then from the device, then from the host
                    if reset:
                        await asyncio.sleep(0.5)  # the second use is copied down when the engine rests
                        await client.post(f"{server.url}/reset_prefix_cache")
                    wall, cpu, tier = await server.first_token(client, prompt)
                    samples[length, tier].add(wall, cpu)
                    say(f"{length} {tier} {wall:.3f} s")
            await asyncio.sleep(2)
        if remote:
            with engine(*flags) as server:
                await server.first_token(client, words(300, -2))
                for length, round_ in prompts:
                    wall, cpu, tier = await server.first_token(client, words(length + TAIL, length * 1000 + round_))
                    samples[length, tier].add(wall, cpu)
                    say(f"{length} {tier} {wall:.3f} s after a restart")
    return samples


async def bench_decode(server: Engine, rounds: int, batches: list[int]) -> dict[int, Samples]:
    """Seconds per decoded token by batch size."""
    samples: dict[int, Samples] = defaultdict(Samples)
    async with httpx.AsyncClient(timeout=900) as client:
        await server.decode(client, 1)
        for _ in range(rounds):
            for batch in batches:
                samples[batch].add(*await server.decode(client, batch))
                say(f"decode {batch}: {1 / samples[batch].wall[-1]:.1f} tokens/s")
    return samples


def say(text: str) -> None:
    print(text, file=sys.stderr)


def spread(values: list[float], scale: float = 1.0) -> str:
    """Median and range."""
    if not any(values):
        return "–"
    low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
    return f"{middle:.3g} ({low:.3g}–{high:.3g})"


def print_tiers(samples: dict[tuple[int, str], Samples]) -> None:
    print("\n| prompt | prefix found | TTFT s, median (range) | CPU s | TTFT vs cold |\n|---|---|---|---|---|")
    for (length, tier), case in sorted(
        samples.items(), key=lambda item: (item[0][0], -statistics.median(item[1].wall))
    ):
        gain = statistics.median(samples[length, "cold"].wall) / statistics.median(case.wall)
        print(f"| {length} | {tier} | {spread(case.wall)} | {spread(case.cpu)} | {gain:.1f}× |")
    for length in sorted({length for length, _ in samples}):
        cold = samples[length, "cold"]
        rates = [length / seconds for seconds in cold.wall], [length / seconds for seconds in cold.cpu if seconds]
        print(f"\nPrefill of {length} tokens: {spread(rates[0])} tokens/s, {spread(rates[1])} per CPU second.")


def print_decode(name: str, samples: dict[int, Samples]) -> None:
    print(f"\n| decode, {name} | tokens/s, median (range) | per CPU second |\n|---|---|---|")
    for batch, case in samples.items():
        rates = [1 / seconds for seconds in case.wall], [1 / seconds for seconds in case.cpu if seconds]
        print(f"| batch {batch} | {spread(rates[0])} | {spread(rates[1])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="prompt lengths, multiples of 128")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--remote", help="a remote tier to use instead of a Redis of our own, e.g. lmcache://…")
    parser.add_argument("--url", help="measure decode of this running server instead of starting engines")
    parser.add_argument("--model", default=MODEL, help="model name at --url")
    options = parser.parse_args()
    if options.url:
        server = Engine(options.url.rstrip("/").removesuffix("/v1"), options.model)
        print_decode(options.url, asyncio.run(bench_decode(server, options.rounds, options.batches)))
        return
    with redis() if options.remote is None else contextlib.nullcontext(options.remote) as remote:
        print_tiers(asyncio.run(bench_tiers(options, remote)))
    common = ["--dtype", options.dtype, "--threads", str(options.threads)]
    for name, flags in ((options.dtype, []), ("int8", ["--int8-decode"])):
        with engine(*common, *flags) as server:
            print_decode(name, asyncio.run(bench_decode(server, options.rounds, options.batches)))


if __name__ == "__main__":
    main()
