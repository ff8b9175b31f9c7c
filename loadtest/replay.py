"""Plays a real trace against live engines or a gateway before them, and tells what was reused and how long it took.

    python -m loadtest.replay --url http://127.0.0.1:8080 --model m1 --trace FILE [--limit 500] [--speed 10]

A trace (`loadtest.traces`) names the blocks of each prompt; the text of a block is made from its name, so that prompts
share a beginning exactly where those of the trace did. Requests go out at the trace's own times, ``--speed`` times as
fast, whether or not those before have been answered; how late they went out is told as well, since times of a load that
could not be made mean little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest.streamed import Told, ask
from loadtest.traces import Request, TraceError, read_trace

_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu".split()


@dataclass
class Played:
    """What became of a replay. ``ideal``: the share of leading blocks that a cache without bounds would have held;
    ``late``: seconds by which requests went out behind their time.
    """

    told: list[Told] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    ideal: float = 0.0
    seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """For people and programs; times in seconds, None where nothing was measured."""
        good = [told for told in self.told if told.end == "ok"]
        prompt, cached = sum(told.prompt for told in good), sum(told.cached for told in good)
        outcomes = Counter(_outcome(told) for told in good)
        return {
            "requests": len(self.told),
            "ends": dict(Counter(told.end for told in self.told)),
            "statuses": dict(Counter(str(told.status) for told in self.told if told.end == "refused")),
            "seconds": round(self.seconds, 2),
            "late": _quantiles(self.late),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "reuse": round(cached / prompt, 4) if prompt else None,
            "ideal_block_reuse": round(self.ideal, 4),
            "response_cache": dict(outcomes),
            "upstreams": dict(Counter(told.headers.get("x-warmgate-upstream", "") for told in good)),
            "ttft": _quantiles([told.first for told in good if told.first is not None]),
            "latency": _quantiles([told.seconds for told in good]),
        }


def text_of(block: int, words: int) -> str:
    """The text of a block: the same for the same name, and different from the first word on for any other."""
    rng = random.Random(block)
    name = f"{block:x}"
    return " ".join([name, *("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(words - 1))])


def body_of(request: Request, model: str, words: int, most_output: int) -> dict[str, Any]:
    """The chat request that stands for one of the trace."""
    text = "\n".join(text_of(block, words) for block in request.blocks())
    limit = max(1, min(request.output_tokens or most_output, most_output))
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": limit, "temperature": 1}


def ideal_reuse(requests: Sequence[Request]) -> float:
    """The share of all blocks that a cache which forgets nothing would hold when they are asked for."""
    held: set[int] = set()
    hits = total = 0
    for request in requests:
        blocks = request.blocks()
        for block in blocks:
            if block not in held:
                break
            hits += 1
        total += len(blocks)
        held.update(blocks)
    return hits / total if total else 0.0


async def play(
    url: str,
    model: str,
    requests: Sequence[Request],
    *,
    speed: float = 1.0,
    words: int = 24,
    most_output: int = 16,
    at_once: int = 64,
    key: str | None = None,
    more: dict[str, Any] | None = None,
) -> Played:
    """Plays requests. ``words``: of one block's text; ``at_once``: requests under way at most; ``more``: further fields
    of each request.
    """
    played, gate = Played(ideal=ideal_reuse(requests)), asyncio.Semaphore(at_once)
    headers = {"authorization": f"Bearer {key}"} if key else None
    began = time.monotonic()
    start = requests[0].at if requests else 0.0

    async def one(client: httpx.AsyncClient, request: Request) -> None:
        due = (request.at - start) / speed
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        async with gate:
            played.late.append(max(0.0, time.monotonic() - began - due))
            body = body_of(request, model, words, most_output) | (more or {})
            played.told.append(await ask(client, body, headers))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(one(client, request) for request in requests))
    played.seconds = time.monotonic() - began
    return played


def _outcome(told: Told) -> str:
    status = told.headers.get("cache-status", "")
    if "; hit" in status:
        return "hit"
    return "collapsed" if "collapsed" in status else "stored" if "stored" in status else "passed"


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    kept = sorted(values)
    return {
        name: round(kept[min(len(kept) - 1, int(len(kept) * share))], 4) if kept else None
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the gateway or engine, without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="the first so many requests only")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as it was")
    parser.add_argument("--spread", type=float, default=600.0, help="seconds over which sessions begin")
    parser.add_argument("--stride", type=int, default=1, help="so many blocks of the trace make one")
    parser.add_argument("--words", type=int, default=24, help="of one block's text")
    parser.add_argument("--most-output", type=int, default=16, help="tokens of an answer at most")
    parser.add_argument("--at-once", type=int, default=64, help="requests under way at most")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: answers may come from the response cache")
    options = parser.parse_args()
    if options.speed <= 0 or options.words < 1 or options.at_once < 1:
        parser.error("--speed, --words and --at-once must be above zero")
    try:
        requests = read_trace(options.trace, spread=options.spread, stride=options.stride)[: options.limit]
    except TraceError as error:
        sys.exit(str(error))
    print(f"{len(requests)} requests; times as in the trace, {options.speed:g} times as fast", file=sys.stderr)
    played = asyncio.run(
        play(
            options.url,
            options.model,
            requests,
            speed=options.speed,
            words=options.words,
            most_output=options.most_output,
            at_once=options.at_once,
            key=os.environ.get("WARMGATE_KEY"),
            more={"temperature": options.temperature},
        )
    )
    print(json.dumps(played.report(), indent=2))


if __name__ == "__main__":
    main()
