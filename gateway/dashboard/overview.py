"""The numbers of the dashboard: all that the page shows of one span of time, read at once so that they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from gateway import effective, judging, reporting
from gateway.ladder import report as ladder_report
from gateway.ledger import OUTCOMES, SAVED, query
from gateway.ledger import counters as c
from gateway.ledger.query import HeldOut, Scope, Sum
from gateway.ledger.report import Line, figures, hit_rates, merged
from gateway.ledger.schema import MINUTE
from gateway.ledger.store import WORKER_GONE
from gateway.prefix_health import report as prefix_report
from gateway.runtime import Runtime
from gateway.sentinels.report import report
from gateway.vitals import Vitals, unpacked, vitals
from policies import savings
from policies.pricing import PICO

MINUTES, HOURS, DAYS = 60, 3600, 86_400
RANGES: dict[str, tuple[int, int, float]] = {
    "15m": (15 * MINUTES, MINUTE, 2),
    "1h": (HOURS, MINUTE, 2),
    "6h": (6 * HOURS, 5 * MINUTES, 5),
    "24h": (DAYS, 15 * MINUTES, 10),
    "7d": (7 * DAYS, 2 * HOURS, 30),
    "30d": (30 * DAYS, 6 * HOURS, 60),
}
"""What can be asked for: its length, the length of one step, and how often it is told anew, all in seconds."""
RECENT = 50
REASONS = 12

_BY = ("outcome", "stream", "tenant", "model", "upstream")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a viewer looks at; ``tenant`` and ``model`` None: all."""

    range: str
    tenant: str | None
    model: str | None
    operator: bool

    @property
    def where(self) -> dict[str, str]:
        """The parts of the group that must have a value."""
        wanted = {"tenant": self.tenant, "model": self.model}
        return {name: value for name, value in wanted.items() if value is not None}


async def overview(runtime: Runtime, asked: Asked) -> dict[str, Any]:
    """Everything the page shows; raises `gateway.ledger.LedgerClosed`."""
    now = runtime.clock.time()
    facts = effective.facts_of(runtime, RANGES[asked.range][0]) if asked.operator else {}
    found = await runtime.ledger.read(lambda connection: _found(connection, asked, now, facts))
    kept = unpacked(found.pop("vitals")) | {runtime.ledger.worker: vitals(runtime)}
    found["agreement"] = judging.report(runtime, kept, asked.tenant)
    if asked.operator:
        found |= _machinery(kept, found.pop("by_upstream"))
        found["sentinels"] = report(kept, now)
        found["ladder"] = await _ladder(runtime, kept)
        found["prefixes"] = prefix_report(told["prefixes"] for told in kept.values())
    else:
        del found["by_upstream"], found["tenants"]
    found["slo"] = _service_levels(runtime, found["models"], found["range"])
    found["ledger"] = {"problem": runtime.ledger.problem, "shared": runtime.ledger.shared}
    found["setup"] = {
        "priced": runtime.config.prices is not None,
        "open": runtime.tenants.is_open,
        "models": sorted({name for m in runtime.pool.members for name in m.known_models or ()}),
        "ttl": runtime.config.cache.ttl,
    }
    return found


async def _ladder(runtime: Runtime, workers: dict[str, Vitals]) -> dict[str, Any]:
    told = [vitals["misses"] for vitals in workers.values()]
    return ladder_report(told, await reporting.outcomes(runtime, min(one["since"] for one in told)) or {})


def _found(connection: Connection, asked: Asked, now: float, facts: dict[str, effective.Facts]) -> dict[str, Any]:
    length, step, _ = RANGES[asked.range]
    until = int(now) // step * step + step
    since = until - length
    scope = Scope(since, until, asked.where)
    groups = query.sums(connection, scope, _BY)
    before = query.sums(connection, Scope(since - length, since, asked.where), ("outcome",))
    steps = query.sums(connection, scope, ("outcome",), step)
    only_own = {"tenant": asked.tenant} if asked.tenant is not None and not asked.operator else {}
    return {
        "now": now,
        "range": {"since": since, "until": until, "step": step},
        "total": _one(groups, _BY),
        "before": _one(before, ("outcome",)),
        "hits": _one([line for line in groups if line.key[0] in SAVED], _BY),
        "upstream": _one([line for line in groups if line.key[0] in ("miss", "bypass")], _BY),
        "outcomes": _lines(groups, ("outcome",)),
        "speed": _lines(groups, ("outcome", "stream")),
        "models": _lines(groups, ("model",)),
        "tenants": _lines(groups, ("tenant",)),
        "by_upstream": _lines(groups, ("upstream",)),
        "series": _series(steps, range(since, until, step)),
        **({"effective": effective.lines(connection, scope, now, facts)} if asked.operator else {}),
        "savings": _savings(query.held_out(connection, scope), groups),
        "reasons": query.reasons(connection, scope)[:REASONS],
        "recent": query.rows(connection, Scope(since, until, asked.where), RECENT),
        "questions": query.questions(connection, scope, REASONS),
        "choices": {
            "tenants": query.names(connection, "tenant", only_own),
            "models": query.names(connection, "model", only_own),
        },
        "vitals": query.vitals(connection, now - WORKER_GONE),
    }


def _lines(groups: Iterable[Sum], keep: Sequence[str]) -> list[Line]:
    """Figures by some parts of the group, those with the most requests first."""
    lines = [
        dict(zip(keep, key, strict=True)) | _with_rates(outcomes) for (_, *key), outcomes in merged(groups, _BY, keep)
    ]
    return sorted(lines, key=lambda line: -line["requests"])


def _one(groups: Iterable[Sum], by: Sequence[str]) -> Line:
    found = merged(groups, by, ())
    return _with_rates(found[0][1] if found else {})


def _with_rates(outcomes: dict[str, Sum]) -> Line:
    line = figures(outcomes)
    return line | hit_rates(line)


def _savings(held_out: list[HeldOut], groups: list[Sum]) -> dict[str, Any]:
    """What a hit saves, from the hits that were sent upstream all the same: estimates with their intervals.

    What hits took is known of all of them, so only what the held-out ones took is estimated.
    """
    hits = _one([line for line in groups if line.key[0] == "exact"], _BY)
    total = _one(groups, _BY)
    latency = savings.mean([one.latency for one in held_out])
    found = {
        "seconds": latency.less(hits["latency_mean"]) if latency and hits["latency_mean"] is not None else None,
        "tokens": savings.mean([one.tokens for one in held_out if one.tokens is not None]),
        "usd": savings.mean([one.cost / PICO for one in held_out if one.cost is not None]),
    }
    agreement = savings.share(total["held_out_agreed"], total["held_out_judged"])
    return {
        "held_out": total["held_out"],
        "hits": hits["requests"],
        "judged": total["held_out_judged"],
        "agreement": agreement,
        "per_hit": found,
        "in_all": {name: each.times(hits["requests"]) if each else None for name, each in found.items()},
    }


def _series(steps: list[Sum], moments: range) -> dict[str, Any]:
    """The same figures step by step; zero where nothing happened, None where nothing can be said."""
    at: dict[int, dict[str, Sum]] = {moment: {} for moment in moments}
    for line in steps:
        if line.at in at:
            at[line.at][line.key[0]] = line
    lines = [_with_rates(outcomes) for outcomes in at.values()]

    def of(name: str) -> list[Any]:
        return [line[name] for line in lines]

    def share(wanted: Callable[[str], bool], first: int, last: int, quantile: float) -> list[float | None]:
        found = []
        for outcomes in at.values():
            counts = [line.counts[first:last] for outcome, line in outcomes.items() if wanted(outcome)]
            found.append(c.quantile(quantile, [sum(column) for column in zip(*counts, strict=True)]))
        return found

    spans = {"latency": (c.FIRST_LATENCY, c.FIRST_TTFT), "ttft": (c.FIRST_TTFT, len(c.COLUMNS))}
    kinds: dict[str, Callable[[str], bool]] = {
        "hit": lambda outcome: outcome in SAVED,
        "upstream": lambda outcome: outcome in ("miss", "bypass"),
    }
    return {
        "at": list(moments),
        "requests": {
            outcome: [outcomes[outcome].counts[c.REQUESTS] if outcome in outcomes else 0 for outcomes in at.values()]
            for outcome in OUTCOMES
        },
        **{
            name: of(name)
            for name in (
                *("hit_rate", "token_hit_rate", "saved_tokens", "served_tokens", "saved_usd", "cost_usd"),
                *("provider_cached_tokens", "computed_prompt_tokens", "unsplit_prompt_tokens"),
                *("upstream_output_tokens", "slo_judged", "slo_met"),
            )
        },
        "times": {
            f"{time}_{kind}_{name}": share(wanted, *span, quantile)
            for time, span in spans.items()
            for kind, wanted in kinds.items()
            for name, quantile in (("p50", 0.5), ("p95", 0.95))
        },
    }


def _machinery(workers: dict[str, Vitals], by_upstream: list[Line]) -> dict[str, Any]:
    """Tiers and upstreams, over all workers: sums of what each has, and the worst of what each sees."""
    memories = [told["memory"] for told in workers.values() if told["memory"] is not None]
    stores = [told["store"] for told in workers.values() if told["store"] is not None]
    figures_of = {line["upstream"]: line for line in by_upstream}
    names = dict.fromkeys(name for told in workers.values() for name in told["upstreams"])
    calls: dict[str, dict[str, int]] = {}
    for store in stores:
        for call, results in store["calls"].items():
            for result, count in results.items():
                calls.setdefault(call, {})[result] = calls.get(call, {}).get(result, 0) + count
    circuits = [store["circuit"] for store in stores]
    return {
        "workers": len(workers),
        "tiers": {
            "memory": {name: sum(memory[name] for memory in memories) for name in memories[0]} if memories else None,
            "store": {
                "name": stores[0]["name"],
                "circuit": next((state for state in ("open", "half-open") if state in circuits), "closed"),
                "calls": calls,
            }
            if stores
            else None,
            "flights": sum(told["flights"] for told in workers.values()),
            "problems": sorted({told["ledger"]["problem"] for told in workers.values()} - {""}),
        },
        "upstreams": [
            {
                "name": name,
                "in_flight": sum(told["upstreams"].get(name, {}).get("in_flight", 0) for told in workers.values()),
                "models": next(
                    iter(told["upstreams"][name]["models"] for told in workers.values() if name in told["upstreams"]),
                    [],
                ),
                **(figures_of.get(name) or _with_rates({})),
            }
            for name in names
        ],
    }


def _service_levels(runtime: Runtime, models: list[Line], span: dict[str, int]) -> list[Line]:
    """Goodput of each model that has a service level: what reached its users in time, per second."""
    seconds = max(1.0, min(runtime.clock.time(), span["until"]) - span["since"])
    return [
        {
            "model": line["model"],
            "judged": line["slo_judged"],
            "met": line["slo_met"],
            "requests_per_second": line["slo_met"] / seconds,
            "tokens_per_second": line["slo_met_tokens"] / seconds,
        }
        for line in models
        if line["slo_judged"]
    ]
