"""The ledger over HTTP: the same questions for the operator (``/admin/ledger``) and tenants, as JSON, CSV, Parquet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from sqlite3 import Connection
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response

from gateway.config.units import parse_time
from gateway.effective import facts_of
from gateway.effective import lines as effective_lines
from gateway.ledger import LedgerClosed, parquet, query
from gateway.ledger.counters import REQUESTS
from gateway.ledger.query import FOREVER, ROW_LIKE, Scope, Sum
from gateway.ledger.report import Line, as_csv, figures, hit_rates, merged
from gateway.ledger.schema import GROUP, MINUTE
from gateway.runtime import Runtime

MOST_ROWS = 10_000
MOST_STEPS = 5_000
_KNOWN = {"from", "to", "by", "step", "format", "limit", *GROUP}


async def sums_response(runtime: Runtime, asked: Mapping[str, str], tenant: str | None) -> Response:
    """Sums from ``from`` to ``to``, ``by`` parts of the group, with ``step`` over time. ``tenant``: only its own."""
    scope = scope_of(asked, tenant, runtime.clock.time())
    by = tuple(part for part in asked.get("by", "outcome").split(",") if part)
    if not set(by) <= set(GROUP) or len(set(by)) < len(by):
        raise HTTPException(400, f"'by' must name some of {', '.join(GROUP)}, each once.")
    step = _step(asked.get("step"))
    lines = await _ask(runtime, lambda connection: _lines(connection, scope, by, step))
    if (form := _format(asked)) != "json":
        return await _file(lines, "ledger", form, _like(by, step))
    until = None if scope.until == FOREVER else scope.until
    return JSONResponse({"from": scope.since, "to": until, "by": list(by), "step": step, "groups": lines})


async def rows_response(runtime: Runtime, asked: Mapping[str, str], tenant: str | None) -> Response:
    """The newest kept rows, at most ``limit``."""
    scope = scope_of(asked, tenant, runtime.clock.time())
    limit = asked.get("limit", "100")
    if not limit.isascii() or not limit.isdigit() or not 0 < int(limit) <= MOST_ROWS:
        raise HTTPException(400, f"'limit' must be a number from 1 to {MOST_ROWS}.")
    rows = await _ask(runtime, lambda connection: query.rows(connection, scope, int(limit)))
    form = _format(asked)
    return JSONResponse({"rows": rows}) if form == "json" else await _file(rows, "requests", form, ROW_LIKE)


async def effective_response(runtime: Runtime, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Effective compute of each upstream, ``from`` (an hour ago) ``to`` (now)."""
    now = runtime.clock.time()
    scope = scope_of({"from": "-1h", **asked}, None, now)
    facts = facts_of(runtime, now - scope.since)
    return await _ask(runtime, lambda connection: effective_lines(connection, scope, now, facts))


async def outcomes(runtime: Runtime, since: float = 0.0) -> dict[str, int] | None:
    """All requests that are remembered, by outcome, from the minute of ``since`` on (unix seconds); None where the
    ledger cannot be read.
    """
    scope = Scope(int(since // MINUTE) * MINUTE)
    try:
        sums = await runtime.ledger.read(lambda connection: query.sums(connection, scope, ("outcome",)))
    except LedgerClosed:
        return None
    return {line.key[0]: line.counts[REQUESTS] for line in sums if line.counts[REQUESTS]}


def scope_of(asked: Mapping[str, str], tenant: str | None, now: float) -> Scope:
    """The scope that query parameters name; raises HTTP 400 (403 for another tenant's)."""
    if unknown := asked.keys() - _KNOWN:
        raise HTTPException(400, f"Unknown parameter '{min(unknown)}'; known are {', '.join(sorted(_KNOWN))}.")
    where = {name: asked[name] for name in GROUP if name in asked}
    if tenant is not None and where.setdefault("tenant", tenant) != tenant:
        raise HTTPException(403, "A tenant's key shows its own numbers only.")
    if "stream" in where:
        if where["stream"] not in ("true", "false"):
            raise HTTPException(400, "'stream' must be true or false.")
        where["stream"] = "1" if where["stream"] == "true" else "0"
    since, until = moment("from", asked.get("from"), now), moment("to", asked.get("to"), now)
    return Scope(0 if since is None else int(since), FOREVER if until is None else int(until), where)


def moment(name: str, text: str | None, now: float) -> float | None:
    """Unix seconds of ``1764500000``, ``2026-11-30T12:00:00Z`` or ``-6h`` (before now); raises HTTP 400."""
    if text is None:
        return None
    try:
        if text.startswith("-"):
            return now - parse_time(text[1:])
        if text.replace(".", "", 1).isdigit():
            return min(float(text), float(FOREVER))
        when = datetime.fromisoformat(text)
        return when.replace(tzinfo=when.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        raise HTTPException(
            400,
            f"'{name}' must be seconds since 1970, a moment such as 2026-11-30T12:00:00Z, or -6h (before now).",
        ) from None


async def _ask(runtime: Runtime, question: Any) -> list[dict[str, Any]]:
    try:
        return await runtime.ledger.read(question)
    except LedgerClosed as error:
        raise HTTPException(503, str(error)) from None


def _lines(connection: Connection, scope: Scope, by: tuple[str, ...], step: int | None) -> list[dict[str, Any]]:
    parts = by if "outcome" in by else (*by, "outcome")
    kept = query.extent(connection)
    if step is not None and kept and (min(scope.until, kept[1]) - max(scope.since, kept[0])) / step > MOST_STEPS:
        raise HTTPException(400, f"These are more than {MOST_STEPS} steps; ask for less time or a longer 'step'.")
    found: list[Sum] = query.sums(connection, scope, parts, step)
    lines: list[dict[str, Any]] = []
    for (at, *key), outcomes in merged(found, parts, by):
        line = figures(outcomes)
        names = {name: bool(value) if name == "stream" else value for name, value in zip(by, key, strict=True)}
        lines.append(({"at": at} if step else {}) | names | line | hit_rates(line))
    return lines


def _step(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        step = parse_time(text)
    except ValueError:
        step = 0.0
    if step < MINUTE or step % MINUTE:
        raise HTTPException(400, "'step' must be whole minutes, such as 5m or 1h.")
    return int(step)


def _format(asked: Mapping[str, str]) -> str:
    given = asked.get("format", "json")
    if given not in ("json", "csv", "parquet"):
        raise HTTPException(400, "'format' must be json, csv or parquet.")
    if given == "parquet" and not parquet.is_installed():
        raise HTTPException(501, "Parquet needs an extra that is not installed: pip install 'warmgate[parquet]'.")
    return given


def _like(by: tuple[str, ...], step: int | None) -> Line:
    """A line of sums, for the types of its columns."""
    none = figures({})
    names = {name: False if name == "stream" else "" for name in by}
    return ({"at": 0} if step else {}) | names | none | hit_rates(none)


async def _file(lines: list[dict[str, Any]], name: str, form: str, like: Line) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}.{form}"'}
    if form == "csv":
        return Response(as_csv(lines), media_type="text/csv; charset=utf-8", headers=headers)
    data = await asyncio.to_thread(parquet.as_parquet, lines, like)
    return Response(data, media_type=parquet.TYPE, headers=headers)
