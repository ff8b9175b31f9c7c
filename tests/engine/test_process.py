"""The engine as a process: start, health, the official client, leaving clients, clear failures."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import orjson
import pytest

from engine.__main__ import with_patient_threads
from engine.core import EngineCore
from engine.errors import ModelError
from tests.engine import tiny

ENGINE = [sys.executable, "-m", "engine", "--threads", "1", "--kv-cache", "256MiB"]
MODEL = "smollm2-135m-instruct"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([*ENGINE, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    base = f"http://127.0.0.1:{port}"
    seen: set[int] = set()
    deadline = time.monotonic() + 90
    while 200 not in seen:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, f"not ready; /health said {seen}"
        try:
            seen.add(httpx.get(f"{base}/health").status_code)
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    assert 503 in seen, "the port was not bound while the model was loading"
    yield base
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    with process.stderr as stderr:
        log = stderr.read()
    assert f"serving '{MODEL}' on {base}" in log
    assert "Traceback" not in log


def test_the_official_client_gets_the_right_answer(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    plain = client.chat.completions.create(model=MODEL, messages=ask, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (plain.choices[0].message.content or "")
    stream = client.chat.completions.create(model=MODEL, messages=ask, temperature=0, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == plain.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ask)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(url: str, stream: bool) -> None:
    long = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(timeout=60) as client:

        async def running() -> float:
            lines = (await client.get(f"{url}/metrics")).text.splitlines()
            return float(next(line for line in lines if line.startswith("vllm:num_requests_running")).split()[-1])

        request = asyncio.create_task(client.post(f"{url}/v1/completions", json=long))

        async def until(wanted: float) -> None:
            async with asyncio.timeout(10):
                while await running() != wanted:
                    await asyncio.sleep(0.05)

        await until(1)
        request.cancel()
        await until(0)


def failure(*arguments: str) -> str:
    done = subprocess.run([*ENGINE, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_missing_model_is_one_sentence() -> None:
    assert "there is no model" in failure("--model", "no/such/model.gguf", "--port", "0")


def test_a_broken_model_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    assert "GGUF magic" in failure("--model", str(broken), "--port", "0")


def test_a_port_in_use_is_one_sentence(url: str) -> None:
    assert "cannot listen" in failure("--port", url.rsplit(":", 1)[1])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--block-size", "24"), "block size"), (("--kv-cache", "much"), "size"), (("--threads", "-1"), "negative")],
)
def test_an_impossible_option_is_one_sentence(arguments: tuple[str, ...], word: str) -> None:
    assert word in failure(*arguments, "--port", "0")


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"device": "quantum"}, "device"), ({"device": "meta"}, "device"), ({"dtype": "int3"}, "dtype")],
)
def test_an_impossible_device_or_dtype_is_one_sentence(changes: dict[str, str], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        EngineCore(replace(tiny.config(), **changes), tiny.files())  # type: ignore[arg-type]


def test_a_pool_too_small_for_anything_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="too small"):
        tiny.core(blocks=1)


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], spins: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(chosen))
    with_patient_threads()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_torch_is_loaded_only_after_its_environment_is_set() -> None:
    check = "import engine.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


HASTY = "import sys, engine.server; engine.server.GRACE = 0.2; from engine.__main__ import main; sys.exit(main())"
"""The engine, but for the time that open requests have at the end."""


@pytest.fixture
def hasty() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    port = free_port()
    command = [sys.executable, "-c", HASTY, *ENGINE[3:], "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield port, process
        process.kill()


async def test_requests_that_outlast_the_grace_are_told_so(hasty: tuple[int, subprocess.Popen[str]]) -> None:
    port, process = hasty
    long = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
    upload = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        async def answers(path: str, word: str) -> bool:
            assert process.poll() is None
            try:
                return word in (await client.get(path)).text
            except httpx.TransportError:
                return False

        async def true(path: str, word: str) -> None:
            async with asyncio.timeout(90):
                while not await answers(path, word):
                    await asyncio.sleep(0.05)

        await true("/health", "ok")
        plain = asyncio.create_task(client.post("/v1/completions", json=long))
        stream = asyncio.create_task(client.post("/v1/completions", json={**long, "n": 2, "stream": True}))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(upload)
        await true("/metrics", 'num_requests_running{model_name="smollm2-135m-instruct"} 3')
        process.send_signal(signal.SIGTERM)
        answer, events = await plain, (await stream).text.split("\n\n")
        cut_short = await reader.read()
        writer.close()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    error = answer.json()["error"]
    assert error["type"] == "server_error" and error["code"] == "shutting_down"
    assert cut_short.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in cut_short
    assert events[0].startswith('data: {"id"')
    assert [event for event in events if "error" in event] == [events[-2]]
    assert orjson.loads(events[-2].removeprefix("data: "))["error"] == error
    assert "[DONE]" not in events
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in log and "CancelledError" not in log
