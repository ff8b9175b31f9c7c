"""Runs the comparison and prints a Markdown table: medians over the rounds, with the spread of the ratio to nginx.

    python -m loadtest.bench_http [--rounds 5] [--seconds 3] [--connections 1,32,256] [--only hit,…]

Cases: `hit` (memory), `hit-held-out` (the same with the usual hold-out of 1 %), `redis-hit` (memory tier off),
`hit-30k`, `hit-1m` (large prompts), `plain` and `stream` (misses of requests that are not cached, passed through).
nginx is the yardstick of each: its cache for hits, its proxy for the rest. For the large prompts there is another: the
SHA-256 of their bodies, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loadtest.bench_http import servers
from loadtest.bench_http.load import Measured, measure, prompt_body
from loadtest.bench_http.peers import PEERS
from loadtest.bench_http.servers import Server

SMALL = 1500
CASES: dict[str, bytes] = {
    "hit": prompt_body(SMALL, temperature=0),
    "hit-held-out": prompt_body(SMALL, temperature=0),
    "redis-hit": prompt_body(SMALL, temperature=0),
    "hit-30k": prompt_body(30_000, temperature=0),
    "hit-1m": prompt_body(1_000_000, temperature=0),
    "plain": prompt_body(SMALL, temperature=1),
    "stream": prompt_body(SMALL, temperature=1, stream=True),
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="bench_http", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", default="1,32,256")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--against", choices=["nginx", *PEERS], default="nginx", help="what to compare with")
    parser.add_argument("--venv", type=Path, help="where that is installed, if it is not nginx")
    options = parser.parse_args()
    if options.against != "nginx" and options.venv is None:
        parser.error("--against another gateway needs --venv")
    connections = [int(count) for count in options.connections.split(",")]
    cases = [name for name in options.only.split(",") if name in CASES]
    # The server has a core of its own; wrk and the upstream share the other.
    server_cpu, load_cpu = ("0", "1") if (os.cpu_count() or 1) >= 2 and sys.platform == "linux" else (None, None)
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        engine = stack.enter_context(servers.upstream(load_cpu)).port
        pairs = dict(_pairs(stack, folder, cases, engine, server_cpu, load_cpu))
        if options.against != "nginx":
            peer = PEERS[options.against](options.venv, folder / "peer", engine, server_cpu)
            theirs = stack.enter_context(peer)
            pairs = {name: (ours, theirs) for name, (ours, _) in pairs.items()}
        name = options.against
        print(
            f"| case | connections | CPU µs: warmgate / {name} | CPU ratio (min–max) | req/s ratio | p50 µs | p99 µs |"
        )
        print("|---|---|---|---|---|---|---|")
        for name, (ours, theirs) in pairs.items():
            for count in connections:
                runs: list[tuple[Measured, Measured]] = []
                for server in (ours, theirs):
                    measure(server, CASES[name], count, options.seconds, folder, load_cpu)  # warm; fill the caches
                for _ in range(options.rounds):
                    both = [measure(s, CASES[name], count, options.seconds, folder, load_cpu) for s in (ours, theirs)]
                    runs.append((both[0], both[1]))
                print(_line(name, count, runs), flush=True)
        for name in cases:
            if len(CASES[name]) > SMALL:
                print(f"SHA-256 over the body of `{name}`: {_sha256(CASES[name]):.0f} µs.")


def _sha256(body: bytes) -> float:
    """Microseconds of CPU for one hash, the median of many."""
    taken: list[float] = []
    for _ in range(200):
        began = time.thread_time()
        hashlib.sha256(body).digest()
        taken.append(time.thread_time() - began)
    return statistics.median(taken) * 1e6


def _pairs(
    stack: contextlib.ExitStack,
    folder: Path,
    cases: list[str],
    engine: int,
    server_cpu: str | None,
    load_cpu: str | None,
) -> Iterator[tuple[str, tuple[Server, Server]]]:
    """For each case the gateway and the nginx that it is compared with."""
    cached = stack.enter_context(servers.nginx(folder / "nginx-cache", engine, server_cpu, cached=True))
    passing = stack.enter_context(servers.nginx(folder / "nginx-proxy", engine, server_cpu, cached=False))
    plain = stack.enter_context(servers.gateway(folder / "gateway", engine, server_cpu))
    for name in cases:
        if name == "hit-held-out":
            held_out = servers.gateway(folder / "gw-held-out", engine, server_cpu, holdout=0.01)
            yield name, (stack.enter_context(held_out), cached)
        elif name == "redis-hit":
            url = stack.enter_context(servers.redis(folder / "redis", load_cpu))
            shared = {"memory": "off", "redis": {"url": url, "timeout": "1s"}}
            yield (
                name,
                (stack.enter_context(servers.gateway(folder / "gw-redis", engine, server_cpu, **shared)), cached),
            )
        else:
            yield name, (plain, cached if name.startswith("hit") else passing)


def _line(name: str, connections: int, runs: list[tuple[Measured, Measured]]) -> str:
    def middle(values: list[float]) -> float:
        return statistics.median(values)

    ratios = [ours.cpu / theirs.cpu for ours, theirs in runs]
    rates = middle([ours.rate / theirs.rate for ours, theirs in runs])
    ours_cpu, theirs_cpu = (middle([run[side].cpu for run in runs]) for side in (0, 1))
    p50, p50_theirs = (middle([run[side].p50 for run in runs]) for side in (0, 1))
    p99, p99_theirs = (middle([run[side].p99 for run in runs]) for side in (0, 1))
    return (
        f"| {name} | {connections} | {ours_cpu:.1f} / {theirs_cpu:.1f} | {middle(ratios):.2f} ({min(ratios):.2f}–"
        f"{max(ratios):.2f}) | {rates:.2f} | {p50:.0f} / {p50_theirs:.0f} | {p99:.0f} / {p99_theirs:.0f} |"
    )


if __name__ == "__main__":
    main()
