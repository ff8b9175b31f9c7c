"""The servers that are compared, and the upstream behind them, each a process of its own on a free loopback port."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CACHE_ZONE = "proxy_cache_path {folder}/cache keys_zone=kept:64m max_size=1g inactive=1d use_temp_path=off;"
_NGINX = """
user {user}; daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log crit;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 1000000000; client_body_buffer_size 4m; client_max_body_size 16m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {zone}
  upstream backend {{ server 127.0.0.1:{upstream}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; {cache}
    }}
  }}
}}
"""
_CACHED = (
    'proxy_cache kept; proxy_cache_methods POST; proxy_cache_key "$request_uri|$request_body"; proxy_cache_valid 1h;'
)
_PASSED = "proxy_buffering off;"


@dataclass(frozen=True)
class Server:
    """A running server: where it listens, the processes whose CPU time it costs, and headers that it needs."""

    port: int
    pids: tuple[int, ...]
    headers: tuple[tuple[str, str], ...] = ()

    def cpu_seconds(self) -> float:
        """User and system time of its processes so far."""
        return sum(_cpu_seconds(pid) for pid in self.pids)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def upstream(cpu: str | None) -> Iterator[Server]:
    """The stand-in for an engine: answers at once, or streams 16 events a millisecond apart."""
    port = free_port()
    with process([sys.executable, "-m", "loadtest.bench_http.upstream", str(port)], port, "/v1/models", cpu) as running:
        yield Server(port, (running.pid,))


@contextlib.contextmanager
def nginx(folder: Path, upstream_port: int, cpu: str | None, *, cached: bool) -> Iterator[Server]:
    """One nginx worker, as a cache or as a plain proxy."""
    port = free_port()
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(
        _NGINX.format(
            user=getpass.getuser(),
            folder=folder,
            upstream=upstream_port,
            port=port,
            zone=_CACHE_ZONE.format(folder=folder) if cached else "",
            cache=_CACHED if cached else _PASSED,
        )
    )
    with process(["nginx", "-p", str(folder), "-c", str(config)], port, "/v1/models", cpu) as running:
        yield Server(port, tuple(pid for pid in family(running.pid) if b"worker process" in _command(pid)))


@contextlib.contextmanager
def gateway(folder: Path, upstream_port: int, cpu: str | None, **cache: object) -> Iterator[Server]:
    """One gateway worker with a key, limits and every counter on; without a hold-out, since a hit that is held out is
    a miss.
    """
    port = free_port()
    folder.mkdir()
    config = {
        "listen": {"port": port, "workers": 1},
        "upstreams": [{"name": "u", "url": f"http://127.0.0.1:{upstream_port}"}],
        "tenants": [
            {"name": "t", "keys": ["env:BENCH_KEY"], "limits": {"requests_per_minute": 10**9, "concurrent": 10**6}}
        ],
        "cache": {"disk": "off", "holdout": 0, **cache},
        "ledger": {"path": str(folder / "ledger.db")},
    }
    path = folder / "warmgate.yaml"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(path), "--no-engine"]
    with process(command, port, "/readyz", cpu) as running:
        yield Server(port, tuple(pid for pid in family(running.pid) if pid != running.pid))


@contextlib.contextmanager
def redis(folder: Path, cpu: str | None) -> Iterator[str]:
    """A redis-server on a Unix socket; gives its URL."""
    folder.mkdir()
    path = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(_pinned(command, cpu), stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            time.sleep(0.02)
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def process(
    command: list[str], port: int, probe: str, cpu: str | None, patience: float = 30
) -> Iterator[subprocess.Popen[bytes]]:
    """A server process from when it answers ``probe``; ``patience``: seconds that it may take to start."""
    environment = {**os.environ, "BENCH_KEY": "bench"}
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would stop a talkative server in the end
        running = subprocess.Popen(_pinned(command, cpu), env=environment, stdout=subprocess.DEVNULL, stderr=said)
        try:
            _wait(running, f"http://127.0.0.1:{port}{probe}", said, patience)
            yield running
        finally:
            running.terminate()
            running.wait()


def _pinned(command: list[str], cpu: str | None) -> list[str]:
    return ["taskset", "-c", cpu, *command] if cpu is not None else command


def _wait(process: subprocess.Popen[bytes], url: str, said: IO[bytes], patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                said.seek(0)
                raise SystemExit(f"{process.args} did not start: {said.read().decode()[-800:]}") from None
            time.sleep(0.05)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _cpu_seconds(pid: int) -> float:
    """Of all threads, as the scheduler accounts for them, in nanoseconds; clock ticks would be too coarse."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
