"""A real trace over several replicas, through the routing policies of `policies/`: reuse, balance, and time to answer.

    python -m loadtest.simulate_routing --trace conversation.jsonl.gz --replicas 8 --capacity 6000

Each replica holds an LRU cache of blocks and computes one prompt after the other at a fixed rate. The router knows
exactly what each holds. `longest` (pure longest match) shows what is wrong with looking at the prefix alone.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.simulate import FlatCache, leading
from loadtest.traces import DEFAULT_SPREAD, Request, TraceError, read_trace
from policies.eviction import Lru
from policies.routing import Ask, Decision, Engine, Policy, make_policy

SESSION_BLOCKS = 2
"""A session is known by so many first blocks."""


class LongestMatch:
    """Whoever holds most, whatever its load; the first of equals."""

    def choose(self, engines: Sequence[Engine], ask: Ask, now: float) -> Decision:
        held = {i: sum(count for count, _ in shares) for i, shares in ask.held.items()}
        index = max(range(len(engines)), key=lambda i: held.get(i, 0))
        return Decision(index, "prefix", held.get(index, 0), ask.prompt - held.get(index, 0))


POLICIES = ("round_robin", "load", "sticky", "longest", "prefix")


@dataclass(frozen=True, slots=True)
class Result:
    """Leading-block hit ratio, the busiest replica's computed blocks over the mean, and seconds to the first token."""

    hits: float
    imbalance: float
    ttft_mean: float
    ttft_p99: float


class Replicas:
    """The replicas and their queues.

    Args:
        block_tokens: tokens in one block of the trace.
        rate: prompt tokens that one replica computes in a second.
        decode: seconds per output token, during which a request counts as running.
    """

    def __init__(self, count: int, capacity: int, *, block_tokens: int, rate: float, decode: float) -> None:
        self._held: list[Lru[int]] = [Lru(capacity) for _ in range(count)]
        self._caches = [FlatCache(held) for held in self._held]
        self.engines = [Engine(f"replica-{i}", prefill_rate=rate) for i in range(count)]
        self.computed = [0] * count
        self.ttft: list[float] = []
        self.hits = self.asked = 0
        self._tokens, self._rate, self._decode = block_tokens, rate, decode
        self._free_at = [0.0] * count
        self._events: list[tuple[float, int, int, int]] = []  # (when, replica, prompt tokens done, requests done)

    def serve(self, request: Request, policy: Policy) -> None:
        """Routes a request and counts what comes of it."""
        now, blocks = request.at, request.blocks()
        self._catch_up(now)
        held = {i: ((n * self._tokens, 0.0),) for i, lru in enumerate(self._held) if (n := leading(blocks, lru))}
        session = hash((*blocks[:SESSION_BLOCKS],)) & (1 << 62) - 1
        chosen = policy.choose(self.engines, Ask(len(blocks) * self._tokens, held, session), now).index
        hits = self._caches[chosen].serve(blocks)
        self.hits += hits
        self.asked += len(blocks)
        self.computed[chosen] += len(blocks) - hits
        tokens, engine = (len(blocks) - hits) * self._tokens, self.engines[chosen]
        engine.pending += tokens
        engine.running += 1
        engine.add_work(tokens, now)
        answered = max(self._free_at[chosen], now) + tokens / self._rate
        self._free_at[chosen] = answered
        self.ttft.append(answered - now)
        heapq.heappush(self._events, (answered, chosen, tokens, 0))
        heapq.heappush(self._events, (answered + self._decode * request.output_tokens, chosen, 0, 1))

    def _catch_up(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            _, index, tokens, ended = heapq.heappop(self._events)
            self.engines[index].pending -= tokens
            self.engines[index].running -= ended


def simulate(
    requests: Sequence[Request],
    policy: str,
    replicas: int,
    capacity: int,
    *,
    block_tokens: int = 512,
    rate: float = 10_000.0,
    decode: float = 0.03,
    seed: int = 0,
) -> Result:
    """Replays requests through the policy of this name (see `POLICIES`). See `Replicas` for the rest."""
    fleet = Replicas(replicas, capacity, block_tokens=block_tokens, rate=rate, decode=decode)
    chooser = LongestMatch() if policy == "longest" else make_policy(policy, random.Random(seed).randrange)
    for request in requests:
        fleet.serve(request, chooser)
    ttft = sorted(fleet.ttft)
    return Result(
        fleet.hits / fleet.asked,
        max(fleet.computed) * replicas / max(1, sum(fleet.computed)),
        sum(ttft) / len(ttft),
        ttft[int(len(ttft) * 0.99)],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        requests = read_trace(options.trace, spread=options.spread * 3600, seed=options.seed, stride=options.stride)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    requests = requests[: options.requests]
    print(f"{options.trace.name}: {len(requests):,} requests, {options.replicas} × {options.capacity:,} blocks\n")
    print("| policy | hit ratio | max/mean computed | TTFT mean, s | TTFT p99, s |\n|---|---|---|---|---|")
    for policy in options.policy:
        found = simulate(
            requests,
            policy,
            options.replicas,
            options.capacity,
            block_tokens=options.block_tokens,
            rate=options.rate,
            seed=options.seed,
        )
        print(
            f"| {policy} | {found.hits:.3f} | {found.imbalance:.2f} | {found.ttft_mean:.2f} | {found.ttft_p99:.1f} |",
            flush=True,
        )
    pooled = simulate(requests, "longest", 1, options.replicas * options.capacity, rate=options.rate * options.replicas)
    print(f"| one pooled cache | {pooled.hits:.3f} | | | |")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.simulate_routing", description="Reuse and balance of routing policies."
    )
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="JSON lines, plain or .gz: Mooncake, Bailian or agent sessions")
    add("--policy", nargs="+", choices=POLICIES, default=POLICIES, metavar="NAME", help=f"of {', '.join(POLICIES)}")
    add("--replicas", type=int, default=8)
    add("--capacity", type=int, default=6000, metavar="BLOCKS", help="of each replica")
    add("--stride", type=int, default=1, help="merge this many blocks of the trace into one (agent sessions: 8)")
    add("--block-tokens", type=int, default=512, help="tokens in one block, after merging")
    add("--rate", type=float, default=10_000.0, help="prompt tokens per second of one replica")
    add("--requests", type=int, help="only the first so many")
    add("--spread", type=float, default=DEFAULT_SPREAD / 3600, help="hours over which sessions start (default 8)")
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
