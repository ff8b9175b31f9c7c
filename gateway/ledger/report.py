"""Sums as people read them: tokens and dollars apart by where they came from, None where nothing is known."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.ledger import counters as c
from gateway.ledger.query import Sum
from gateway.ledger.rows import SAVED
from policies.pricing import PICO

Line = dict[str, Any]


def merged(
    lines: Iterable[Sum], by: Sequence[str], keep: Sequence[str]
) -> list[tuple[tuple[Any, ...], dict[str, Sum]]]:
    """Sums by time and ``keep`` and, within each, by outcome; ``by`` names the parts of the sums' keys, outcome among
    them.
    """
    at = [by.index(name) for name in keep]
    outcome = by.index("outcome")
    found: dict[tuple[Any, ...], dict[str, Sum]] = {}
    for line in lines:
        key = (line.at, *(line.key[index] for index in at))
        kinds = found.setdefault(key, {})
        kind = kinds.setdefault(line.key[outcome], Sum(key[1:], line.at, c.counters()))
        c.add(kind.counts, line.counts)
    return sorted(found.items())


def figures(outcomes: dict[str, Sum]) -> Line:
    """The numbers of one line, from its sums by outcome.

    ``served``: what callers were told their answers hold. ``saved``: of that, what no upstream computed. ``upstream``:
    what calls computed and cost, those that no caller waited for as well.
    """
    every = c.counters()
    saved = c.counters()
    for outcome, line in outcomes.items():
        c.add(every, line.counts)
        if outcome in SAVED:
            c.add(saved, line.counts)
    prompt = every[c.CACHED] + every[c.COMPUTED] + every[c.UNSPLIT]
    told = every[c.CALLS] > every[c.UNKNOWN_USAGE] or not every[c.CALLS]
    split = told and (prompt > every[c.UNSPLIT] or not prompt)
    return {
        "requests": every[c.REQUESTS],
        "hits": saved[c.REQUESTS],
        **_served("served", every),
        **_served("saved", saved),
        "unknown_served": every[c.UNKNOWN_SERVED],
        "calls": every[c.CALLS],
        "upstream_prompt_tokens": prompt if told else None,
        "upstream_output_tokens": every[c.OUTPUT] if told else None,
        "upstream_tokens": prompt + every[c.OUTPUT] if told else None,
        "provider_cached_tokens": every[c.CACHED] if split else None,
        "computed_prompt_tokens": every[c.COMPUTED] if split else None,
        "unsplit_prompt_tokens": every[c.UNSPLIT],
        "cache_write_tokens": every[c.CACHE_WRITE],
        "unknown_usage": every[c.UNKNOWN_USAGE],
        "cost_usd": _dollars(every[c.COST_PICO], every[c.UNKNOWN_COST], every[c.CALLS]),
        "unknown_cost": every[c.UNKNOWN_COST],
        "saved_usd": _dollars(saved[c.SAVED_PICO], saved[c.UNKNOWN_SAVED], saved[c.REQUESTS]),
        "unknown_saved": saved[c.UNKNOWN_SAVED],
        "slo_judged": every[c.SLO_JUDGED],
        "slo_met": every[c.SLO_MET],
        "slo_met_tokens": every[c.SLO_MET_TOKENS],
        "held_out": every[c.HELD_OUT],
        "held_out_judged": every[c.HELD_OUT_JUDGED],
        "held_out_agreed": every[c.HELD_OUT_AGREED],
        **_times("latency", every[c.LATENCY_US], every[c.FIRST_LATENCY : c.FIRST_TTFT]),
        **_times("ttft", every[c.TTFT_US], every[c.FIRST_TTFT :]),
    }


def hit_rates(line: Line) -> Line:
    """Shares of requests and of served tokens that no upstream computed; None where there is nothing to share, or where
    it is not known.
    """
    known = line["served_tokens"] and line["saved_tokens"] is not None
    return {
        "hit_rate": line["hits"] / line["requests"] if line["requests"] else None,
        "token_hit_rate": line["saved_tokens"] / line["served_tokens"] if known else None,
    }


def as_csv(lines: Sequence[Line]) -> str:
    """Lines as CSV with a head; empty where unknown. Cells that a spreadsheet would run as a formula are quoted."""
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _inert(value) for name, value in line.items()} for line in lines)
    return out.getvalue()


def _inert(value: Any) -> Any:
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _served(name: str, counts: c.Counters) -> Line:
    """Tokens that callers were told; None where nobody told anything."""
    prompt, output = counts[c.SERVED_PROMPT], counts[c.SERVED_OUTPUT]
    known = bool(prompt or output or not counts[c.UNKNOWN_SERVED])
    return {
        f"{name}_prompt_tokens": prompt if known else None,
        f"{name}_output_tokens": output if known else None,
        f"{name}_tokens": prompt + output if known else None,
    }


def _dollars(pico: int, unknown: int, of: int) -> float | None:
    """Dollars as far as known; None where nothing of it is."""
    return None if unknown and unknown == of else pico / PICO


def _times(name: str, micros: int, buckets: Sequence[int]) -> Line:
    count = sum(buckets)
    return {
        f"{name}_count": count,
        f"{name}_mean": micros / 1e6 / count if count else None,
        f"{name}_p50": c.quantile(0.5, buckets),
        f"{name}_p95": c.quantile(0.95, buckets),
    }
