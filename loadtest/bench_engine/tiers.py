"""Time to first token of one prompt, by where its prefix is found: nowhere, device, host memory, a remote tier."""

from __future__ import annotations

import statistics
from collections import defaultdict

import httpx

from loadtest.bench_engine.figures import Samples, rates, say, spread
from loadtest.bench_engine.servers import Server, engine, words

TAIL = 4  # tokens behind the last whole chunk: what a full hit still has to compute


async def measure(
    flags: list[str], remotes: list[str], rounds: int, lengths: list[int]
) -> dict[tuple[int, str], Samples]:
    """Samples by prompt length and place. Each remote tier is asked by a second engine, as after a restart."""
    samples: dict[tuple[int, str], Samples] = defaultdict(Samples)
    flags = [*flags, "--kv-cache", "1GiB", "--kv-host", "2GiB"]
    prompts = [(length, round_) for round_ in range(rounds) for length in lengths]
    async with httpx.AsyncClient(timeout=900) as client:

        async def ask(server: Server, length: int, round_: int) -> None:
            wall, cpu, tier = await server.first_token(client, words(length + TAIL, length * 1000 + round_))
            samples[length, tier].add(wall, cpu)
            await server.rested()  # what is used a second time is copied down behind the answer
            say(f"{length} {tier} {wall:.3f} s, {cpu:.2f} of a processor")

        for below in [["--kv-remote", remote] for remote in remotes] or [[]]:
            with engine(*flags, *below) as server:
                await server.first_token(client, words(300, -1))
                for length, round_ in prompts:
                    await ask(server, length, round_)  # cold
                    await ask(server, length, round_)  # from the device
                    await client.post(f"{server.url}/reset_prefix_cache")
                    await ask(server, length, round_)  # from the host
            if not below:
                continue
            with engine(*flags, *below) as server:
                await server.first_token(client, words(300, -2))
                for length, round_ in prompts:
                    await ask(server, length, round_)
    return samples


def show(samples: dict[tuple[int, str], Samples]) -> None:
    """Prints a table."""
    print("\n| prompt | prefix found | TTFT s, median (range) | CPU s | TTFT vs cold |\n|---|---|---|---|---|")
    for (length, tier), case in sorted(
        samples.items(), key=lambda item: (item[0][0], -statistics.median(item[1].wall))
    ):
        gain = statistics.median(samples[length, "cold"].wall) / statistics.median(case.wall)
        print(f"| {length} | {tier} | {spread(case.wall)} | {spread(case.cpu)} | {gain:.1f}× |")
    for length in sorted({length for length, _ in samples}):
        cold = samples[length, "cold"]
        wall, cpu = rates(cold.wall, length), rates(cold.cpu, length)
        print(f"\nPrefill of {length} tokens: {wall} tokens/s, {cpu} per CPU second.")
