"""Real servers for tests, each on a free port and in a folder of its own, ended by process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def freeze(pid: int) -> None:
    """Stops a process that this one started, and waits until none of its threads runs: the signal alone is no proof."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def thaw(pid: int) -> None:
    """Lets a frozen process go on."""
    os.kill(pid, signal.SIGCONT)


class RedisServer:
    """A redis-server process that can be frozen, killed and brought back at the same address, empty."""

    def __init__(self, folder: Path, options: tuple[str, ...], password: str | None) -> None:
        self.port = free_port()
        self.socket_path = folder / "redis.sock"
        self._folder = folder
        self._password = password
        self._options = (*options, *(("--requirepass", password) if password else ()))
        self._process: subprocess.Popen[bytes] | None = None
        self.restart()

    @property
    def url(self) -> str:
        return f"redis://{self._login}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._login}{self.socket_path}"

    @property
    def _login(self) -> str:
        return f":{self._password}@" if self._password else ""

    @property
    def pid(self) -> int:
        assert self._process is not None, "redis-server is not running"
        return self._process.pid

    def client(self) -> redis.Redis:
        """An independent, blocking client, for what a test sets up and looks at."""
        return redis.Redis(host="127.0.0.1", port=self.port, password=self._password, socket_timeout=5)

    def pause(self) -> None:
        """Freeze it: connections stay open and are silent."""
        freeze(self.pid)

    def resume(self) -> None:
        thaw(self.pid)

    def kill(self) -> None:
        """End it at once; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """End it if it runs, then start it anew and wait until it answers."""
        self.kill()
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("this test needs redis-server: apt-get install redis-server", pytrace=False)
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket_path)]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "no", *self._options]
        log = self._folder / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except RedisConnectionError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"redis-server did not start: {log.read_text()[-500:]}", pytrace=False)
                time.sleep(0.02)


@contextlib.contextmanager
def redis_server(*options: str, password: str | None = None) -> Iterator[RedisServer]:
    """A running Redis without persistence; `options` go to its command line (`"--maxmemory", "4mb"`)."""
    with tempfile.TemporaryDirectory(prefix="wg-redis-") as folder:
        server = RedisServer(Path(folder), options, password)
        try:
            yield server
        finally:
            server.kill()
