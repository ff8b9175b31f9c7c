"""The real servers, each a process group of its own, started with what `make test-real` installed: two vLLMs, one
LMCache server with Redis below it, and the gateway before them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.services import free_port

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "real" / "bin" / "python"
MODEL = ROOT / ".venv" / "real-model"
NAME = "smollm2"
BLOCK, CHUNK = 32, 64
"""Tokens in one block of vLLM, and in one chunk of LMCache."""
READY = 600.0
"""Seconds that a server may take to start."""


class Process:
    """A server: `start` it, wait until it is `ready`, and `stop` it with all its children."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, **environment: str) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def ready(self, url: str) -> None:
        """Waits until it answers there."""
        assert self._process is not None
        deadline = time.monotonic() + READY
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.5)
        said = self.log.read_text(errors="replace")[-3000:]
        pytest.fail(f"{self.name} did not start ({self.log}):\n{said}", pytrace=False)

    def stop(self) -> None:
        """Ends it, and what it started."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None

    @property
    def memory(self) -> int:
        """Bytes that it and its children hold alone or share among few (proportional set size)."""
        assert self._process is not None
        parent = psutil.Process(self._process.pid)
        return sum(one.memory_full_info().pss for one in (parent, *parent.children(recursive=True)))


class LMCache(Process):
    """`lmcache server` over a Redis."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        super().__init__("lmcache", folder)
        self.port, self._http, self._redis = free_port(), free_port(), redis_port

    def launch(self) -> None:
        below = {"type": "resp", "host": "127.0.0.1", "port": self._redis, "num_workers": 2}
        self.start(
            *(str(PYTHON.with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--chunk-size", str(CHUNK), "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--shm-name", f"wg-{self.port}"),
            *("--l2-adapter", json.dumps(below), "--http-host", "127.0.0.1", "--http-port", str(self._http)),
            LMCACHE_TRACK_USAGE="false",
        )

    def wait(self) -> None:
        self.ready(f"http://127.0.0.1:{self._http}/healthcheck")


class Vllm(Process):
    """A vLLM server that shares KV through LMCache, hands prompts over by NIXL, and tells what it holds."""

    def __init__(self, name: str, folder: Path, lmcache: LMCache) -> None:
        super().__init__(name, folder)
        self.port, self._side, self._lmcache = free_port(), free_port(), lmcache
        self._events, self._replay = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://127.0.0.1:{self._events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self._replay}",
        }
        handing = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        lmcache = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._lmcache.port}
        sharing = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": lmcache}
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [handing, sharing]},
        }
        self.start(
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--model", str(MODEL), "--served-model-name", NAME, "--max-model-len", "2048", "--max-num-seqs", "8"),
            *("--enforce-eager", "--block-size", str(BLOCK), "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events), "--kv-transfer-config", json.dumps(both)),
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_SERVER_DEV_MODE="1",
            OMP_NUM_THREADS="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
            VLLM_NIXL_SIDE_CHANNEL_PORT=str(self._side),
            LMCACHE_TRACK_USAGE="false",
        )

    def wait(self) -> None:
        self.ready(f"{self.url}/v1/models")

    def upstream(self, role: str) -> dict[str, Any]:
        """Its place in a gateway's configuration."""
        told = {"bind": f"tcp://127.0.0.1:{self._events}", "replay": f"tcp://127.0.0.1:{self._replay}"}
        return {
            "name": self.name,
            "url": self.url,
            "role": role,
            "cache_salt": True,
            "kv_events": {**told, "block_size": BLOCK},
            "tokenizer": str(MODEL),
        }

    def forget(self) -> None:
        """It drops the blocks in its own memory, and says so with its next step; LMCache keeps its copies."""
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            client.post("/reset_prefix_cache").raise_for_status()
            step = {"model": NAME, "prompt": "Too short for a block.", "max_tokens": 1}
            client.post("/v1/completions", json=step).raise_for_status()

    def counter(self, name: str, **labels: str) -> float:
        """The sum of a counter's samples with these labels."""
        return counter(httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text, name, labels)


class Gateway(Process):
    """`warmgate serve` with two workers, in front of the vLLMs."""

    def __init__(self, folder: Path) -> None:
        super().__init__("gateway", folder)
        self._folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def launch(self, config: Mapping[str, Any], **environment: str) -> None:
        own = {
            "listen": {"host": "127.0.0.1", "port": self.port, "workers": 2},
            "secret": "env:WARMGATE_SECRET",
            "ledger": {"path": str(self._folder / "ledger.db")},
        }
        file = self._folder / "warmgate.yaml"
        file.write_text(yaml.safe_dump({**own, **config}))
        self.start(str(Path(sys.executable).with_name("warmgate")), "serve", "--config", str(file), **environment)

    def wait(self) -> None:
        self.ready(f"{self.url}/readyz")


def counter(page: str, name: str, labels: Mapping[str, str]) -> float:
    """The sum of a counter's samples with these labels on a page of metrics."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(one in line for one in wanted))
