"""Real workers under the real supervisor count into one ledger: whoever is asked tells the truth of all, also after one
was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.stub_upstream import StubUpstream, answer
from tests.services import free_port

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}


@asynccontextmanager
async def serving(folder: Path, u: StubUpstream) -> AsyncIterator[str]:
    """``warmgate serve`` with two workers; its address."""
    port = free_port()
    config = {
        "listen": {"port": port, "workers": 2},
        "upstreams": [{"name": "u", "url": u.url, "models": ["m1"]}],
        "cache": {"disk": {"path": str(folder / "cache")}, "holdout": 0},
        "ledger": {"path": str(folder / "ledger.db")},
        "engine": "off",
        "sentinels": "off",
    }
    (folder / "warmgate.yaml").write_bytes(orjson.dumps(config))
    command = [str(Path(sys.executable).with_name("warmgate")), "serve", "--config", str(folder / "warmgate.yaml")]
    process = await asyncio.create_subprocess_exec(*command)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60):
            while not await is_up(url):
                await asyncio.sleep(0.1)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def is_up(url: str) -> bool:
    try:
        return (await ask(url, "GET", "/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def ask(url: str, method: str, path: str, **more: Any) -> httpx.Response:
    """On a connection of its own, so that any worker may answer."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        return await client.request(method, path, **more)


async def traffic(url: str, questions: range, truth: Counter[str]) -> None:
    """Asks everything twice; ``truth`` counts what the answers themselves say."""
    for question in [*questions, *questions]:
        body = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": f"q{question}"}]}
        response = await ask(url, "POST", "/v1/chat/completions", json=body)
        assert response.status_code == 200
        truth["exact" if "hit" in response.headers["cache-status"] else "miss"] += 1


async def metrics(url: str) -> Counter[str]:
    """Requests by outcome, and tokens by kind."""
    told = Counter[str]()
    for family in text_string_to_metric_families((await ask(url, "GET", "/metrics")).text):
        for sample in family.samples:
            if sample.name == "warmgate_requests_total":
                told[sample.labels["outcome"]] += int(sample.value)
            if sample.name == "warmgate_upstream_tokens_total":
                told[sample.labels["kind"]] += int(sample.value)
    return told


async def comes_true(url: str, truth: Counter[str], u: StubUpstream) -> None:
    """Within the seconds in which workers write; then for good, whoever is asked."""
    whole = truth + Counter(cached=40 * u.n, computed=60 * u.n, output=10 * u.n)
    async with asyncio.timeout(30):
        while await metrics(url) != whole:
            await asyncio.sleep(0.2)
    for _ in range(4):
        assert await metrics(url) == whole
        seen = (await ask(url, "GET", "/dashboard/api/overview?range=15m")).json()
        assert {line["outcome"]: line["requests"] for line in seen["outcomes"]} == truth
        assert seen["total"]["provider_cached_tokens"] == 40 * u.n
        assert seen["total"]["saved_tokens"] == 110 * truth["exact"]
        groups = (await ask(url, "GET", "/admin/ledger?by=outcome")).json()["groups"]
        assert {group["outcome"]: group["requests"] for group in groups} == truth


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_all_workers_tell_the_truth_of_all_also_when_one_was_killed(tmp_path: Path) -> None:
    truth = Counter[str]()
    async with StubUpstream(models=("m1",)) as u:
        u.always(answer(usage=USAGE))
        async with serving(tmp_path, u) as url:
            await traffic(url, range(8), truth)
            assert truth["miss"] == u.n == 8
            await comes_true(url, truth, u)
            workers = (await ask(url, "GET", "/admin/status")).json()["workers"]
            assert len(workers) == 2
            killed = int(min(workers).partition("-")[0])
            os.kill(killed, signal.SIGKILL)
            await traffic(url, range(4, 12), truth)  # some of it is known, from the disk or the other's memory
            await comes_true(url, truth, u)
        async with serving(tmp_path, u) as url:  # all of it anew, on the same file
            await traffic(url, range(3), truth)
            await comes_true(url, truth, u)
