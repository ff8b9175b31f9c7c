"""Other gateways to be compared with, each from an environment of its own.

python -m venv peers && peers/bin/pip install 'litellm[proxy]' sglang-router
python -m loadtest.bench_http --against litellm --venv peers --only hit,plain,stream
npm install --prefix portkey @portkey-ai/gateway
python -m loadtest.bench_http --against portkey --venv portkey --only plain,stream
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from loadtest.bench_http.servers import Server, family, free_port, process

Peer = Callable[[Path, Path, int, str | None], AbstractContextManager[Server]]
"""Starts one from its environment: where that is, a folder to use, the upstream's port, the CPU to be pinned to."""


@contextlib.contextmanager
def litellm(venv: Path, folder: Path, upstream_port: int, cpu: str | None) -> Iterator[Server]:
    """LiteLLM's proxy, one worker, with its in-memory response cache on."""
    port = free_port()
    folder.mkdir()
    parameters = {"model": "openai/m1", "api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "m1", "litellm_params": parameters}],
        "litellm_settings": {"cache": True, "cache_params": {"type": "local"}},
        "general_settings": {"master_key": "bench", "dangerously_permit_weak_or_unset_master_key": True},
    }
    path = folder / "litellm.yaml"
    path.write_text(json.dumps(config))
    command = [str(venv / "bin" / "litellm"), "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    with process(command, port, "/health/liveliness", cpu, patience=120) as running:
        yield Server(port, tuple(family(running.pid)))


@contextlib.contextmanager
def sglang_router(venv: Path, folder: Path, upstream_port: int, cpu: str | None) -> Iterator[Server]:
    """SGLang's router, which has no response cache, in its cheapest policy."""
    port = free_port()
    command = [str(venv / "bin" / "sglang-router"), "launch", "--worker-urls", f"http://127.0.0.1:{upstream_port}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    with process(command, port, "/v1/models", cpu, patience=60) as running:
        yield Server(port, tuple(family(running.pid)))


@contextlib.contextmanager
def portkey(prefix: Path, folder: Path, upstream_port: int, cpu: str | None) -> Iterator[Server]:
    """Portkey's gateway on Node.js; its response cache is not part of what is open."""
    port = free_port()
    start = prefix / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    address = f"http://127.0.0.1:{upstream_port}/v1"
    with process(["node", str(start), "--headless", f"--port={port}"], port, "/", cpu, patience=60) as running:
        headers = (("x-portkey-provider", "openai"), ("x-portkey-custom-host", address))
        yield Server(port, tuple(family(running.pid)), headers)


PEERS: dict[str, Peer] = {"litellm": litellm, "sglang-router": sglang_router, "portkey": portkey}
