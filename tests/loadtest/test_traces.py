"""Specification of `loadtest.traces`, on small traces of its own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from loadtest.traces import Request, TraceError, read_trace

SESSION = {
    "id": "s",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "in": 200, "out": 10, "r": [[1, 3]]},
        {"t": 5.0, "type": "subagent", "requests": []},
        {"t": 9.0, "in": 400, "out": 20, "r": [[1, 2], [7, 8]]},
    ],
}


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_counts_milliseconds(tmp_path: Path, name: str):
    record = {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]}
    assert read_trace(write(tmp_path / name, record)) == [Request(1.5, ((0, 0), (7, 8)), 1100, 5)]


def test_bailian_counts_seconds(tmp_path: Path):
    record = {"chat_id": 3, "parent_chat_id": -1, "timestamp": 1.5, "turn": 1, "type": "text", "hash_ids": [4, 5]}
    assert read_trace(write(tmp_path / "trace.jsonl", record)) == [Request(1.5, ((4, 5),))]


def test_requests_come_in_order_of_time(tmp_path: Path):
    records = [{"timestamp": at, "hash_ids": [at]} for at in (30, 10, 20)]
    requests = read_trace(write(tmp_path / "trace.jsonl", *records))
    assert [request.blocks() for request in requests] == [[10], [20], [30]]


def test_sessions_share_no_blocks_and_sub_agents_are_left_out(tmp_path: Path):
    requests = read_trace(write(tmp_path / "trace.jsonl", SESSION, SESSION), spread=0)
    chains = [request.blocks() for request in requests]
    assert [len(blocks) for blocks in chains] == [3, 3, 4, 4]
    assert chains[0][:2] == chains[2][:2]  # the first session's second request begins like its first
    assert not set(chains[0]) & set(chains[1])
    assert [request.at for request in requests] == [0, 0, 9, 9]
    assert (requests[2].prompt_tokens, requests[2].output_tokens) == (400, 20)


def test_starts_of_sessions_are_spread_by_the_seed(tmp_path: Path):
    path = write(tmp_path / "trace.jsonl", *[SESSION] * 50)
    starts = [request.at for request in read_trace(path, spread=1000, seed=1)]
    assert starts == [request.at for request in read_trace(path, spread=1000, seed=1)]
    assert starts != [request.at for request in read_trace(path, spread=1000, seed=2)]
    assert 0 <= min(starts) < 200 < 800 < max(starts) <= 1009


def test_a_stride_merges_blocks_and_cuts_the_rest(tmp_path: Path):
    path = write(tmp_path / "trace.jsonl", {"timestamp": 0, "hash_ids": list(range(10, 20))})
    assert read_trace(path, stride=4)[0].blocks() == [13, 17]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not a request"),
        ("17", "line 1 is not a request"),
        ("[]", "line 1 is not a request"),
        ('{"timestamp": 1}', "'hash_ids' is missing"),
        ('{"timestamp": "x", "hash_ids": [1]}', "line 1 is not a request"),
        ('{"timestamp": 1, "hash_ids": "abc"}', "line 1 is not a request"),
        ('{"requests": [{"r": [[1, 2]]}]}', "'t' is missing"),
        ('{"requests": [{"t": 1, "r": [[1]]}]}', "line 1 is not a request"),
        ('{"timestamp": 1, "hash_ids": []}', "no requests with blocks"),
        ("", "no requests with blocks"),
    ],
)
def test_what_is_not_a_trace_is_said_in_one_sentence(tmp_path: Path, line: str, says: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_said_in_one_sentence(tmp_path: Path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"timestamp": 1, "hash_ids": [1]}\n' * 100)[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(broken)
    broken.write_bytes(b"plain text")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(broken)
