"""A trace played against something live: prompts share what the trace's prompts shared, in the trace's own time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from loadtest.replay import body_of, ideal_reuse, play, text_of
from loadtest.streamed import Told
from loadtest.stub_upstream import StubUpstream, answer, error, raw
from loadtest.traces import Request, read_trace
from tests.harness import running_gateway, upstream

TRACE = [
    {"timestamp": 0, "input_length": 96, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 100, "input_length": 128, "output_length": 99, "hash_ids": [1, 2, 3, 4]},
    {"timestamp": 200, "input_length": 64, "output_length": 5, "hash_ids": [1, 9]},
]


def written(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


def texts(requests: list[Request]) -> list[str]:
    return [body_of(request, "m1", 8, 16)["messages"][0]["content"] for request in requests]


def test_prompts_share_exactly_the_blocks_that_the_trace_shared(tmp_path: Path) -> None:
    first, second, third = texts(read_trace(written(tmp_path)))
    assert second.startswith(first + "\n")
    assert third.startswith(text_of(1, 8) + "\n")
    assert third.split("\n")[1].split()[0] != second.split("\n")[1].split()[0], "they part at the first word"


def test_answers_are_as_long_as_in_the_trace_within_the_bound(tmp_path: Path) -> None:
    assert [body_of(one, "m1", 8, 16)["max_tokens"] for one in read_trace(written(tmp_path))] == [3, 16, 5]


def test_the_ideal_counts_leading_blocks_only(tmp_path: Path) -> None:
    assert ideal_reuse(read_trace(written(tmp_path))) == 4 / 9


async def test_what_came_back_is_told(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 40}}
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url)]}) as gateway:
        u.reply(answer("well", usage=usage), error(400), raw(b"what?\r\n\r\n"))
        requests = read_trace(written(tmp_path))
        played = await play(gateway.url, "m1", requests, speed=10, at_once=1)
        again = await play(gateway.url, "m1", requests[:1] * 3, speed=10, at_once=1, more={"temperature": 0})
    report = played.report()
    assert report["ends"] == {"ok": 1, "refused": 2}
    assert report["statuses"] == {"400": 1, "502": 1}
    assert (report["prompt_tokens"], report["cached_tokens"], report["reuse"]) == (100, 40, 0.4)
    assert report["upstreams"] == {"u": 1}
    assert 0 < report["ttft"]["p50"] <= report["latency"]["p50"]
    assert again.report()["response_cache"] == {"stored": 1, "hit": 2} or again.report()["response_cache"]["hit"] == 2


async def test_an_answer_that_breaks_off_is_no_answer() -> None:
    requests = [Request(0.0, ((1, 2),))]
    async with StubUpstream() as u:
        u.reply(answer("well well").cut(after=2, then="reset"), raw(b"", then="reset"))
        told: list[Told] = []
        for _ in range(2):
            told += (await play(u.url, "m1", requests)).told
    assert [one.end for one in told] == ["broken", "lost"]


def test_a_file_that_is_no_trace_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    command = [sys.executable, "-m", "loadtest.replay", "--url", "http://127.0.0.1:9", "--model", "m", "--trace"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no trace of a known form" in done.stderr
