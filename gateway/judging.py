"""Judges what the hold-out has found, over all workers: which places are doubted, and disarmed if the operator wants.

A decision is a generation in the shared store (`Runtime.arm`); whichever worker comes to it first makes it for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from cache.response.tags import parts_of
from gateway.runtime import Runtime
from gateway.sentinels.lights import Light, green, grey, red
from gateway.vitals import of_all_workers
from policies import savings

log = logging.getLogger(__name__)

JUDGE_EVERY = 5.0
"""Seconds between two looks."""
_NAMED = 3


async def keep_judging(runtime: Runtime) -> None:
    """Judges again and again, until cancelled."""
    doubted: set[str] = set()
    while True:
        await asyncio.sleep(JUDGE_EVERY)
        doubted = await judge(runtime, doubted)


async def judge(runtime: Runtime, doubted: set[str]) -> set[str]:
    """Judges once; the places that are doubted now, of which those in ``doubted`` were logged before."""
    now_doubted: set[str] = set()
    for where, (agreed, judged) in _evidence(runtime, await of_all_workers(runtime)).items():
        verdict, disarmed = runtime.trust.verdict(where, agreed, judged), where in runtime.generations.disarmed
        if verdict == "doubted":
            now_doubted.add(where)
            if where not in doubted:
                log.warning("the cache disagrees with upstreams: of %d answers for %s, %d agree", judged, where, agreed)
            if runtime.trust.disarms:
                log.error("disarmed: %s is not answered from the cache until answers agree again", where)
                await runtime.arm(where, armed=False)
        elif verdict == "armed" and disarmed and runtime.trust.disarms:
            log.warning("armed again: of %d answers for %s, %d agree", judged, where, agreed)
            await runtime.arm(where, armed=True)
    return now_doubted


def report(runtime: Runtime, workers: Mapping[str, Mapping[str, Any]], tenant: str | None) -> list[dict[str, Any]]:
    """Each place that is disarmed or was compared lately (of ``tenant``; None: of all), those in trouble first, then
    those with most comparisons. ``agreement`` is the share that agreed, with its 95 % confidence interval.
    """
    evidence = _evidence(runtime, workers)
    lines = []
    for where in evidence.keys() | (runtime.generations.disarmed if runtime.trust.disarms else set()):
        agreed, judged = evidence.get(where, (0, 0))
        owner, namespace, model = parts_of(where)
        if tenant is None or owner == tenant:
            state = runtime.trust.verdict(where, agreed, judged)
            names = {"tenant": owner, "namespace": namespace, "model": model}
            counts = {"judged": judged, "agreed": agreed, "agreement": savings.share(agreed, judged)}
            lines.append({**names, "state": state, **counts})
    order = {"disarmed": 0, "doubted": 1, "armed": 2}
    return sorted(lines, key=lambda line: (order[line["state"]], -line["judged"], line["tenant"], line["model"]))


async def agreement(runtime: Runtime) -> Light:
    """The light of the sentinels."""
    lines = report(runtime, await of_all_workers(runtime), None)
    bad = [line for line in lines if line["state"] != "armed"]
    if bad:
        named = [f"{_name(line)} ({line['state']}: {line['agreed']} of {line['judged']} agree)" for line in bad]
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        cause = f"what is kept and what upstreams answer now differ too often: {', '.join(named[:_NAMED])}{more}"
        return red("agreement", cause, "GET /admin/agreement, cache.max_disagreement")
    if not lines:
        why = "no held-out answer was compared yet" if runtime.config.cache.holdout else "no hit is held out"
        return grey("agreement", why, "cache.holdout")
    return green("agreement")


def _evidence(runtime: Runtime, workers: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """How many answers agreed, and how many were compared, by place, since it was last armed or disarmed."""
    found: dict[str, tuple[int, int]] = {}
    for told in workers.values():
        for where, armed_at, judged, agreed in told["trust"]["seen"]:
            if armed_at == runtime.generations.armed_at(where):
                before = found.get(where, (0, 0))
                found[where] = (before[0] + agreed, before[1] + judged)
    return found


def _name(line: Mapping[str, Any]) -> str:
    return f"model {line['model']} of {'/'.join(filter(None, (line['tenant'], line['namespace'])))}"
