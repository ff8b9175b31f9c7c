"""Replays chats by routing policy and prints Markdown tables, for `docs/benchmarks/routing.md`.

    python -m loadtest.bench_routing [replay] [overhead] [--chats 40] [--turns 8] [--engines 4] [--sglang-router VENV]

*reuse*: the share of all prompt tokens that the engines held, by their own counters. *load*: of the busiest engine over
the mean of all. Everything runs on this machine, so that times say little; CPU time of the router says more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench_http.servers import Server
from loadtest.bench_routing import overhead
from loadtest.bench_routing.fleet import EngineProcess, engines, gateway, sglang_router, upstream
from loadtest.bench_routing.model import KV_BYTES, write_model
from loadtest.bench_routing.replay import Replay, replay

RUNS = {
    "exact": ("prefix", True),
    "approximate": ("prefix", False),
    "sticky": ("sticky", False),
    "load": ("load", False),
    "round_robin": ("round_robin", False),
}
"""Policy, and whether KV events are heard, by name."""
AWAY = 2.0
"""Seconds that a killed engine stays away before it is started again."""


@dataclass(frozen=True)
class Options:
    """How much there is to replay: ``tokens``: room for KV in each engine; ``gateways``: as many before the engines,
    each of which sees a share of every chat.
    """

    chats: int = 40
    turns: int = 8
    engines: int = 4
    at_once: int = 8
    tokens: int = 32_768
    gateways: int = 1


@dataclass(frozen=True)
class Result:
    """A replay, the busiest engine's requests and work over the mean, and the router's CPU seconds per request."""

    replay: Replay
    requests: float
    work: float
    router: float


def measure(servers: list[Server], fleet: list[EngineProcess], options: Options) -> Result:
    """One replay through running routers, over engines that hold nothing."""
    for engine in fleet:
        engine.forget()
    before = [engine.counters() for engine in fleet]
    cpu = sum(server.cpu_seconds() for server in servers)
    done = asyncio.run(replay(_urls(servers), "tiny", options.chats, options.turns, options.at_once))
    cpu = sum(server.cpu_seconds() for server in servers) - cpu
    rose = [
        {name: value - old.get(name, 0.0) for name, value in engine.counters().items()}
        for engine, old in zip(fleet, before, strict=True)
    ]
    requests = [of["vllm:request_success"] for of in rose]
    work = [of["warmgate_engine_prefill_tokens"] + of["vllm:generation_tokens"] for of in rose]
    return Result(done, _busiest(requests), _busiest(work), cpu / len(done.turns))


def measure_with_a_death(servers: list[Server], fleet: list[EngineProcess], options: Options) -> Replay:
    """A replay in whose middle an engine is killed, to come back a little later."""
    for engine in fleet:
        engine.forget()

    async def kill() -> None:
        await asyncio.to_thread(fleet[-1].kill)
        await asyncio.sleep(AWAY)
        fleet[-1].start()

    done = asyncio.run(replay(_urls(servers), "tiny", options.chats, options.turns, options.at_once, kill))
    fleet[-1].wait()
    return done


@contextmanager
def routed(folder: Path, model: Path, fleet: list[EngineProcess], name: str, count: int = 1) -> Iterator[list[Server]]:
    """So many gateways that route by the run of this name (see `RUNS`)."""
    policy, tells = RUNS[name]
    upstreams = [upstream(engine, f"engine-{i}", model, tells=tells) for i, engine in enumerate(fleet)]
    with ExitStack() as stack:
        yield [stack.enter_context(gateway(folder / f"{name}-{i}", upstreams, policy)) for i in range(count)]


def _urls(servers: list[Server]) -> list[str]:
    return [f"http://127.0.0.1:{server.port}" for server in servers]


def _busiest(loads: list[float]) -> float:
    return max(loads) * len(loads) / max(1.0, sum(loads))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="bench_routing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="replay, overhead (default: both)")
    for name in ("chats", "turns", "engines", "at_once", "tokens", "gateways"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Options, name))
    parser.add_argument("--only", default=",".join(RUNS), help="of these runs")
    parser.add_argument("--sglang-router", type=Path, metavar="VENV", help="replay through it as well")
    given = parser.parse_args()
    if unknown := {*given.parts} - {"replay", "overhead"} | {*given.only.split(",")} - RUNS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    options = Options(given.chats, given.turns, given.engines, given.at_once, given.tokens, given.gateways)
    print(f"\nLoad of the machine before the first run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")
    with tempfile.TemporaryDirectory() as folder:
        if not given.parts or "replay" in given.parts:
            _replays(Path(folder), options, given.only.split(","), given.sglang_router)
        if not given.parts or "overhead" in given.parts:
            overhead.show(overhead.measure(Path(folder) / "overhead"))
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}.")


def _replays(folder: Path, options: Options, names: list[str], sglang: Path | None) -> None:
    model, kv = write_model(folder), options.tokens * KV_BYTES
    print(
        f"\n{options.chats} chats of {options.turns} turns, {options.at_once} requests at once, "
        f"gateways: {options.gateways}.\n"
    )
    print(
        "| engines and policy | reuse | of one engine's | requests, max/mean | work, max/mean | router CPU ms/request |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    with engines(model, 1, kv * options.engines) as (whole,):
        one = {"name": "engine", "url": whole.url, "models": [model.name]}
        with gateway(folder / "whole", [one], "prefix") as server:
            best = measure([server], [whole], options)
    _row("one with all the memory", best, best)
    with engines(model, options.engines, kv) as fleet:
        for name in names:
            with routed(folder, model, fleet, name, options.gateways) as servers:
                _row(f"{options.engines}, {name}", measure(servers, fleet, options), best)
        if sglang is not None:
            with sglang_router(sglang, [engine.url for engine in fleet]) as server:
                _row(f"{options.engines}, sglang-router cache_aware", measure([server], fleet, options), best)
        with routed(folder / "killed", model, fleet, "exact", options.gateways) as servers:
            killed = measure_with_a_death(servers, fleet, options)
    ends = ", ".join(f"{killed.ended(end)} {end}" for end in ("ok", "lost", "broken"))
    quarters = ", ".join(f"{killed.quarter(number):.3f}" for number in range(4))
    print(f"\nOne of {options.engines} killed in the middle: {ends}; reuse by quarter {quarters}.")


def _row(name: str, result: Result, best: Result) -> None:
    reuse, share = result.replay.reuse, result.replay.reuse / best.replay.reuse
    loads = f"{result.requests:.2f} | {result.work:.2f}"
    print(f"| {name} | {reuse:.3f} | {share:.3f} | {loads} | {result.router * 1000:.2f} |", flush=True)


if __name__ == "__main__":
    main()
