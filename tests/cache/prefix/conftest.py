"""A real Redis server for each test that asks for one, and stacks that are closed and checked at its end."""

import shutil
from collections.abc import Iterator

import pytest

from tests.cache.prefix.helpers import Bench, RedisServer


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.kill()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for stack in made.stacks:
        stack.close()
        if stack.host:
            stack.host.check_integrity()
