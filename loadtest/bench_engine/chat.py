"""A replay of many conversations at once: what the tiers save when the device holds only a few of them.

Each turn sends the whole conversation so far; the sessions take turns in random order, so that a session's blocks are
mostly gone from the device when it is its turn again.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from loadtest.bench_engine.figures import say
from loadtest.bench_engine.servers import Server, engine, words

SYSTEM, USER, ANSWER = 256, 112, 16
"""Tokens of a session's own first prompt, of each further message, of each answer."""
KV_BYTES = {"float32": 46_080, "bfloat16": 23_040}
"""Bytes of KV per token of the bundled model."""


@dataclass
class Replay:
    """What one run took."""

    name: str
    computed: int
    seconds: float
    cpu: float
    first_tokens: list[float]

    def good(self, patience: float) -> float:
        """Turns a second whose first token came within `patience` seconds."""
        return sum(wait <= patience for wait in self.first_tokens) / self.seconds


def session_tokens(turns: int) -> int:
    """Length of a whole conversation."""
    return SYSTEM + turns * (USER + ANSWER)


async def replay(name: str, server: Server, sessions: int, turns: int, users: int) -> Replay:
    """All turns of all sessions, `users` at once. Fixed tokens stand for the answers, so that all runs ask the same."""
    texts = [words(SYSTEM, 7_000_000 + session) for session in range(sessions)]
    waits: list[float] = []
    async with httpx.AsyncClient(timeout=900) as client:
        await server.first_token(client, words(300, -1))
        before, began, cpu = await server.computed(client), time.perf_counter(), server.cpu()
        for turn in range(turns):
            order = iter(random.Random(turn).sample(range(sessions), sessions))

            async def user(turn: int, order: Iterator[int] = order) -> None:
                for session in order:
                    texts[session] += words(USER, 8_000_000 + session * 100 + turn)
                    waits.append(await server.first_event(client, texts[session], ANSWER))
                    texts[session] += words(ANSWER, 9_000_000 + session * 100 + turn)

            await asyncio.gather(*(user(turn) for _ in range(users)))
            say(f"{name}: turn {turn + 1} of {turns}, {time.perf_counter() - began:.0f} s")
        computed = await server.computed(client) - before
    return Replay(name, computed, time.perf_counter() - began, server.cpu() - cpu, waits)


async def measure(
    flags: list[str], dtype: str, remote: str | None, *, sessions: int = 20, turns: int = 8, on_device: int = 4
) -> list[Replay]:
    """Tiers off, host memory for all, host memory for half with the remote tier behind it."""
    session = session_tokens(turns) * KV_BYTES[dtype]
    pool = ["--kv-cache", str(on_device * session)]
    cases = [("off", pool), ("host", [*pool, "--kv-host", str((sessions + 1) * session)])]
    if remote:
        half = ["--kv-host", str(sessions // 2 * session), "--kv-remote", remote]
        cases.append(("host for half + Redis", [*pool, *half]))
    results = []
    for name, options in cases:
        with engine(*flags, *options, "--max-running", "4") as server:
            results.append(await replay(name, server, sessions, turns, users=2))
    return results


def show(results: list[Replay], patience: float = 1.0) -> None:
    """Prints a table."""
    good = f"turns/s with TTFT ≤ {patience:g} s"
    print(f"\n| tiers below the device | prefill tokens computed | s | CPU s | TTFT s, median (p95) | {good} |")
    print("|---|---|---|---|---|---|")
    for result in results:
        waits = sorted(result.first_tokens)
        p95 = waits[int(len(waits) * 0.95)]
        print(
            f"| {result.name} | {result.computed:,} | {result.seconds:.0f} | {result.cpu:.0f} "
            f"| {statistics.median(waits):.2f} ({p95:.2f}) | {result.good(patience):.2f} |"
        )
