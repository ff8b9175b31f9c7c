"""Engines and the routers in front of them: processes on free loopback ports, ended by their ids."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.bench_http.servers import Server, family, free_port, process

BLOCK = 32
"""Tokens in one KV block."""
_COUNTER = re.compile(r"^(\S+?)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class EngineProcess:
    """An embedded engine that can be killed and brought back at the same addresses, empty. ``kv``: its pool's bytes."""

    def __init__(self, model: Path, kv: int) -> None:
        self.port, self.live, self.replay = free_port(), free_port(), free_port()
        options = {
            "--model": str(model),
            "--port": self.port,
            "--kv-cache": kv,
            "--block-size": BLOCK,
            "--prefill-chunk": BLOCK,
            "--threads": 1,
            "--kv-events": f"tcp://*:{self.live}",  # bound, so that any number of gateways can listen
            "--kv-events-replay": f"tcp://127.0.0.1:{self.replay}",
            "--log-level": "error",
        }
        self._command = [sys.executable, "-m", "engine", *(str(item) for pair in options.items() for item in pair)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begins to start; `wait` until it serves."""
        self._process = subprocess.Popen(self._command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def wait(self, patience: float = 120.0) -> None:
        """Until it serves; raises SystemExit when it does not."""
        assert self._process is not None
        deadline = time.monotonic() + patience
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.1)
        raise SystemExit(f"{self._command} did not start")

    def kill(self) -> None:
        """At once (-9), with all it holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """It holds nothing any more."""
        urllib.request.urlopen(f"{self.url}/reset_prefix_cache", data=b"", timeout=30).close()

    def counters(self) -> dict[str, float]:
        """Its counters, summed over labels, without ``_total``."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            found: dict[str, float] = {}
            for name, value in _COUNTER.findall(page.read().decode()):
                found[name] = found.get(name, 0.0) + float(value)
            return found


@contextlib.contextmanager
def engines(model: Path, count: int, kv: int) -> Iterator[list[EngineProcess]]:
    """So many that run, each with a pool of ``kv`` bytes."""
    made = [EngineProcess(model, kv) for _ in range(count)]
    try:
        for engine in made:
            engine.start()
        for engine in made:
            engine.wait()
        yield made
    finally:
        for engine in made:
            engine.kill()


@contextlib.contextmanager
def gateway(
    folder: Path, upstreams: list[dict[str, Any]], policy: str, patience: float = 60.0, **more: Any
) -> Iterator[Server]:
    """One gateway worker that keeps no answers, so that every request is routed."""
    port = free_port()
    folder.mkdir(parents=True)
    config = {
        "listen": {"port": port},
        "upstreams": upstreams,
        "routing": {"policy": policy, "probe": "1s", **more},
        "cache": {"memory": "off", "disk": "off"},
        "ledger": {"path": str(folder / "ledger.db")},
    }
    path = folder / "warmgate.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(path), "--no-engine"]
    with process(command, port, "/readyz", None, patience) as running:
        yield Server(port, tuple(pid for pid in family(running.pid) if pid != running.pid))


def upstream(engine: EngineProcess, name: str, model: Path, *, tells: bool) -> dict[str, Any]:
    """The configuration of an engine as an upstream; ``tells``: its KV events are heard."""
    told = {
        "kv_events": {"connect": f"tcp://127.0.0.1:{engine.live}", "replay": f"tcp://127.0.0.1:{engine.replay}"},
        "tokenizer": str(model),
    }
    return {"name": name, "url": engine.url, "models": [model.name], **(told if tells else {})}


@contextlib.contextmanager
def sglang_router(venv: Path, urls: list[str]) -> Iterator[Server]:
    """SGLang's router in its cache-aware mode, which learns from what it sent where."""
    port = free_port()
    command = [str(venv / "bin" / "sglang-router"), "launch", "--worker-urls", *urls]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", "error"]
    with process(command, port, "/v1/models", None, patience=90) as running:
        yield Server(port, tuple(family(running.pid)))
