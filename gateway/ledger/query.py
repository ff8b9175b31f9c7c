"""Questions to the ledger's tables: sums over a span of time by any of the group's parts, reasons, and kept rows.

Each takes a connection inside a transaction, so that several answers agree with each other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.ledger import counters as c
from gateway.ledger.schema import GROUP, MINUTE, ROW, SPANS

FOREVER = 1 << 40
_MICRO = 10**6


@dataclass(frozen=True, slots=True)
class Scope:
    """What a question is about: minutes that begin from ``since`` to before ``until`` (unix seconds), and the parts of
    the group that must have a value.
    """

    since: int = 0
    until: int = FOREVER
    where: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Sum:
    """Counters added up over one ``key`` (the values of the parts asked for; ``at`` when it began, unix seconds)."""

    key: tuple[Any, ...]
    at: int
    counts: c.Counters


def sums(connection: sqlite3.Connection, scope: Scope, by: Sequence[str] = (), step: int | None = None) -> list[Sum]:
    """Sums by the parts named in ``by``, and with ``step`` (seconds, whole minutes) by time; in their order."""
    parts = [f"g.{name}" for name in by]
    when = f"r.bucket / {step} * {step}" if step else "0"
    ranges, values = _ranges(scope, step)
    where, more = _where(scope)
    rows = connection.execute(
        f"WITH span (length, first, last) AS (VALUES {ranges}) "
        f"SELECT {', '.join([when, *parts, *_SUMS])} FROM span CROSS JOIN rollups r ON r.span = span.length "
        f"AND r.bucket >= span.first AND r.bucket < span.last JOIN groups g ON g.id = r.grp {where} "
        f"GROUP BY {', '.join(['1', *parts])} ORDER BY {', '.join(['1', *parts])}",
        (*values, *more),
    )
    return [_sum(row, len(parts)) for row in rows]


def totals(connection: sqlite3.Connection) -> list[Sum]:
    """Every group's counters since the file was begun."""
    columns = ", ".join(f"t.{name}" for name in c.COLUMNS)
    parts = ", ".join(f"g.{name}" for name in GROUP)
    rows = connection.execute(f"SELECT {parts}, {columns} FROM totals t JOIN groups g ON g.id = t.grp ORDER BY {parts}")
    return [Sum(row[: len(GROUP)], 0, list(row[len(GROUP) :])) for row in rows]


def most_work(connection: sqlite3.Connection, scope: Scope, output: float) -> dict[str, float]:
    """What each upstream computed in its best minute: prompt tokens, and ``output`` times its output tokens."""
    rows = connection.execute(
        "SELECT upstream, MAX(work) FROM (SELECT g.upstream AS upstream, "
        "SUM(r.computed_tokens + r.unsplit_tokens + ? * r.output_tokens) AS work FROM rollups r "
        "JOIN groups g ON g.id = r.grp WHERE r.span = ? AND r.bucket >= ? AND r.bucket < ? AND g.upstream != '' "
        "GROUP BY g.upstream, r.bucket) GROUP BY upstream",
        (output, MINUTE, scope.since, scope.until),
    )
    return dict(rows.fetchall())


def reasons(connection: sqlite3.Connection, scope: Scope) -> list[dict[str, Any]]:
    """How often each reason was given, the commonest first."""
    ranges, values = _ranges(scope, None)
    where, more = _where(scope)
    rows = connection.execute(
        f"WITH span (length, first, last) AS (VALUES {ranges}) "
        "SELECT g.outcome, r.reason, SUM(r.count) AS n FROM span CROSS JOIN reasons r ON r.span = span.length "
        f"AND r.bucket >= span.first AND r.bucket < span.last JOIN groups g ON g.id = r.grp {where} "
        "GROUP BY g.outcome, r.reason ORDER BY n DESC, g.outcome, r.reason",
        (*values, *more),
    )
    return [{"outcome": outcome, "reason": reason, "count": count} for outcome, reason, count in rows]


ROW_LIKE: dict[str, Any] = {
    **dict.fromkeys(ROW, ""),
    **dict.fromkeys(("ended", "latency", "ttft"), 0.0),
    **dict.fromkeys(("status", "prompt_tokens", "cached_tokens", "output_tokens", "cost_pico"), 0),
    "stream": False,
}
"""What a row looks like, for the types of its columns."""


def rows(connection: sqlite3.Connection, scope: Scope, limit: int) -> list[dict[str, Any]]:
    """The newest kept rows, newest first."""
    conditions = ["ended >= ?", "ended < ?", *(f"{name} = ?" for name in scope.where)]
    found = connection.execute(
        f"SELECT {', '.join(ROW)} FROM rows WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT ?",
        (scope.since, scope.until, *scope.where.values(), limit),
    )
    return [{**dict(zip(ROW, row, strict=True)), "stream": bool(row[ROW.index("stream")])} for row in found]


def extent(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """When the oldest and the newest minute that are kept began (unix seconds)."""
    found = connection.execute(
        "SELECT (SELECT min(bucket) FROM rollups WHERE span = ?), (SELECT max(bucket) FROM rollups WHERE span = ?)",
        (MINUTE, MINUTE),
    ).fetchone()
    return found if found[0] is not None else None


def names(connection: sqlite3.Connection, part: str, where: dict[str, str]) -> list[str]:
    """All values that a part of the group has had."""
    condition, values = _where(Scope(where=where))
    found = connection.execute(f"SELECT DISTINCT g.{part} FROM groups g {condition} ORDER BY 1", values)
    return [row[0] for row in found]


def vitals(connection: sqlite3.Connection, since: float) -> list[tuple[str, str]]:
    """What each worker that was heard of since ``since`` (unix seconds) last said of itself: its name, and JSON."""
    return connection.execute("SELECT worker, vitals FROM workers WHERE seen >= ? ORDER BY worker", (since,)).fetchall()


def _ranges(scope: Scope, step: int | None) -> tuple[str, list[int]]:
    """Spans to read: the longest that fit, and that a step is a multiple of."""
    first, last = scope.since // MINUTE * MINUTE, -(-scope.until // MINUTE) * MINUTE
    spans = _cover(first, last, [span for span in SPANS if step is None or step % span == 0])
    return ", ".join(["(?, ?, ?)"] * len(spans)), [value for span in spans for value in span]


def _cover(first: int, last: int, spans: Sequence[int]) -> list[tuple[int, int, int]]:
    span, *shorter = spans
    if not shorter:
        return [(span, first, last)]
    begin, end = -(-first // span) * span, last // span * span
    if begin >= end:
        return _cover(first, last, shorter)
    return [*_cover(first, begin, shorter), (span, begin, end), *_cover(end, last, shorter)]


def _where(scope: Scope) -> tuple[str, list[str]]:
    unknown = scope.where.keys() - set(GROUP)
    assert not unknown, unknown
    conditions = [f"g.{name} = ?" for name in scope.where]
    return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), list(scope.where.values())


def _money(name: str) -> Iterable[str]:
    """A sum in two parts, since SQLite refuses sums beyond 64 bits (nine million dollars)."""
    return f"SUM(r.{name} / {_MICRO})", f"SUM(r.{name} % {_MICRO})"


_MONEY = (c.SAVED_PICO, c.COST_PICO)
_SUMS = [
    *(f"SUM(r.{name})" for index, name in enumerate(c.COLUMNS) if index not in _MONEY),
    *(part for index in _MONEY for part in _money(c.COLUMNS[index])),
]


def _sum(row: tuple[Any, ...], parts: int) -> Sum:
    values = row[1 + parts :]
    plain = iter(values[: -2 * len(_MONEY)])
    money = {
        index: int(values[offset] * _MICRO + values[offset + 1])
        for index, offset in zip(_MONEY, range(len(values) - 2 * len(_MONEY), len(values), 2), strict=True)
    }
    counts = [money[index] if index in money else next(plain) for index in range(len(c.COLUMNS))]
    return Sum(tuple(row[1 : 1 + parts]), row[0], counts)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One hit that was sent upstream: seconds, tokens (prompt and output) and pico-dollars it took, None if unknown."""

    latency: float
    tokens: int | None
    cost: int | None


def held_out(connection: sqlite3.Connection, scope: Scope) -> list[HeldOut]:
    """The held-out requests among the kept rows."""
    conditions = ["held_out != ''", "ended >= ?", "ended < ?", *(f"{name} = ?" for name in scope.where)]
    found = connection.execute(
        f"SELECT latency, prompt_tokens + output_tokens, cost_pico FROM rows WHERE {' AND '.join(conditions)}",
        (scope.since, scope.until, *scope.where.values()),
    )
    return [HeldOut(*row) for row in found]


def questions(connection: sqlite3.Connection, scope: Scope, limit: int) -> list[dict[str, Any]]:
    """The commonest prompts among the kept rows; empty unless prompts are stored."""
    conditions = ["prompt != ''", "ended >= ?", "ended < ?", *(f"{name} = ?" for name in scope.where)]
    found = connection.execute(
        f"SELECT prompt, count(*) AS n FROM rows WHERE {' AND '.join(conditions)} GROUP BY prompt ORDER BY n DESC, 1 "
        "LIMIT ?",
        (scope.since, scope.until, *scope.where.values(), limit),
    )
    return [{"prompt": prompt, "count": count} for prompt, count in found]
