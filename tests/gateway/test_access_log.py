"""The access log: one whole line a request, whichever way it went, and never at the expense of serving."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.config import Config
from gateway.ledger import Row
from gateway.source import shortcomings
from gateway.telemetry import access_log
from gateway.telemetry.access_log import AccessLog
from tests.field.conftest import CHAT, B
from tests.gateway.conftest import Start
from tests.harness import FakeClock

FIELDS = (
    "time request_id latency ttft tenant endpoint model outcome status stream prompt_tokens cached_tokens "
    "output_tokens upstream reason"
).split()


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def noted(clock: FakeClock, target: Path | None, *ids: str) -> AccessLog:
    made = AccessLog(clock)
    made.target = target
    for each in ids:
        made.row(Row(at=clock.time(), request_id=each))
    return made


async def test_every_request_is_a_line_by_either_path(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    async with start(telemetry={"access_log": str(path)}) as bench:
        await bench.send(B, x_request_id="one", authorization="Bearer not-to-be-seen")
        for each in ("two", "three"):
            await bench.send(B, x_request_id=each)
        await bench.send(B, x_request_id="four", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        async with bench.streaming({**B, "stream": True}, x_request_id="five") as response:
            await response.aread()
        await bench.send(b"{", x_request_id="six")
    told = lines(path)
    assert [list(line) for line in told] == [FIELDS] * 6
    assert [(line["request_id"], line["outcome"], line["status"], line["stream"]) for line in told] == [
        ("one", "miss", 200, False),
        ("two", "exact", 200, False),
        ("three", "exact", 200, False),
        ("four", "exact", 200, False),
        ("five", "exact", 200, True),
        ("six", "error", 400, False),
    ]
    first, second, bad = told[0], told[1], told[-1]
    for line in (first, second):
        assert (line["tenant"], line["endpoint"], line["model"], line["upstream"]) == ("default", CHAT, B["model"], "u")
    assert (bad["reason"], bad["ttft"]) == ("invalid_request", None)
    assert first["prompt_tokens"] == second["prompt_tokens"] > 0
    assert first["time"].endswith("Z")
    text = path.read_text()
    assert "not-to-be-seen" not in text
    assert B["messages"][-1]["content"] not in text
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


async def test_off_by_default_and_then_nobody_is_told(start: Start) -> None:
    async with start() as bench:
        ledger = bench.gateway.app.runtime.ledger
        await bench.send(B)
        assert not bench.gateway.app.runtime.access_log._pending
        assert ledger.hit == ledger._book.hit
        assert ledger.record == ledger._book.record


async def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "access.jsonl"
    log = noted(clock, path, "old")
    await log.flush()
    path.rename(tmp_path / "access.jsonl.1")
    log.row(Row(at=clock.time(), request_id="new"))
    await log.flush()
    assert [line["request_id"] for line in lines(tmp_path / "access.jsonl.1")] == ["old"]
    assert [line["request_id"] for line in lines(path)] == ["new"]


async def test_a_reload_moves_it_and_switches_it_off(start: Start, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    async with start(telemetry={"access_log": str(one)}) as bench:
        runtime = bench.gateway.app.runtime
        await bench.send(B)
        await runtime.access_log.flush()
        for telemetry in ({"access_log": str(two)}, {}):
            changed = {**runtime.config.model_dump(), "telemetry": telemetry}
            runtime.apply(Config.model_validate(changed))
            await bench.send(B)
            await runtime.access_log.flush()
    assert [line["outcome"] for line in lines(one)] == ["miss"]
    assert [line["outcome"] for line in lines(two)] == ["exact"]


async def test_what_cannot_be_written_waits_within_bounds_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "PENDING", 3)
    folder = tmp_path / "not-yet"
    log = noted(FakeClock(), folder / "access.jsonl", "a", "b")
    await log.flush()
    assert (log.problem, log.dropped) == ("No such file or directory", 0)
    for each in "cdef":
        log.row(Row(at=0.0, request_id=each))
    await log.flush()
    assert log.dropped == 3
    assert caplog.text.count("serving goes on") == 1
    folder.mkdir()
    await log.flush()
    assert [line["request_id"] for line in lines(folder / "access.jsonl")] == ["a", "b", "c"]
    assert (log.problem, log.dropped) == ("", 3)
    assert "3 lines were lost" in caplog.text


async def test_a_disk_that_is_full_gets_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "access.jsonl", os.write
    log = noted(FakeClock(), path, "a")
    await log.flush()
    whole = path.read_bytes()
    room = iter((10,))

    def full(file: int, data: bytes) -> int:
        for most in room:
            return real(file, bytes(data)[:most])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.row(Row(at=0.0, request_id="b"))
    await log.flush()
    assert path.read_bytes() == whole
    monkeypatch.undo()
    await log.flush()
    assert [line["request_id"] for line in lines(path)] == ["a", "b"]


async def test_what_is_being_written_when_the_gateway_ends_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    log = noted(FakeClock(), tmp_path / "access.jsonl", "a")

    def stuck(*_: object) -> tuple[int, str]:
        began.set()
        go_on.wait(10)
        return 0, "full for a moment"

    with monkeypatch.context() as patch:
        patch.setattr(access_log, "_write", stuck)
        patch.setattr(access_log, "FLUSH_EVERY", 0)
        running = asyncio.create_task(log.run())
        assert await asyncio.to_thread(began.wait, 10)
        running.cancel()
        await asyncio.wait((running,))
    go_on.set()
    await log.flush()
    assert [line["request_id"] for line in lines(tmp_path / "access.jsonl")] == ["a"]


async def test_a_gateway_whose_log_cannot_be_written_serves_and_says_so(start: Start, tmp_path: Path) -> None:
    async with start(telemetry={"access_log": str(tmp_path / "none" / "access.jsonl")}) as bench:
        assert (await bench.send(B)).status == 200
        await bench.gateway.app.runtime.access_log.flush()
        assert (await bench.send(B)).is_hit
        text = (await bench.gateway.client.get("/metrics")).text
    assert [line[-3:] for line in text.splitlines() if line.startswith("warmgate_access_log_ok")] == ["0.0"]


def test_several_processes_append_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(path, name)) for name in ("x", "y")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    ids = [line["request_id"] for line in lines(path)]
    assert sorted(ids) == sorted(f"{name}{n}" for name in "xy" for n in range(4000))


def _append_many(path: Path, name: str) -> None:
    for start in range(0, 4000, 100):
        batch = [(Row(at=0.0), 0.0, 0.0, None, f"{name}{n}") for n in range(start, start + 100)]
        assert access_log._write(path, batch) == (100, "")


def test_standard_output_gets_whole_lines(capfd: pytest.CaptureFixture[str]) -> None:
    batch = [(Row(at=0.0, reason="\x00" * 500, model="\ud800" * 500), 0.0, 0.0, None, str(n)) for n in range(50)]
    assert access_log._write("-", batch) == (50, "")
    assert [orjson.loads(line)["request_id"] for line in capfd.readouterr().out.splitlines()] == list(
        map(str, range(50))
    )


def test_a_reader_of_standard_output_that_does_not_read_costs_lines_and_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(access_log, "_STANDARD_OUTPUT", writer)
    monkeypatch.setattr(access_log, "PATIENCE", 0.01)
    batch = [(Row(at=0.0, reason="r" * 200), 0.0, 0.0, None, str(n)) for n in range(1000)]
    written, problem = access_log._write("-", batch)
    assert 0 < written < 1000
    assert problem == "nobody reads it"
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert [orjson.loads(line)["request_id"] for line in file] == list(map(str, range(written)))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{folder}", "telemetry.access_log: {folder} is a folder; name a file in it"),
        ("{folder}/none/access.jsonl", "telemetry.access_log: there is no folder {folder}/none"),
    ],
)
def test_a_target_that_cannot_be_is_a_fault(tmp_path: Path, value: str, sentence: str) -> None:
    config = {"engine": "off", "telemetry": {"access_log": value.format(folder=tmp_path)}}
    assert shortcomings(Config.model_validate(config)) == [sentence.format(folder=tmp_path)]


@pytest.mark.parametrize("value", ["-", "access.jsonl", None])
def test_a_target_survives_the_way_to_a_worker(tmp_path: Path, value: str | None) -> None:
    config = Config.model_validate({"telemetry": {"access_log": value}}, context={"base": tmp_path})
    again = Config.model_validate_json(config.model_dump_json())
    expected = {"-": "-", "access.jsonl": tmp_path / "access.jsonl", None: None}[value]
    assert again.telemetry.access_log == config.telemetry.access_log == expected
