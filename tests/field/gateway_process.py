"""A gateway in a process of its own: reads a configuration (JSON) from its standard input, tells its address, and
serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.harness import running_gateway

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def gateway_process(config: Mapping[str, Any], **environment: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client for a gateway in a new process with these environment variables."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.field.gateway_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(config).encode() + b"\n")
        url = (await process.stdout.readline()).decode().strip()
        assert url, "the gateway did not start"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            yield client
    finally:
        process.stdin.close()
        await process.wait()


async def _serve() -> None:
    config = json.loads(sys.stdin.readline())
    async with running_gateway(config) as gateway:
        print(gateway.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve())
