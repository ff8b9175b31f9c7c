"""A gateway under many users for minutes, all on this machine: no wrong answer, no unexplained error, flat memory.

    python -m loadtest.soak [--minutes 10] [--users 40]

It starts a stub upstream whose every answer is the digest of its question, a gateway with two tenants and a small
memory tier (so that entries come and go), and locust; it prints locust's report, and the gateway's memory and open
files over time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from loadtest.bench_http.servers import family, free_port

KEYS = {"LOAD_KEY_A": "soak-a", "LOAD_KEY_B": "soak-b"}
SAMPLES = 12


def main() -> int:
    """See the module; the exit status is locust's, which is not 0 when any request failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stub = free_port()
        command = [sys.executable, "-m", "loadtest.stub_upstream", "--port", str(stub), "--model", "m1", "--digest"]
        stack.enter_context(running(command, stub, "/health"))
        port = free_port()
        config = _configuration(Path(folder), port, stub)
        command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--no-engine"]
        gateway = stack.enter_context(running(command, port, "/readyz"))
        return _drive(port, options.users, options.minutes * 60, gateway.pid)


def _drive(port: int, users: int, seconds: float, supervisor: int) -> int:
    command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).parent / "locustfile.py"), "--headless"]
    command += ["--only-summary", "--users", str(users), "--spawn-rate", "20", "--run-time", f"{int(seconds)}s"]
    command += ["--host", f"http://127.0.0.1:{port}"]
    environment = {**os.environ, "LOAD_DIGEST": "1", "LOAD_KEYS": ",".join(KEYS.values())}
    locust = subprocess.Popen(command, env=environment)
    print("| second | gateway MiB | open files |\n|---|---|---|", flush=True)
    began = time.monotonic()
    while locust.poll() is None:
        worker = family(supervisor)[1]
        print(f"| {time.monotonic() - began:.0f} | {resident(worker):.0f} | {open_files(worker)} |", flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            locust.wait(seconds / SAMPLES)
    return locust.returncode


def _configuration(folder: Path, port: int, stub: int) -> Path:
    tenants = [{"name": key[-1].lower(), "keys": [f"env:{key}"]} for key in KEYS]
    config = {
        "listen": {"port": port},
        "upstreams": [{"name": "stub", "url": f"http://127.0.0.1:{stub}"}],
        "tenants": tenants,
        "cache": {"ttl": "5s", "memory": {"max_bytes": "8MiB"}, "disk": {"path": str(folder / "cache")}},
        "ledger": {"path": str(folder / "ledger.db")},
    }
    path = folder / "warmgate.yaml"
    path.write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def running(command: list[str], port: int, probe: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves on ``port``, from when it answers ``probe`` until the block ends."""
    process = subprocess.Popen(command, env={**os.environ, **KEYS}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{probe}", timeout=2).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command} did not start") from None
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def resident(pid: int) -> float:
    """MiB of memory of its own; pages of the disk cache, which it maps, are the kernel's to take back."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def open_files(pid: int) -> int:
    """How many files and sockets a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


if __name__ == "__main__":
    raise SystemExit(main())
