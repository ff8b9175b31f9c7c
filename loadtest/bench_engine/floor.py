"""How near a lone stream's decode comes to the memory's speed: no token can come before all weights are read once."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import torch

from loadtest.bench_engine.figures import say, spread
from loadtest.bench_engine.servers import Server, engine

_WEIGHTS = 134_515_008
"""Parameters of the small model; its embedding is also its head."""

_READS = 8


@dataclass
class Round:
    """Seconds, taken in turn: to read the weights' bytes once, and for a token, by the wall and of the processor."""

    read: float
    wall: float
    cpu: float


async def measure(flags: Sequence[str], dtype: str, rounds: int) -> list[Round]:
    """Rounds of reading and decoding by turns."""
    memory, taken = _memory(_WEIGHTS * getattr(torch, dtype).itemsize), list[Round]()
    with engine(*flags, "--speculate", "off") as server:
        async with httpx.AsyncClient(timeout=900) as client:
            await server.decode(client, 1)
            for _ in range(rounds):
                taken.append(await _round(server, client, memory))
                say(f"read {taken[-1].read * 1e3:.1f} ms, token {taken[-1].wall * 1e3:.1f} ms")
    return taken


async def _round(server: Server, client: httpx.AsyncClient, memory: torch.Tensor) -> Round:
    before = _reads(memory)
    wall, cpu = await server.decode(client, 1)
    return Round(statistics.median(before + _reads(memory)), wall, cpu)


def _memory(size: int) -> torch.Tensor:
    """Written memory in pages of 2 MB, in which the engine has its own."""
    pages = mmap.mmap(-1, (size >> 21) + 2 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32)[: size // 4].fill_(1.0)


def _reads(memory: torch.Tensor) -> list[float]:
    """Seconds for sums over it with one thread: nothing that was tried reads faster."""
    threads, seconds = torch.get_num_threads(), list[float]()
    torch.set_num_threads(1)
    for _ in range(_READS):
        began = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return seconds


def show(rounds: list[Round], dtype: str) -> None:
    """Prints a table."""
    size = _WEIGHTS * getattr(torch, dtype).itemsize
    print(f"\nOne stream, {dtype}, {size / 1e6:.0f} MB of weights.\n")
    print("| | ms, median (range) |\n|---|---|")
    print(f"| reading the weights once | {spread([each.read * 1e3 for each in rounds])} |")
    print(f"| a token, wall | {spread([each.wall * 1e3 for each in rounds])} |")
    print(f"| a token, processor | {spread([each.cpu * 1e3 for each in rounds])} |")
    print(f"| wall to reading, in each round | {spread([each.wall / each.read for each in rounds])} |")
    rate = size / statistics.median(each.read for each in rounds) / 1e9
    print(f"\nThe memory gave {rate:.1f} GB/s.")
