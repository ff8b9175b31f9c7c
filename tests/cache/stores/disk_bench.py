"""What the tests of the disk store share: an open store, and other processes that use the same one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from cache.stores.disk import DiskStore

MIB = 1 << 20
KEY, OTHER = b"k" * 16, b"o" * 16

PRELUDE = """
import asyncio, os, pathlib, sys, time
from cache.stores.disk import DiskStore
from cache.stores.table import Table, Write
"""


@asynccontextmanager
async def opened(
    path: Path, max_bytes: int = 16 * MIB, clock: Callable[[], float] = time.time
) -> AsyncIterator[DiskStore]:
    store = DiskStore(path, max_bytes, clock)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def data(path: Path) -> Path:
    return path / "entries" / "data.mdb"


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that runs `script` with the stores imported."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What the process printed, once it ended well."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output
