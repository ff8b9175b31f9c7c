"""What would happen to a request, and why: the answer of ``/admin/explain``. Nothing is sent or stored."""

from __future__ import annotations

from typing import Any

from gateway.http import Request
from gateway.plan import Plan
from gateway.runtime import Runtime
from policies.freshness import freshness


async def explanation(runtime: Runtime, plan: Plan, posted: Request) -> dict[str, Any]:
    """``would`` is the outcome; ``reason`` is about the cache, ``faq`` about a curated answer (null: none is kept for
    this question).
    """
    now = runtime.clock.time()
    found = await runtime.recall.find(plan.identity, now, plan.tag_scopes) if plan.may_recall else None
    state = None
    if found is not None:
        entry = found.entry
        expires = runtime.generations.fresh_until(entry.generations, entry.born, entry.expires)
        state = freshness(now - entry.born, expires - now, plan.lifetime.while_revalidate, plan.directives)
    faq, reason = _faq(runtime, plan), plan.verdict.reason
    if faq is not None and faq["served"]:
        would = "faq"
    elif state not in (None, "expired") and runtime.trust.believes(plan):
        would = "hit"
    elif not await runtime.pool.serving(plan.model.target, posted):
        would, reason = "error", f"no upstream serves the model {plan.model.target[:100]!r}"
    else:
        if state is not None and not runtime.trust.believes(plan):
            reason = "disarmed: what is kept here disagrees with upstreams too often (GET /admin/agreement)"
        would = "miss" if plan.verdict.cacheable else "bypass"
    return {
        "would": would,
        "cacheable": plan.verdict.cacheable,
        "reason": reason,
        "faq": faq,
        "key": plan.identity.key.hex() or None,
        "fingerprint": plan.identity.fingerprint.hex() or None,
        "excluded": {name: why for name, why in plan.dialect.excluded.items() if name in plan.body},
        "model": {"asked": plan.model.name, "target": plan.model.target, "revision": plan.model.revision},
        "tenant": plan.caller.tenant,
        "namespace": plan.namespace,
        "tags": plan.tags,
        "ttl": plan.lifetime.ttl,
        "may_store": plan.may_keep,
        "may_join": plan.may_join,
        "entry": None if found is None else {"tier": found.tier, "state": state, "age": now - found.entry.born},
    }


def _faq(runtime: Runtime, plan: Plan) -> dict[str, Any] | None:
    """Whether the curated answer to the last question serves, and else what stands in its way."""
    names = (plan.model.name, plan.model.target)
    kept = runtime.faq.find(plan.question, names, runtime.clock.time()) if plan.question else None
    if kept is None:
        return None
    if not plan.may_serve:
        reason = "the caller wants a new answer (Cache-Control)"
    elif runtime.curated(plan) is not None:
        return {"served": True, "reason": "the question is a curated one"}
    elif len(plan.dialect.ask(plan.body).turns) != 1:
        reason = "more than the question is said: a system prompt or other turns could change the answer"
    else:
        reason = "the request asks for more than a curated text can give" + _culprit(plan, kept.answer)
    return {"served": False, "reason": reason}


def _culprit(plan: Plan, answer: str) -> str:
    """The one field that stands in the way, where it is one."""
    for name in plan.body:
        rest = {other: value for other, value in plan.body.items() if other != name}
        if plan.dialect.curated(rest, plan.model.target, answer) is not None:
            return f": {name}"
    return ""
