"""Effective compute of each upstream (`policies.effective`): from the ledger's counters, what it can compute, what it
draws, and what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from sqlite3 import Connection

from gateway.config import ENGINE_UPSTREAM
from gateway.ledger import query
from gateway.ledger.query import Scope
from gateway.ledger.report import Line, figures, merged
from gateway.ledger.schema import MINUTE
from gateway.runtime import Runtime
from gateway.source import FIGURES
from policies.effective import OUTPUT, Tokens, effective

DAY = 86_400


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an upstream beforehand: prompt tokens it computes in a second, what it draws and from which
    source, and what it costs; None where it is not known.
    """

    prefill_per_second: float | None = None
    watts: float | None = None
    power: str = ""
    cost_per_hour: float | None = None


def facts_of(runtime: Runtime, seconds: float) -> dict[str, Facts]:
    """Those of each upstream; what is measured is so over the last ``seconds``."""
    found: dict[str, Facts] = {}
    for member in runtime.pool.members:
        labels = member.config.labels
        rate, watts, cost = (float(labels[name]) if name in labels else None for name in FIGURES)
        power = "configured" if watts is not None else ""
        if watts is None and member.name == ENGINE_UPSTREAM and runtime.config.engine is not None:
            watts = runtime.power.watts(seconds)
            power = runtime.power.source if watts is not None else ""
        found[member.name] = Facts(rate, watts, power, cost)
    return found


def best_minutes(connection: Connection, now: float) -> dict[str, float]:
    """The most that each upstream computed in a minute of the last day, in prompt tokens per second."""
    scope = Scope(int(now) // MINUTE * MINUTE - DAY)
    return {name: most / MINUTE for name, most in query.most_work(connection, scope, OUTPUT).items() if most}


def lines(connection: Connection, scope: Scope, now: float, facts: Mapping[str, Facts]) -> list[Line]:
    """A line for each upstream that is known or was called, over ``scope`` up to ``now`` (unix seconds)."""
    kept = query.extent(connection)
    since = max(scope.since, kept[0]) if kept is not None else scope.since
    seconds = max(0.0, min(now, scope.until) - since)
    best = best_minutes(connection, now)
    by = ("upstream", "outcome")
    groups = {
        key[1]: figures(outcomes) for key, outcomes in merged(query.sums(connection, scope, by), by, ("upstream",))
    }
    names = dict.fromkeys([*facts, *sorted(name for name in groups if name)])
    return [
        _line(name, groups.get(name) or figures({}), facts.get(name, Facts()), best.get(name), seconds)
        for name in names
    ]


def _line(name: str, line: Line, known: Facts, best: float | None, seconds: float) -> Line:
    told = line["unknown_usage"] < line["calls"] or not line["calls"]
    tokens = Tokens(
        line["computed_prompt_tokens"],
        line["provider_cached_tokens"],
        line["unsplit_prompt_tokens"],
        line["upstream_output_tokens"] or 0,
        line["saved_prompt_tokens"],
        line["saved_output_tokens"],
    )
    rate, source = (known.prefill_per_second, "configured") if known.prefill_per_second else (best, "best minute")
    found = effective(tokens, seconds, rate) if rate is not None and told else None
    joules = known.watts * seconds if known.watts is not None else None
    usd = known.cost_per_hour * seconds / 3600 if known.cost_per_hour is not None else line["cost_usd"]
    served = line["served_tokens"]
    return {
        "upstream": name,
        "seconds": seconds,
        "per_second": rate,
        "per_second_source": source if rate is not None else "",
        "engine_seconds": {**asdict(found), "times": found.times} if found is not None else None,
        "tokens": {
            "could_have_computed": rate * seconds if rate is not None else None,
            "computed": tokens.work if told else None,
            "in_time": line["slo_met_tokens"] if line["slo_judged"] else None,
            "saved_by_answers": line["saved_tokens"],
            "saved_by_prefixes": line["provider_cached_tokens"] if told else None,
            "served": served,
        },
        "unknown_usage": line["unknown_usage"],
        "watts": known.watts,
        "power": known.power,
        "served_per_joule": served / joules if joules and served is not None else None,
        "in_time_per_joule": line["slo_met_tokens"] / joules if joules and line["slo_judged"] else None,
        "usd": usd if line["calls"] or known.cost_per_hour is not None else None,
        "served_per_usd": served / usd if usd and served is not None else None,
        "in_time_per_usd": line["slo_met_tokens"] / usd if usd and line["slo_judged"] else None,
    }
