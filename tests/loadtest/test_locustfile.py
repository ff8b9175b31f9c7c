"""The locust users as they are started by hand."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path

from loadtest.stub_upstream import StubUpstream

FILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"


async def locust(host: str) -> Process:
    """One user of what is at ``host``."""
    command = [sys.executable, "-m", "locust", "-f", str(FILE), "--headless", "--host", host]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOAD_")}
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=STDOUT)


async def test_without_a_name_they_ask_for_a_model_that_is_served() -> None:
    async with StubUpstream(models=("the-only-one",)) as u:
        users = await locust(u.url)
        await u.wait_calls(3)
        users.terminate()
        said, _ = await users.communicate()
        assert users.returncode == 0, said.decode()
        assert {call.json["model"] for call in u.calls} == {"the-only-one"}


async def test_where_no_gateway_is_it_is_said_and_nobody_asks() -> None:
    users = await locust("http://127.0.0.1:1")
    said, _ = await users.communicate()
    assert users.returncode == 2
    assert b"http://127.0.0.1:1 names no model" in said
    assert b"Traceback" not in said
