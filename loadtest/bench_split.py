"""`make bench-split`: what long prompts do to answers that are being decoded, split over a prefill and a decode engine,
and whole on two engines of both kinds: the same cores, the same gateway, the same requests.

Beside it, what moving a prompt takes of its time to first token, and whether answers are the same, split or whole. The
text printed is Markdown, for `docs/benchmarks/split.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from loadtest.bench_engine.figures import say, spread
from loadtest.bench_engine.servers import MODEL, Server, engine, free_port, words

ROLES = {"whole": ("both", "both"), "split": ("prefill", "decode")}
TEXT = "/v1/completions"


@contextlib.contextmanager
def gateway(folder: Path, engines: dict[str, tuple[str, Server]]) -> Iterator[str]:
    """A gateway before these engines (role and server by name); gives its address."""
    port = free_port()
    config = {
        "listen": {"port": port},
        "upstreams": [{"name": name, "url": each.url, "role": role} for name, (role, each) in engines.items()],
        "cache": {"disk": "off", "memory": "off"},
        "ledger": "off",
    }
    path = folder / "warmgate.yaml"
    path.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", "serve", "--config", str(path), "--no-engine"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit("the gateway did not start")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/healthz").status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def ask(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def arrivals(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[list[float], str]:
    """When the request was sent and when each event came; and its route."""
    times = [time.perf_counter()]
    async with client.stream("POST", f"{url}{TEXT}", json={**body, "stream": True}) as response:
        response.raise_for_status()
        times += [time.perf_counter() async for line in response.aiter_lines() if line.startswith("data: {")]
        return times, response.headers.get("x-warmgate-route", "")


async def under_prompts(url: str, options: argparse.Namespace, seed: int) -> tuple[list[float], list[float], int]:
    """Gaps between tokens of running answers while long prompts come one after another; the times to first token of
    these; how many of them were split.
    """
    async with httpx.AsyncClient(timeout=900) as client:
        running = [
            asyncio.create_task(arrivals(client, url, ask(words(40, seed + i), options.tokens)))
            for i in range(options.running)
        ]
        await asyncio.sleep(options.settle)
        begun, ttft, split = time.perf_counter(), [], 0
        for i in range(options.prompts):
            times, route = await arrivals(client, url, ask(words(options.length, seed + 1000 + i), 4))
            ttft.append(times[1] - times[0])
            split += "split=" in route
        ended = time.perf_counter()
        gaps: list[float] = []
        for times, _ in await asyncio.gather(*running):
            gaps += [b - a for a, b in itertools.pairwise(times[1:]) if begun <= b <= ended]
        return gaps, ttft, split


async def moving(prefill: Server, decode: Server, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(seconds until a prompt is computed, seconds from there to the first token of its answer elsewhere), idle."""
    found: list[tuple[float, float]] = []
    async with httpx.AsyncClient(timeout=900) as client:
        for i in range(options.moves + 1):
            prompt, began = words(options.length, 777_000 + i), time.perf_counter()
            given = {"kv_transfer_params": {"do_remote_decode": True}}
            answer = await client.post(f"{prefill.url}{TEXT}", json=ask(prompt, 1, **given))
            computed = time.perf_counter() - began
            params = {"kv_transfer_params": answer.raise_for_status().json()["kv_transfer_params"]}
            times, _ = await arrivals(client, decode.url, ask(prompt, 2, **params))
            found.append((computed, times[1] - times[0]))
    return found[1:]  # the first finds nothing warm


async def same_answers(url: str, alone: Server, count: int) -> tuple[int, int]:
    """How many of mixed requests give the same text split and whole, and how many were split."""
    rng, same, split = random.Random(3), 0, 0
    async with httpx.AsyncClient(timeout=900) as client:
        for number in range(count):
            body = ask(words(rng.randrange(257, 500), 50_000 + number), rng.randrange(2, 9))
            body |= {"temperature": rng.choice([0, 0, 0.8]), "seed": number, "n": rng.choice([1, 1, 2])}
            got = await client.post(f"{url}{TEXT}", json=body)
            want = await client.post(f"{alone.url}{TEXT}", json=body)
            told = [[choice["text"] for choice in each.raise_for_status().json()["choices"]] for each in (got, want)]
            same += told[0] == told[1]
            split += "split=" in got.headers.get("x-warmgate-route", "")
    return same, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--running", type=int, default=4, help="answers that are decoded meanwhile")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each of them")
    parser.add_argument("--prompts", type=int, default=4, help="long prompts, one after another")
    parser.add_argument("--length", type=int, default=1500, help="tokens of each of them")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before the first of them")
    parser.add_argument("--moves", type=int, default=4, help="prompts moved between idle engines")
    parser.add_argument("--requests", type=int, default=100, help="mixed requests to compare, 0: none")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    flags = ["--threads", "1", "--dtype", options.dtype, "--speculate", "off"]
    tails: dict[str, list[float]] = {arm: [] for arm in ROLES}
    print("| | inter-token p50, ms | p99, ms | largest, ms | TTFT of the long prompts, s | split |")
    print("|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        pair = [stack.enter_context(engine(*flags, "--kv-transfer", f"127.0.0.1:{free_port()}")) for _ in range(2)]
        for round_ in range(options.rounds):
            for arm, roles in ROLES.items():
                engines = {f"{role}-{i}": (role, each) for i, (role, each) in enumerate(zip(roles, pair, strict=True))}
                with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), engines) as url:
                    seed = (round_ * 2 + (arm == "split")) * 10_000
                    gaps, ttft, split = asyncio.run(under_prompts(url, options, seed))
                p50, *_, p99 = (statistics.quantiles(gaps, n=100)[at] * 1000 for at in (49, 98))
                tails[arm].append(p99)
                row = f"| {arm} | {p50:.0f} | {p99:.0f} | {max(gaps) * 1000:.0f} | {spread(ttft)} |"
                print(f"{row} {split}/{options.prompts} |", flush=True)
        ratios = [whole / split for whole, split in zip(tails["whole"], tails["split"], strict=True)]
        print(f"\nTail (p99) of the inter-token latency, whole over split: {spread(ratios)}.")
        moved = asyncio.run(moving(pair[0], pair[1], options))
        shares = [100 * after / (before + after) for before, after in moved]
        print(
            f"A prompt of {options.length} tokens between idle engines: computed in {spread([a for a, _ in moved])} s,"
        )
        print(f"first token {spread([b for _, b in moved])} s after, {spread(shares)} % of the whole.")
        if options.requests:
            say("comparing answers")
            engines = {"prefill": ("prefill", pair[0]), "decode": ("decode", pair[1])}
            alone = stack.enter_context(engine(*flags))
            with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), engines) as url:
                same, split = asyncio.run(same_answers(url, alone, options.requests))
            print(f"Same text split and whole: {same} of {options.requests} mixed requests ({split} were split).")


if __name__ == "__main__":
    main()
