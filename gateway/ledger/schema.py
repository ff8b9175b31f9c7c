"""The tables of the ledger's file.

``rollups`` holds every group's counters by minute, quarter of an hour and hour (``span`` in seconds), so that a month
adds up as quickly as an hour; ``totals`` holds them since the file was begun, never pruned, for Prometheus.
"""

from __future__ import annotations

from gateway.ledger.counters import COLUMNS

VERSION = 2
MINUTE, HOUR = 60, 3600
SPANS = (HOUR, 15 * MINUTE, MINUTE)
"""Lengths of the buckets that counters are kept in, seconds, each a multiple of the next."""
GROUP = ("tenant", "model", "endpoint", "upstream", "outcome", "stream")
"""What counters are kept apart by."""
ROW = (
    *("ended", "tenant", "model", "endpoint", "upstream", "outcome", "stream", "status", "latency", "ttft"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "reason", "request_id", "prompt", "held_out", "cost_pico"),
)

_COUNTERS = ", ".join(f"{name} INTEGER NOT NULL" for name in COLUMNS)
_ADDED = ", ".join(f"{name} = {name} + excluded.{name}" for name in COLUMNS)
_PLACES = ", ".join("?" * len(COLUMNS))

CREATE = f"""
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL, upstream TEXT NOT NULL,
    outcome TEXT NOT NULL, stream INTEGER NOT NULL, UNIQUE ({", ".join(GROUP)})
);
CREATE TABLE IF NOT EXISTS rollups (
    span INTEGER NOT NULL, bucket INTEGER NOT NULL, grp INTEGER NOT NULL, {_COUNTERS}, PRIMARY KEY (span, bucket, grp)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (grp INTEGER PRIMARY KEY, {_COUNTERS});
CREATE TABLE IF NOT EXISTS reasons (
    span INTEGER NOT NULL, bucket INTEGER NOT NULL, grp INTEGER NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (span, bucket, grp, reason)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
    id INTEGER PRIMARY KEY, ended REAL NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
    upstream TEXT NOT NULL, outcome TEXT NOT NULL, stream INTEGER NOT NULL, status INTEGER NOT NULL,
    latency REAL NOT NULL, ttft REAL, prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER,
    reason TEXT NOT NULL, request_id TEXT NOT NULL, prompt TEXT NOT NULL, held_out TEXT NOT NULL, cost_pico INTEGER
);
CREATE INDEX IF NOT EXISTS held_out_rows ON rows (ended) WHERE held_out != '';
CREATE TABLE IF NOT EXISTS workers (worker TEXT PRIMARY KEY, seen REAL NOT NULL, vitals TEXT NOT NULL);
PRAGMA user_version = {VERSION};
COMMIT;
"""

ADD_ROLLUP = f"""
INSERT INTO rollups VALUES (?, ?, ?, {_PLACES}) ON CONFLICT (span, bucket, grp) DO UPDATE SET {_ADDED}
"""
ADD_TOTAL = f"INSERT INTO totals VALUES (?, {_PLACES}) ON CONFLICT (grp) DO UPDATE SET {_ADDED}"
ADD_REASON = """
INSERT INTO reasons VALUES (?, ?, ?, ?, ?) ON CONFLICT (span, bucket, grp, reason) DO UPDATE SET
count = count + excluded.count
"""
ADD_ROW = f"INSERT INTO rows ({', '.join(ROW)}) VALUES ({', '.join('?' * len(ROW))})"
ADD_GROUP = f"INSERT OR IGNORE INTO groups ({', '.join(GROUP)}) VALUES (?, ?, ?, ?, ?, ?)"
FIND_GROUP = f"SELECT id FROM groups WHERE ({', '.join(GROUP)}) = (?, ?, ?, ?, ?, ?)"
SET_WORKER = "INSERT OR REPLACE INTO workers VALUES (?, ?, ?)"
