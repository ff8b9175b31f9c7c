"""The hit-rate ladder: what an ideal cache would reach, and to what the rest is lost (`policies.misses`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

from cache.response.canonical import spell
from gateway.http import Request
from gateway.ledger import SAVED
from gateway.plan import Plan
from gateway.upstreams.prompt import canonical_text
from policies.misses import MEANS, Seen

_PROMPT = frozenset(("messages", "input", "prompt", "tools", "functions", "instructions", "system"))


def seen(plan: Plan) -> Seen:
    """A cacheable request as the ladder sees it."""
    body, excluded = plan.body, plan.dialect.excluded
    fields = {
        name: xxh3_64_intdigest(spell(value))
        for name, value in body.items()
        if name not in _PROMPT and name not in excluded
    }
    fields["x-warmgate-namespace"] = xxh3_64_intdigest(plan.namespace.encode())
    return Seen(plan.identity.key, xxh3_64_intdigest(canonical_text(body)[0]), plan.caller.tenant, fields)


def uncacheable(request: Request, tenant: str) -> int:
    """A request that takes no part in the cache as the ladder sees it."""
    return xxh3_64_intdigest(request.body, xxh3_64_intdigest(tenant.encode()))


def report(told: Iterable[Mapping[str, Any]], outcomes: Mapping[str, int]) -> dict[str, Any]:
    """For the operator. ``told``: the misses by cause of each living worker; ``outcomes``: requests in the ledger since
    the oldest of them began. What was missed by workers that are gone is ``unexplained``.
    """
    told = list(told)
    causes, fields = Counter[str](), Counter[str]()
    for one in told:
        causes.update(one["causes"])
        fields.update(one["fields"])
    hits = sum(count for outcome, count in outcomes.items() if outcome in SAVED)
    misses = max(outcomes.get("miss", 0), causes.total())
    asked = hits + misses - causes["declined"]
    lost = {cause: causes[cause] for cause in MEANS if cause not in ("first", "declined")}
    return {
        "since": min((one["since"] for one in told), default=None),
        "asked": asked,
        "hits": hits,
        "hit_rate": round(hits / asked, 4) if asked else None,
        "ideal_rate": round((asked - causes["first"]) / asked, 4) if asked else None,
        "first": causes["first"],
        "lost": [
            {"to": cause, "requests": count, "rate": round(count / asked, 4) if asked else 0.0, "means": MEANS[cause]}
            for cause, count in lost.items()
        ],
        "unexplained": misses - causes.total(),
        "fields": [{"field": name, "requests": count} for name, count in fields.most_common(20)],
        "uncacheable_repeats": sum(one["uncacheable_repeats"] for one in told),
    }
