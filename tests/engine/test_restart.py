"""Restart proof, with the real model: kill -9, start again, and the prompt comes back from Redis or from LMCache."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cache.prefix.helpers import RedisServer
from tests.cache.prefix.lmcache_server import installed, lmcache_server
from tests.engine.test_process import free_port
from tests.waiting import wait_until

MODEL = "smollm2-135m-instruct"
FULL = 4096
"""Tokens in whole blocks, of 32 each."""
BLOCKS = FULL // 32
PROMPT = [1000 + (i * 7919) % 30000 for i in range(FULL + 4)]
BLOCK_BYTES = 32 * 23_040
"""Of the bundled model in bfloat16."""


@contextlib.contextmanager
def engine(*options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [sys.executable, "-m", "engine", "--port", str(port), "--threads", "1", "--kv-cache", "256MiB", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_until(ready, patience=90)
        yield url, process
    finally:
        process.kill()
        process.wait()


def ask(url: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_engine_starts_warm_from_redis(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    options = ("--dtype", "bfloat16", "--kv-host", "128MiB", "--kv-remote", redis.url, "--write-through-uses", "1")
    try:
        with engine(*options) as (url, process):
            cold = ask(url)
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            wait_until(lambda: len(redis.block_keys()) == BLOCKS, patience=30)
            process.kill()
        with engine(*options) as (url, _):
            warm = ask(url)
            assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": FULL, "cached_by_tier": {"redis": FULL}}
            assert warm["choices"] == cold["choices"]
            again = ask(url)
            assert again["usage"]["prompt_tokens_details"]["cached_by_tier"] == {"device": FULL}
            assert again["choices"] == cold["choices"]
    finally:
        redis.kill()


@installed
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine_and_lmcache_killed_start_warm_from_its_second_level(tmp_path: Path) -> None:
    with lmcache_server(tmp_path, block_size=32) as server:
        options = ("--dtype", "bfloat16", "--kv-remote", server.url, "--write-through-uses", "1")
        with engine(*options) as (url, process):
            cold = ask(url)
            wait_until(lambda: tier_blocks(url, "lmcache", "stored") == BLOCKS, patience=60)
            wait_until(lambda: server.second_level_keys() >= BLOCKS, patience=60)
            process.kill()
        server.kill()
        server.start()
        before = server.second_level_read()
        with engine(*options) as (url, _):
            warm = ask(url)
            cached = {"cached_tokens": FULL, "cached_by_tier": {"lmcache": FULL}}
            assert warm["usage"]["prompt_tokens_details"] == cached
            assert warm["choices"] == cold["choices"]
        assert server.second_level_read() - before >= BLOCKS * BLOCK_BYTES


def tier_blocks(url: str, tier: str, event: str) -> float:
    """What the engine's metrics count for one tier."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    wanted = [line for line in lines if f'tier="{tier}"' in line and f'event="{event}"' in line]
    return float(wanted[0].split()[-1]) if wanted else 0.0
