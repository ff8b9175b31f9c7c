"""Prefill and decode tokens per second of several servers at once, asked in turn, round by round."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import httpx

from loadtest.bench_engine.figures import Samples, rates, say
from loadtest.bench_engine.servers import Server, words

Case = tuple[str, int]
"""(`prefill` or `decode`, tokens or batch)."""


async def measure(
    servers: Mapping[str, Server], rounds: int, lengths: Sequence[int], batches: Sequence[int]
) -> dict[Case, dict[str, Samples]]:
    """Seconds per token by case and by server's name."""
    samples: dict[Case, dict[str, Samples]] = defaultdict(lambda: defaultdict(Samples))
    async with httpx.AsyncClient(timeout=900) as client:
        for server in servers.values():
            await server.decode(client, 1)
        for _ in range(rounds):
            for length in lengths:
                prompt = words(length, random.randrange(1 << 30))
                for name, server in servers.items():
                    wall, cpu, _ = await server.first_token(client, prompt)
                    samples["prefill", length][name].add(wall / length, cpu / length)
                    say(f"prefill {length} {name}: {length / wall:.0f} tokens/s")
            for batch in batches:
                for name, server in servers.items():
                    samples["decode", batch][name].add(*await server.decode(client, batch))
                    say(f"decode {batch} {name}: {1 / samples['decode', batch][name].wall[-1]:.1f} tokens/s")
    return samples


def show(samples: dict[Case, dict[str, Samples]]) -> None:
    """Prints a table."""
    print("\n| | server | tokens/s, median (range) | per CPU second |\n|---|---|---|---|")
    for (kind, size), by_server in samples.items():
        for name, case in by_server.items():
            print(f"| {kind} {size} | {name} | {rates(case.wall)} | {rates(case.cpu)} |")
