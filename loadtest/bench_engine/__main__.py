"""`make bench-engine`: what a prefix hit saves on each tier, and how fast the engine prefills and decodes.

Drives servers over HTTP only. The cases are interleaved, round by round, and given as median and spread. Beside the
wall clock it takes the server's processor time, which is what holds on a busy machine. The text printed is Markdown,
for `docs/benchmarks/engine.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os

from loadtest.bench_engine import chat, drafts, floor, rates, tiers
from loadtest.bench_engine.servers import Server, engine, lmcache, redis, started

PARTS = ("tiers", "rates", "floor", "chat", "drafts")


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="prompt lengths, multiples of 128")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--turns", type=int, default=8, help="of each of the 20 conversations")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--remote", help="a remote tier to use instead of servers of our own, e.g. redis://…")
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a running server to measure beside the engine",
    )
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}")
    parts = options.parts or PARTS
    flags = ["--dtype", options.dtype, "--threads", str(options.threads)]

    print(f"\nLoad of the machine before the first run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")
    with redis() if options.remote is None else contextlib.nullcontext(options.remote) as remote:
        if "tiers" in parts:
            with lmcache() if options.remote is None else contextlib.nullcontext() as other:
                remotes = [url for url in (remote, other) if url]
                tiers.show(asyncio.run(tiers.measure(flags, remotes, options.rounds, options.lengths)))
        if "chat" in parts:
            chat.show(asyncio.run(chat.measure(flags, options.dtype, remote, turns=options.turns)))
    if "drafts" in parts:
        drafts.show(asyncio.run(drafts.measure(flags, options.rounds)))
    if "floor" in parts:
        floor.show(asyncio.run(floor.measure(flags, options.dtype, options.rounds)), options.dtype)
    if "rates" in parts:
        with (
            engine(*flags, "--speculate", "off") as plain,
            engine(*flags, "--speculate", "off", "--int8-decode") as int8,
            started("loadtest.bench_engine.baseline", *flags) as other,
        ):
            servers = {"engine": plain, "engine, int8 decode": int8, "transformers": other}
            for name, _, url in (beside.partition("=") for beside in options.beside):
                servers[name] = Server.running(url)
            rates.show(asyncio.run(rates.measure(servers, options.rounds, options.lengths, options.batches)))
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
