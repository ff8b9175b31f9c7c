"""One stack for all tests of the real servers, and at the end what it took."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import pytest

from tests.real.processes import MODEL, PYTHON, Gateway, LMCache, Process, Vllm
from tests.real.stack import Stack
from tests.services import redis_server

_took: list[str] = []


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not PYTHON.exists() or not MODEL.exists():
        pytest.fail("vLLM is not installed here: run `make test-real`", pytrace=False)
    folder = tmp_path_factory.mktemp("real")
    with redis_server() as redis, contextlib.ExitStack() as running:
        lmcache = LMCache(folder, redis.port)
        vllms = Vllm("a", folder, lmcache), Vllm("b", folder, lmcache)
        gateway = Gateway(folder)
        for process in (lmcache, *vllms, gateway):
            running.callback(process.stop)
        made = Stack(redis, lmcache, vllms, gateway, {name: secrets.token_hex(8) for name in ("red", "blue")})
        began = time.monotonic()
        made.start_engines()
        made.start_gateway()
        _took.append(f"started in {time.monotonic() - began:.0f} s")
        yield made
        _took.extend(_memory(process) for process in (lmcache, *vllms, gateway))


def _memory(process: Process) -> str:
    return f"{process.name}: {process.memory / 2**30:.1f} GiB"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _took:
        terminalreporter.write_line(f"the real servers: {'; '.join(_took)}")
