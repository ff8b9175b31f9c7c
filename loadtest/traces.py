"""Readers of real traces: Mooncake's and Alibaba Bailian's prefix chains, and recorded agent sessions.

A trace is a JSON-lines file, plain or gzipped, of one of these forms; which one is seen by its fields:

- chains: one request a line, `hash_ids` names its prompt's blocks, each by all tokens before it. Mooncake's
  `timestamp` counts milliseconds, Bailian's (which has a `chat_id`) seconds.
- sessions: one session a line, `requests` each with a time `t` in seconds since the session began and `r`, ranges
  `[first, last]` of block ids that mean something only within the session. Starts are spread at random over a while.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_SPREAD = 8 * 3600.0


class TraceError(ValueError):
    """A trace that cannot be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        at: seconds since the trace began.
        runs: its chain of blocks, as (first, last) of consecutive ids.
        prompt_tokens, output_tokens: as the trace tells, 0 where it does not.
        stride: how many of the trace's blocks make one block of the chain returned by `blocks`.
    """

    at: float
    runs: tuple[tuple[int, int], ...]
    prompt_tokens: int = 0
    output_tokens: int = 0
    stride: int = 1

    def blocks(self) -> list[int]:
        """The chain's block ids, head first. With a stride each is named by the last of its blocks; a rest is cut."""
        ids = [block for first, last in self.runs for block in range(first, last + 1)]
        return ids if self.stride == 1 else ids[self.stride - 1 :: self.stride]


def read_trace(path: Path, *, spread: float = DEFAULT_SPREAD, seed: int = 0, stride: int = 1) -> list[Request]:
    """The requests of a trace in order of time.

    Args:
        spread: seconds over which the starts of sessions are spread, uniformly; 0 starts all at once.
        seed: of the random starts.
        stride: merge this many blocks of the trace into one, as an engine with larger blocks would.

    Raises `TraceError` if the file cannot be read or is not a trace.
    """
    rng = random.Random(seed)
    requests: list[Request] = []
    for number, line in _lines(path):
        try:
            record = json.loads(line)
            if "requests" in record:
                # A session has the ids from `number` x 2^32 up for itself.
                requests += _session(record, rng.uniform(0, spread), number << 32, stride)
            else:
                requests.append(_chain(record, stride))
        except KeyError as missing:
            raise TraceError(f"{path}, line {number}: {missing} is missing: no trace of a known form") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"{path}, line {number} is not a request or session of a trace: {error}") from None
    if not any(request.runs for request in requests):
        raise TraceError(f"{path} holds no requests with blocks")
    requests.sort(key=lambda request: request.at)
    return requests


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None


def _chain(record: dict[str, Any], stride: int) -> Request:
    seconds = record["timestamp"] if "chat_id" in record else record["timestamp"] / 1000
    return Request(
        seconds, _runs(record["hash_ids"]), record.get("input_length", 0), record.get("output_length", 0), stride
    )


def _runs(ids: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for block in ids:
        if runs and block == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return tuple(runs)


def _session(record: dict[str, Any], start: float, base: int, stride: int) -> Iterator[Request]:
    for request in record["requests"]:
        if "r" not in request:  # the summary of a sub-agent, whose blocks were not recorded
            continue
        runs = tuple((base + first, base + last) for first, last in request["r"])
        yield Request(start + request["t"], runs, request.get("in", 0), request.get("out", 0), stride)
