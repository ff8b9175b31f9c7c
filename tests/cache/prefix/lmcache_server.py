"""A real `lmcache server` with a second level in a real Redis. `make test` installs LMCache; without it tests skip."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from loadtest.bench_engine.servers import LMCACHE_ENVIRONMENT, lmcache_answers, lmcache_command
from tests.services import free_port
from tests.waiting import wait_until

installed = pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed: see requirements-lmcache.txt"
)


class LMCacheServer:
    """`lmcache server` over a Redis, both of one's own; the Redis outlives it."""

    def __init__(self, folder: Path, block_size: int) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
        self._block_size = block_size
        self.port, self.http, self.redis = (free_port() for _ in range(3))
        self.url = f"lmcache://127.0.0.1:{self.port}"
        self.memory = f"warmgate-test-{os.getpid()}-{self.port}"
        self.log = (folder / "lmcache.log").open("w")
        self._redis = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(self.redis), "--save", ""], stdout=subprocess.DEVNULL
        )
        self._launch()

    def start(self) -> None:
        self._launch()
        self.wait()

    def wait(self) -> None:
        """Until it answers: some seconds, more on a busy machine."""
        wait_until(self._ready, patience=180)

    def _launch(self) -> None:
        command = lmcache_command(self.port, self.http, self.memory, self._block_size, 0.25, redis=self.redis)
        self.process = subprocess.Popen(command, env=LMCACHE_ENVIRONMENT, stdout=self.log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.stop()
        self._redis.kill()
        self._redis.wait()
        self.log.close()

    def second_level_keys(self, layout: bytes = b"") -> int:
        """How many objects Redis holds, of all layouts or of one."""
        return sum(1 for _ in self._ask_redis().scan_iter(f"*{layout.hex()[:32]}*"))

    def second_level_read(self) -> int:
        """Bytes that Redis has answered so far."""
        return int(self._ask_redis().info("stats")["total_net_output_bytes"])  # type: ignore[index]

    def locks(self) -> int:
        """Sessions open and objects locked."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status") as answer:
            status = json.load(answer)
        first_level = status["storage_manager"]["l1_managers"]["_default"]
        return status["active_sessions"] + first_level["read_locked_count"] + first_level["write_locked_count"]

    def _ask_redis(self) -> redis.Redis:
        return redis.Redis(port=self.redis)

    def _ready(self) -> bool:
        assert self.process.poll() is None, Path(self.log.name).read_text()[-2000:]
        if ready := lmcache_answers(self.http):
            return ready
        time.sleep(0.2)
        return False


@contextmanager
def lmcache_server(folder: Path, block_size: int) -> Iterator[LMCacheServer]:
    """One for the length of a block."""
    server = LMCacheServer(folder, block_size)
    try:
        server.wait()
        yield server
    finally:
        server.close()
