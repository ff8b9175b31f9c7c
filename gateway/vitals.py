"""What one worker says of itself, once a second, to all others: loads, tiers, circuits, and counts that the ledger does
not keep. `/metrics` and the dashboard of any worker show them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.ledger import LedgerClosed
from gateway.ledger.query import vitals as kept_vitals
from gateway.ledger.store import WORKER_GONE
from gateway.runtime import Runtime

Vitals = dict[str, Any]
FORM = 7
"""Raised whenever the words change, since workers of two versions may share a ledger for a while."""


def vitals(runtime: Runtime) -> Vitals:
    """This worker's own, as of now."""
    memory, shared = runtime.memory, runtime.shared
    settings = runtime.config.cache.memory
    return {
        "form": FORM,
        "flights": len(runtime.flights),
        "memory": None
        if memory is None or settings is None
        else {
            "bytes": memory.bytes,
            "max_bytes": settings.max_bytes,
            "entries": len(memory),
            "evictions": memory.evictions,
        },
        "store": None
        if shared is None
        else {"name": shared.name, "circuit": shared.breaker.state, "calls": shared.counters},
        "upstreams": {
            member.name: {
                "in_flight": member.in_flight,
                "elsewhere": member.elsewhere,
                "kv_use": member.kv_use,
                "pending": member.engine.pending,
                "ejected": member.health.ejected,
                "models": sorted(member.known_models or ()),
            }
            for member in runtime.pool.members
        },
        "routing": runtime.router.told_of(),
        "splits": runtime.splits.counts,
        "not_stored": runtime.not_stored,
        "bad_entries": runtime.recall.bad_entries,
        "sentinels": runtime.board.told(),
        "misses": {
            "since": runtime.misses_since,
            "causes": runtime.misses.causes,
            "fields": dict(runtime.misses.fields.most_common(20)),
            "uncacheable_repeats": runtime.misses.uncacheable_repeats,
        },
        "prefixes": runtime.prefix_health.told(),
        "trust": runtime.trust.told(),
        "ledger": {"problem": runtime.ledger.problem, "dropped": runtime.ledger.dropped},
        "otlp": {"problem": runtime.otlp.problem, "lost": runtime.otlp.lost} if runtime.otlp is not None else None,
        "access_log": {"problem": runtime.access_log.problem, "dropped": runtime.access_log.dropped},
    }


def packed(runtime: Runtime) -> str:
    """This worker's own as JSON."""
    return orjson.dumps(vitals(runtime)).decode()


async def of_all_workers(runtime: Runtime) -> dict[str, Vitals]:
    """Each living worker's, by its name; only this one's where the ledger cannot be read."""
    since = runtime.clock.time() - WORKER_GONE
    try:
        found = await runtime.ledger.read(lambda connection: kept_vitals(connection, since))
    except LedgerClosed:
        found = []
    return unpacked(found) | {runtime.ledger.worker: vitals(runtime)}


def unpacked(found: Iterable[tuple[str, str]]) -> dict[str, Vitals]:
    """Vitals as they were kept; a worker of another version speaks another form, and is left out."""
    told = {worker: orjson.loads(text) for worker, text in found}
    return {worker: words for worker, words in told.items() if words.get("form") == FORM}
