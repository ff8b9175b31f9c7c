"""The access log: a JSON line for every request that has ended, without secrets and without prompts.

Lines are collected in memory and written a moment later, in another thread. What cannot be written waits within bounds,
and is dropped and counted beyond them; no request ever waits for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import select
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import orjson

from gateway.clock import Clock
from gateway.ledger import Row
from gateway.ledger.labels import NAME, clean
from policies.pricing import tokens

log = logging.getLogger(__name__)

FLUSH_EVERY = 0.5
"""Seconds between two writes."""
PENDING = 20_000
"""Lines that wait to be written at most."""
PATIENCE = 0.2
"""Seconds that a reader of standard output may keep a write waiting."""
_STANDARD_OUTPUT = 1
_LOG_EVERY = 60.0

Target = Path | Literal["-"]
Ended = tuple[Row, float, float, float | None, str]
"""A request that has ended: what it has in common with others like it, and its own begin (unix seconds), latency, time
to the first byte (seconds) and id.
"""


class AccessLog:
    """``target``: a file that several processes may append to, "-" for standard output, None for none. ``problem`` says
    why nothing can be written; ``dropped`` counts the lines that were given up.
    """

    def __init__(self, clock: Clock) -> None:
        self.target: Target | None = None
        self.problem = ""
        self.dropped = 0
        self._clock = clock
        self._pending: list[Ended] = []
        self._flushing = asyncio.Lock()
        self._logged_at = -_LOG_EVERY

    def row(self, row: Row) -> None:
        """A request has ended."""
        self._note((row, row.at, row.latency, row.ttft, row.request_id))

    def hit(self, like: Row, at: float, latency: float, request_id: str) -> None:
        """A hit of the short path has ended; it shares ``like`` with others."""
        self._note((like, at, latency, latency, request_id))

    async def run(self) -> None:
        """Writes again and again, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_EVERY)
            await asyncio.shield(self.flush())  # a write under way goes on to its end

    async def flush(self) -> None:
        """Writes what has been noted so far; never raises."""
        async with self._flushing:
            batch, self._pending = self._pending, []
            if not batch:
                return
            target = self.target
            if target is None:  # switched off meanwhile
                self.dropped += len(batch)
                return
            try:
                written, problem = await asyncio.to_thread(_write, target, batch)
            except Exception:  # what can never be written must not stand in the way of all later lines
                log.exception("the access log gives up what it could not write")
                self.dropped += len(batch)
                return
            if problem:
                kept = [*batch[written:], *self._pending]
                self._pending = kept[:PENDING]
                self.dropped += len(kept) - len(self._pending)
                self._complain(problem)
            elif self.problem:
                log.warning("the access log is written again; %d lines were lost so far", self.dropped)
            self.problem = problem

    def _note(self, ended: Ended) -> None:
        if len(self._pending) < PENDING:
            self._pending.append(ended)
        else:
            self.dropped += 1

    def _complain(self, problem: str) -> None:
        now = self._clock.monotonic()
        if now - self._logged_at >= _LOG_EVERY:
            self._logged_at = now
            log.error("the access log cannot be written to %s: %s; serving goes on", self.target, problem)


def _write(target: Target, batch: Sequence[Ended]) -> tuple[int, str]:
    """How many lines were written, and what kept the rest."""
    lines = _lines(batch)
    if target == "-":
        return _print(lines)
    try:
        _append(target, b"".join(lines))
    except OSError as error:
        return 0, error.strerror or str(error)
    return len(lines), ""


def _append(path: Path, data: bytes) -> None:
    """All of it or nothing. The file is opened each time, so that one that was moved away is made anew."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = os.fstat(file).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.ftruncate(file, end)  # a disk that is full may have taken half a line
            raise
    finally:
        os.close(file)


def _print(lines: Sequence[bytes]) -> tuple[int, str]:
    """Whole lines, in pieces that a pipe takes at once, so that those of several processes never mix (POSIX.1, write)
    and one with room for a piece does not block.
    """
    written = 0
    while written < len(lines):
        piece, upto = b"", written
        while upto < len(lines) and (not piece or len(piece) + len(lines[upto]) <= select.PIPE_BUF):
            piece += lines[upto]
            upto += 1
        try:
            if not select.select([], [_STANDARD_OUTPUT], [], PATIENCE)[1]:
                return written, "nobody reads it"
            os.write(_STANDARD_OUTPUT, piece)
        except (OSError, ValueError) as error:
            return written, str(error)
        written = upto
    return written, ""


def _lines(batch: Sequence[Ended]) -> list[bytes]:
    shared: dict[int, bytes] = {}  # hits of one answer have most in common
    lines = []
    for row, at, latency, ttft, request_id in batch:
        rest = shared.get(id(row))
        if rest is None:
            rest = shared[id(row)] = _rest(row)
        own = {
            "time": datetime.fromtimestamp(at + latency, UTC),
            "request_id": request_id,
            "latency": round(latency, 6),
            "ttft": round(ttft, 6) if ttft is not None else None,
        }
        lines.append(orjson.dumps(own, option=orjson.OPT_UTC_Z)[:-1] + rest)
    return lines


def _rest(row: Row) -> bytes:
    """The end of a line: what a row says of all its requests."""
    used = tokens(row.usage)
    told = {
        "tenant": row.tenant,
        "endpoint": row.endpoint,
        "model": clean(row.model, NAME),
        "outcome": row.outcome,
        "status": row.status,
        "stream": row.stream,
        "prompt_tokens": used.prompt if used is not None else None,
        "cached_tokens": used.cached if used is not None else None,
        "output_tokens": used.output if used is not None else None,
        "upstream": row.upstream,
        "reason": clean(row.reason, NAME),
    }
    return b"," + orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)[1:]
