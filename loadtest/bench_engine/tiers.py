"""Time to first token of one prompt, by where its prefix is found: nowhere, device, host memory, the remote tier."""

from __future__ import annotations

import statistics
from collections import defaultdict

import httpx

from loadtest.bench_engine.figures import Samples, rates, say, spread
from loadtest.bench_engine.servers import engine, words

TAIL = 4  # tokens behind the last whole chunk: what a full hit still has to compute


async def measure(
    flags: list[str], remote: str | None, rounds: int, lengths: list[int]
) -> dict[tuple[int, str], Samples]:
    """Samples by prompt length and place. The remote tier is asked by a second engine, as after a restart."""
    samples: dict[tuple[int, str], Samples] = defaultdict(Samples)
    flags = [*flags, "--kv-host", "2GiB", *(["--kv-remote", remote] if remote else [])]
    prompts = [(length, round_) for round_ in range(rounds) for length in lengths]
    async with httpx.AsyncClient(timeout=900) as client:
        with engine(*flags) as server:
            await server.first_token(client, words(300, -1))
            for length, round_ in prompts:
                prompt = words(length + TAIL, length * 1000 + round_)
                for reset in (False, False, True):  # cold, then from the device, then from the host
                    await server.rested()  # the second use is copied down behind the answer
                    if reset:
                        await client.post(f"{server.url}/reset_prefix_cache")
                    wall, cpu, tier = await server.first_token(client, prompt)
                    samples[length, tier].add(wall, cpu)
                    say(f"{length} {tier} {wall:.3f} s")
            await server.rested()
        if remote:
            with engine(*flags) as server:
                await server.first_token(client, words(300, -2))
                for length, round_ in prompts:
                    await server.rested()
                    wall, cpu, tier = await server.first_token(client, words(length + TAIL, length * 1000 + round_))
                    samples[length, tier].add(wall, cpu)
                    say(f"{length} {tier} {wall:.3f} s after a restart")
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
