"""A gateway of two workers while everything around it fails, with real processes: what it serves must stay right.

    python -m loadtest.chaos [--requests 10000]

Every answer must be the digest of its question. While Redis is frozen, killed, full, read-only, flushed or restarted,
no request may fail; while the upstream dies at every point of its streams, a request may fail only as the upstream did,
and must say so; callers who leave at random must leave nothing behind. Prints a table; the exit status is 1 if anything
was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import redis
import uvloop

from loadtest.bench_http.servers import family, free_port
from loadtest.digest import digest_of
from loadtest.soak import open_files, resident, running
from loadtest.stub_upstream import Call, Reply, StubUpstream, answer, error

CONCURRENT = 32
QUESTIONS = 150
"""Few enough that most requests are repeats."""


@dataclass
class Phase:
    """What happened in one phase."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def wrong(self) -> int:
        return self.outcomes["wrong"] + self.outcomes["unexplained error"]


class Redis:
    """A redis-server that can be hurt."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--maxmemory", "64mb", "--maxmemory-policy", "noeviction"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while True:
            with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                if self.client().ping():
                    return
            time.sleep(0.05)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Chaos:
    """The phases, over one gateway."""

    def __init__(self, upstream: StubUpstream, store: Redis, port: int, requests: int) -> None:
        self._upstream = upstream
        self._redis = store
        self._port = port
        self._requests = requests
        self._rng = random.Random(7)
        self.phases: list[Phase] = []

    async def run(self) -> None:
        """All phases, each with its share of the requests."""
        store = self._redis
        await self._phase("all is well", self._ask)
        store.signal(signal.SIGSTOP)
        await self._phase("Redis frozen", self._ask)
        store.signal(signal.SIGCONT)
        await self._phase("Redis thawed", self._ask)
        store.kill()
        await self._phase("Redis killed", self._ask)
        store.start()
        await self._phase("Redis restarted", self._ask)
        store.client().config_set("maxmemory", "1")
        await self._phase("Redis full", self._ask)
        store.client().config_set("maxmemory", "64mb")
        store.client().replicaof("127.0.0.1", str(free_port()))
        await self._phase("Redis read-only", self._ask)
        store.client().replicaof("NO", "ONE")
        store.client().flushall()
        await self._phase("Redis flushed", self._ask)
        self._upstream.always(self._dying)
        await self._phase("upstream dying", self._ask_of_the_dying)
        self._upstream.always(_digest)
        await self._phase("callers leaving", self._leave)
        await self._phase("all is well again", self._ask)

    async def _phase(self, name: str, act: Callable[[Phase], Awaitable[None]]) -> None:
        phase, began = Phase(name), time.monotonic()
        gate = asyncio.Semaphore(CONCURRENT)

        async def one() -> None:
            async with gate:
                await act(phase)

        await asyncio.gather(*(one() for _ in range(self._requests // 11)))
        phase.seconds = time.monotonic() - began
        self.phases.append(phase)
        print(f"| {name} | {phase.seconds:.1f} | {_shown(phase.outcomes)} |", flush=True)

    def _body(self, fresh: float) -> dict[str, object]:
        """A question; ``fresh`` is the share of those never asked before."""
        number = self._rng.getrandbits(60) if self._rng.random() < fresh else self._rng.randrange(QUESTIONS)
        messages = [{"role": "user", "content": f"question {number} " + "word " * (number % 40)}]
        return {"model": "m1", "temperature": 0, "messages": messages, "stream": self._rng.random() < 0.5}

    async def _ask(self, phase: Phase) -> None:
        body = self._body(fresh=0.2)
        status, text = await self._send(body)
        phase.outcomes[_judged(status, text, body, excused=False)] += 1

    async def _ask_of_the_dying(self, phase: Phase) -> None:
        body = self._body(fresh=0.8)
        status, text = await self._send(body)
        phase.outcomes[_judged(status, text, body, excused=True)] += 1

    async def _leave(self, phase: Phase) -> None:
        """Sends a request, or a part of one, reads a little, and leaves."""
        request = _request(self._body(fresh=0.7))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request[: self._rng.choice([len(request), len(request), self._rng.randrange(1, len(request))])])
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(self._rng.random() * 0.03):
                await reader.read(self._rng.randrange(1, 600))
        writer.transport.abort()
        phase.outcomes["left"] += 1

    async def _send(self, body: dict[str, object]) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(_request(body))
            async with asyncio.timeout(30):
                said = await reader.read(-1)
        finally:
            writer.close()
        head, _, rest = said.partition(b"\r\n\r\n")
        status = int(head[9:12]) if head else 0
        return status, _unchunked(rest) if b"transfer-encoding: chunked" in head else rest

    def _dying(self, call: Call) -> Reply:
        draw = self._rng.random()
        if draw < 0.3:
            return _digest(call)
        if draw < 0.5:
            return error(self._rng.choice([429, 500, 503]))
        return _digest(call).cut(after=self._rng.randrange(0, 9), then="close" if draw < 0.75 else "reset")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    return uvloop.run(_run(options.requests))


async def _run(requests: int) -> int:
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        async with StubUpstream() as upstream:
            upstream.always(_digest)
            store = Redis(folder)
            stack.callback(store.kill)
            port, gateway = await asyncio.to_thread(stack.enter_context, _gateway(folder, upstream.url, store.port))
            workers = family(gateway.pid)[1:]
            chaos = Chaos(upstream, store, port, requests)
            print("| phase | seconds | answers |\n|---|---|---|", flush=True)
            before = [(resident(pid), open_files(pid)) for pid in workers]
            await chaos.run()
            await asyncio.sleep(3)
            after = [(resident(pid), open_files(pid)) for pid in workers]
            same = workers == family(gateway.pid)[1:]
            calls = upstream.running
    print(
        f"\nworkers (MiB, open files) before {before}, after {after}; the same processes: {same}; calls left: {calls}"
    )
    wrong = sum(phase.wrong for phase in chaos.phases)
    leaked = calls or not same or any(late[1] > early[1] + 50 for early, late in zip(before, after, strict=True))
    return 1 if wrong or leaked else 0


@contextlib.contextmanager
def _gateway(folder: Path, upstream: str, redis_port: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    config = {
        "listen": {"port": port, "workers": 2},
        "upstreams": [{"name": "stub", "url": upstream}],
        "cache": {"ttl": "2s", "redis": {"url": f"redis://127.0.0.1:{redis_port}/0"}, "memory": {"max_bytes": "4MiB"}},
        "ledger": {"path": str(folder / "ledger.db")},
    }
    path = folder / "warmgate.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(path), "--no-engine"]
    with running(command, port, "/readyz") as process:
        yield port, process


def _digest(call: Call) -> Reply:
    return answer(digest_of(call.json["messages"]))


def _judged(status: int, text: bytes, body: dict[str, object], *, excused: bool) -> str:
    """``excused``: the upstream may have failed, and then the gateway must say that it has."""
    messages: list[dict[str, object]] = body["messages"]  # type: ignore[assignment]
    if status == 200:
        said, ended, failed = _said(text, streamed=body["stream"] is True)
        if ended:
            return "right" if said == digest_of(messages) else "wrong"
        return "error event" if failed and excused else "unexplained error"
    return f"status {status}" if excused and status in (429, 500, 502, 503) else "unexplained error"


def _said(text: bytes, *, streamed: bool) -> tuple[str, bool, bool]:
    """The text, whether it ended as it should, and whether it says that it failed."""
    if not streamed:
        choice = json.loads(text)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"] == "stop", False
    lines = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    said = "".join(choice["delta"].get("content") or "" for choice in choices)
    return said, lines[-1:] == [b"[DONE]"], any("error" in event for event in events)


def _request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return (head + f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n").encode() + data


def _unchunked(data: bytes) -> bytes:
    parts: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16) if size else 0
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)


def _shown(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in outcomes.most_common())


if __name__ == "__main__":
    raise SystemExit(main())
