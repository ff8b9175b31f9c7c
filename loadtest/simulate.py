"""Real traces through the eviction policies of `policies/`: hit ratio by policy and capacity, with Belady's limit.

    python -m loadtest.simulate --trace conversation.jsonl.gz --policy prefix lru belady --capacity 1000 10000

The ratio is that of *leading* blocks: of a request's blocks those found in the cache up to the first that is missing,
over all blocks of all requests. Requests are served one after the other, so nothing is in flight when the next comes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from loadtest.baselines import Lfu, belady_hits, infinite_hits
from loadtest.traces import DEFAULT_SPREAD, Request, TraceError, read_trace
from policies.eviction import Lru, S3Fifo, Sieve
from policies.prefix_eviction import PrefixEviction


class Cache(Protocol):
    """A prefix cache under simulation."""

    def serve(self, blocks: Sequence[int]) -> int:
        """How many leading blocks were here; afterwards all of them have been used and offered."""
        ...


class FlatPolicy(Protocol):
    """As much of an `EvictionPolicy` as is needed for blocks that do not know their chain."""

    def insert(self, key: int, size: int) -> list[int]: ...
    def touch(self, key: int) -> None: ...
    def __contains__(self, key: object) -> bool: ...


class FlatCache:
    """A policy for independent entries, used for chains: tails first, so that heads outlive them where age decides."""

    def __init__(self, policy: FlatPolicy) -> None:
        self._policy = policy

    def serve(self, blocks: Sequence[int]) -> int:
        policy = self._policy
        held = leading(blocks, policy)
        for block in reversed(blocks):
            if block in policy:
                policy.touch(block)
            else:
                policy.insert(block, 1)
        return held


class PrefixCache:
    """Our policy. `refuses`: as a tier that need not take a block; without it as a pool that must, to compute it."""

    def __init__(self, capacity: int, *, refuses: bool) -> None:
        self._policy: PrefixEviction[int] = PrefixEviction(capacity)
        self._refuses = refuses

    def serve(self, blocks: Sequence[int]) -> int:
        policy = self._policy
        held = leading(blocks, policy)
        for block in blocks[:held]:
            policy.touch(block)
        if held < len(blocks):
            self._append(blocks, held)
        return held

    def _append(self, blocks: Sequence[int], held: int) -> None:
        policy = self._policy
        for block in blocks[:held]:
            policy.pin(block)
        parent = blocks[held - 1] if held else None
        end = held
        while end < len(blocks) and self._make_room(blocks[end]):
            policy.insert(blocks[end], parent, pinned=True)
            parent = blocks[end]
            end += 1
        for block in blocks[end:]:
            policy.refuse(block)
        for block in reversed(blocks[:end]):
            policy.unpin(block)

    def _make_room(self, block: int) -> bool:
        policy = self._policy
        if len(policy) < policy.capacity:
            return True
        return (not self._refuses or policy.admits(block)) and policy.evict() is not None


def leading(blocks: Sequence[int], cache: FlatPolicy | PrefixEviction[int]) -> int:
    """How many of the blocks are in the cache before the first that is not."""
    held = 0
    for block in blocks:
        if block not in cache:
            break
        held += 1
    return held


def _flat(policy: Callable[[int], FlatPolicy]) -> Callable[[int], Cache]:
    return lambda capacity: FlatCache(policy(capacity))


CACHES: dict[str, Callable[[int], Cache]] = {
    "lru": _flat(Lru),
    "lfu": _flat(Lfu),
    "sieve": _flat(Sieve),
    "s3fifo": _flat(S3Fifo),
    "prefix-pool": lambda capacity: PrefixCache(capacity, refuses=False),
    "prefix": lambda capacity: PrefixCache(capacity, refuses=True),
}
LIMIT = "belady"


def hit_ratio(requests: Sequence[Request], policy: str, capacity: int) -> float:
    """Leading-contiguous block hit ratio of a policy (a name in `CACHES`, or `belady`) at a capacity in blocks."""
    if policy == LIMIT:
        hits = belady_hits(_chains(requests), capacity)
    else:
        cache = CACHES[policy](capacity)
        hits = sum(map(cache.serve, _chains(requests)))
    return hits / _total(requests)


def infinite_hit_ratio(requests: Sequence[Request]) -> float:
    """The hit ratio of a cache that forgets nothing."""
    return infinite_hits(_chains(requests)) / _total(requests)


def _chains(requests: Iterable[Request]) -> Iterator[list[int]]:
    return (request.blocks() for request in requests)


def _total(requests: Iterable[Request]) -> int:
    return sum(map(len, _chains(requests)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        requests = read_trace(options.trace, spread=options.spread * 3600, seed=options.seed, stride=options.stride)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    requests = requests[: options.requests]
    distinct = len({block for blocks in _chains(requests) for block in blocks})
    print(f"{options.trace.name}: {len(requests):,} requests, {_total(requests):,} blocks, {distinct:,} distinct.")
    print(f"A cache that forgets nothing hits {_short(infinite_hit_ratio(requests))}.\n")
    print(_row("policy", (f"{capacity:,}" for capacity in options.capacity), "seconds"))
    print(_row("---", ("---" for _ in options.capacity), "---"))
    for policy in options.policy:
        started = time.perf_counter()
        ratios = [_short(hit_ratio(requests, policy, capacity)) for capacity in options.capacity]
        print(_row(policy, ratios, f"{time.perf_counter() - started:.1f}"), flush=True)
    return 0


def _short(ratio: float) -> str:
    return f"{ratio:.4f}".removeprefix("0")


def _row(first: str, cells: Iterable[str], last: str) -> str:
    return f"| {' | '.join([first, *cells, last])} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulate", description="Hit ratios of eviction policies.")
    known = [*CACHES, LIMIT]
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="JSON lines, plain or .gz: Mooncake, Bailian or agent sessions")
    add("--policy", nargs="+", choices=known, default=known, metavar="NAME", help=f"of {', '.join(known)}")
    add("--capacity", nargs="+", type=_positive, default=[1000, 3000, 10_000, 30_000, 50_000], metavar="BLOCKS")
    add("--stride", type=_positive, default=1, help="merge this many blocks of the trace into one")
    add("--requests", type=_positive, help="only the first so many")
    add("--spread", type=float, default=DEFAULT_SPREAD / 3600, help="hours over which sessions start (default 8)")
    add("--seed", type=int, default=0, help="of the sessions' random starts (default 0)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
