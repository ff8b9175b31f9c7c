"""What a routing decision costs with many upstreams and a large index, and the memory the index takes.

The upstreams are one stub under many names. What they hold is told by KV events, made here; prompts come as token ids,
so that nothing is tokenized. The gateway's own metrics say how long its decisions took.
"""

from __future__ import annotations

import random
import re
import struct
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import orjson
import zmq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from loadtest.bench_http import servers
from loadtest.bench_http.servers import Server, free_port
from loadtest.bench_routing.fleet import gateway
from loadtest.soak import resident

UPSTREAMS, BLOCKS, SIZE, CHAIN = 64, 1_000_000, 16, 125
"""Upstreams; blocks told of in all; tokens in a block; blocks in one prompt (2,000 tokens)."""
BATCHES, BATCH = 40, 40
"""Batches of requests that are measured, and requests in one."""
SHARED = 0.25
"""The share of each prompt's blocks that every upstream holds: a common system prompt."""


@dataclass(frozen=True)
class Overhead:
    """Blocks in the index, bytes of memory each, and microseconds per decision (in the median batch, and in the one
    that the machine disturbed least): prefix policy, round robin.
    """

    blocks: int
    bytes_each: float
    prefix: tuple[float, float]
    round_robin: tuple[float, float]


def measure(folder: Path) -> Overhead:
    """Takes about a minute."""
    folder.mkdir(parents=True)
    tokenizer = folder / "tokenizer.json"
    Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(tokenizer))
    with servers.upstream(None) as stub:
        ports = [free_port() for _ in range(UPSTREAMS)]
        names = [
            {
                "name": f"u{i}",
                "url": f"http://127.0.0.1:{stub.port}",
                "models": ["m1"],
                "tokenizer": str(tokenizer),
                "kv_events": {"bind": f"tcp://127.0.0.1:{port}"},
            }
            for i, port in enumerate(ports)
        ]
        with gateway(folder / "gateway", names, "prefix", probe=0) as server:
            before = resident(server.pids[0])
            with _telling(ports):
                blocks = _until_known(server)
            each = (resident(server.pids[0]) - before) * 2**20 / blocks
            prefix = _decisions(server)
        with gateway(folder / "other", [_silent(one) for one in names], "round_robin", probe=0) as server:
            other = _decisions(server)
    return Overhead(blocks, each, prefix, other)


def show(found: Overhead) -> None:
    """Prints a table."""
    print(f"\n{UPSTREAMS} upstreams, {found.blocks:,} blocks in the index, prompts of {CHAIN * SIZE:,} tokens.\n")
    print("| decision, prefix policy | decision, round robin | memory per million blocks |\n|---|---|---|")
    memory = found.bytes_each * 1e6 / 2**20
    shown = (f"{median:.0f} µs (at best {best:.0f})" for median, best in (found.prefix, found.round_robin))
    print(f"| {' | '.join(shown)} | {memory:.0f} MiB |", flush=True)


def prompt(number: int) -> list[int]:
    """The tokens of a prompt; those with the same number are the same, and all begin alike."""
    common = int(CHAIN * SHARED) * SIZE
    rng = random.Random(number)
    return [*range(common), *(rng.randrange(100_000) for _ in range(CHAIN * SIZE - common))]


def _prompts() -> int:
    """So many make `BLOCKS` different blocks; a multiple of `UPSTREAMS`."""
    return BLOCKS // (CHAIN - int(CHAIN * SHARED)) // UPSTREAMS * UPSTREAMS


@contextmanager
def _telling(ports: list[int]) -> Iterator[None]:
    """Tells, for each upstream, of its share of all blocks: whole prompts, each of another number."""
    context, pack = zmq.Context(), msgpack.Packer().pack
    sockets = [context.socket(zmq.PUB) for _ in ports]
    for socket, port in zip(sockets, ports, strict=True):
        socket.set(zmq.SNDHWM, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
    time.sleep(1.0)  # nobody says when a subscriber is there
    per_upstream = _prompts() // len(ports)
    for at, socket in enumerate(sockets):
        for number in range(per_upstream):
            event = _stored(at * per_upstream + number)
            batch = pack({"ts": time.time(), "events": [event], "data_parallel_rank": 0})
            socket.send_multipart([b"kv-events", struct.pack(">q", number), batch])
    try:
        yield
    finally:
        context.destroy()


def _stored(number: int) -> dict[str, Any]:
    names = [number * CHAIN + i for i in range(CHAIN)]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": prompt(number),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
    }


def _until_known(server: Server) -> int:
    """Waits until no more blocks come in; how many the index holds."""
    known = -1
    while (now := int(_metric(server, "warmgate_route_index_blocks"))) != known or not known:
        known = now
        time.sleep(3.0)
    return known


def _decisions(server: Server) -> tuple[float, float]:
    """Microseconds per decision over requests whose prompts one upstream holds: the median batch's, and the least."""
    rng = random.Random(5)
    took = sorted(_batch(server, rng) for _ in range(BATCHES))
    return took[BATCHES // 2], took[0]


def _batch(server: Server, rng: random.Random) -> float:
    spent, made = _metric(server, "warmgate_route_seconds_total"), _metric(server, "warmgate_route_decisions_total")
    for _ in range(BATCH):
        ask = {"model": "m1", "temperature": 1, "prompt": [*prompt(rng.randrange(_prompts())), 1]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/completions",
            orjson.dumps(ask),
            {"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()
    spent = _metric(server, "warmgate_route_seconds_total") - spent
    return spent * 1e6 / (_metric(server, "warmgate_route_decisions_total") - made)


def _metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as page:
        found = re.findall(rf"^{name}(?:{{[^\n]*}})? (\S+)$", page.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def _silent(upstream: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in upstream.items() if name not in ("kv_events", "tokenizer")}
