"""A real Redis server for each test that asks for one, and small helpers to make blocks and stacks."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from cache.prefix.blocks import Block, chain

BLOCK_BYTES = 4096
BLOCK_TOKENS = 4
LAYOUT = b"L" * 32
TENANT = b"tenant"


def make_blocks(count: int, *, seed: int = 0, salt: bytes = TENANT, **options) -> list[Block]:
    """A chain of `count` blocks; another seed makes another prompt."""
    return chain([seed * 1_000_000 + i for i in range(count * BLOCK_TOKENS)], BLOCK_TOKENS, salt=salt, **options)


def payload(block: Block, size: int = BLOCK_BYTES) -> memoryview:
    """Bytes that only this block has."""
    return memoryview((block.digest * (size // len(block.digest) + 1))[:size])


def buffers(count: int) -> list[memoryview]:
    """Writable buffers, poisoned."""
    return [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in range(count)]


def wait_for(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Polls until the condition holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.002)


class RedisServer:
    """A redis-server of one's own on a unix socket, to be stopped, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        wait_for(self._answers)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def keys(self) -> list[bytes]:
        """The keys that hold blocks."""
        return sorted(self.client.keys("wg:kv:*"))  # type: ignore[arg-type]

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.kill()
