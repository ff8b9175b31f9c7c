"""Load by wrk, and what it cost the server."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench_http.servers import Server

_SCRIPT = """
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer bench"
wrk.body = io.open("{body}", "rb"):read("*a")
{more}
"""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Measured:
    """One run: requests per second, server CPU microseconds per request, latency quantiles in microseconds."""

    rate: float
    cpu: float
    p50: float
    p99: float


def prompt_body(size: int, **fields: object) -> bytes:
    """A chat request whose body is about ``size`` bytes."""
    empty = {"model": "m1", **fields, "messages": [{"role": "user", "content": ""}]}
    words = "Tell me about caches. " * (size // 22 + 1)
    message = {"role": "user", "content": words[: max(1, size - len(json.dumps(empty)))]}
    return json.dumps({**empty, "messages": [message]}, separators=(",", ":")).encode()


def measure(server: Server, body: bytes, connections: int, seconds: int, folder: Path, cpu: str | None) -> Measured:
    """Drives a server for some seconds; raises SystemExit when it answers anything but 2xx."""
    payload, script = folder / "body.json", folder / "post.lua"
    payload.write_bytes(body)
    more = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in server.headers)
    script.write_text(_SCRIPT.format(body=payload, more=more))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "--latency", "-s", str(script)]
    command.append(f"http://127.0.0.1:{server.port}/")
    if cpu is not None:
        command = ["taskset", "-c", cpu, *command]
    before = server.cpu_seconds()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spent = server.cpu_seconds() - before
    if "Non-2xx" in said or "Socket errors" in said:
        raise SystemExit(f"the server on port {server.port} failed:\n{said}")
    requests = int(_found(r"(\d+) requests in", said))
    if not requests:
        raise SystemExit(f"the server on port {server.port} answered nothing within {seconds} s")
    return Measured(
        rate=float(_found(r"Requests/sec:\s+([\d.]+)", said)),
        cpu=spent / requests * 1e6,
        p50=_latency("50%", said),
        p99=_latency("99%", said),
    )


def _latency(quantile: str, said: str) -> float:
    text = _found(rf"{re.escape(quantile)}\s+([\d.]+(?:us|ms|s))", said)
    unit = "us" if text.endswith("us") else "ms" if text.endswith("ms") else "s"
    return float(text.removesuffix(unit)) * _UNITS[unit] * 1e6


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"wrk said nothing like {pattern}:\n{text}")
    return match[1]
