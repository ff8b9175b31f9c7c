"""Tokens per second with speculation and without: on a question asked again, on text that repeats itself, on free text.

The answers are compared, too: with or without drafts they must be the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import httpx

from loadtest.bench_engine.figures import Samples, rates, say
from loadtest.bench_engine.servers import Server, engine

TOKENS = 128
_CODE = """
def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError("unknown shape")
"""
QUESTIONS = {
    "repeats a text": f"Repeat this text word for word, take {{round}}:\n{_CODE}",
    "counts": "Count from 1{round} on, one number a line.",
    "free": "Write a short story about a lighthouse keeper, take {round}.",
    "free, other": "Explain how a bicycle stays upright, take {round}.",
}


async def measure(flags: list[str], rounds: int) -> dict[str, dict[str, Samples]]:
    """Seconds per token by text and by whether there were drafts. Raises `SystemExit` if an answer differs."""
    samples: dict[str, dict[str, Samples]] = defaultdict(lambda: defaultdict(Samples))
    with engine(*flags, "--speculate", "off") as plain, engine(*flags) as quick:
        servers: Mapping[str, Server] = {"off": plain, "on": quick, "on, asked again": quick}
        async with httpx.AsyncClient(timeout=900) as client:
            for round_ in range(rounds):
                for text, question in QUESTIONS.items():
                    asked = question.format(round=round_)
                    said: set[str] = set()
                    for name, server in servers.items():
                        answer, wall, cpu = await server.chat(client, asked, TOKENS)
                        said.add(answer)
                        samples[text][name].add(wall / TOKENS, cpu / TOKENS)
                        say(f"{text}, drafts {name}: {TOKENS / cpu:.1f} tokens per CPU second")
                    if len(said) > 1:
                        raise SystemExit(f"drafts changed the answer to: {asked}")
    return samples


def show(samples: dict[str, dict[str, Samples]]) -> None:
    """Prints a table."""
    print("\n| text | drafts | tokens/s, median (range) | per CPU second |\n|---|---|---|---|")
    for text, by_name in samples.items():
        for name, case in by_name.items():
            print(f"| {text} | {name} | {rates(case.wall)} | {rates(case.cpu)} |")
