"""Two engines by hand: a prompt on one, its answer on the other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.core import EngineCore, Generation
from engine.pd.wire import Source
from tests.engine.drive import GREEDY, Result, advance, submit

LOCAL = "127.0.0.1:0"
Engine = Callable[..., EngineCore]


def at_rest(core: EngineCore) -> bool:
    core.rest()
    return core.manager.free == core.manager.total


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(256) for _ in range(length)]


def job(tokens: list[int], **fields: Any) -> Generation:
    given = {"id": "j", "max_tokens": 12, "sampling": GREEDY, "ignore_eos": True, **fields}
    return Generation(prompt=tokens, **given)


def drive(core: EngineCore, results: dict[str, Result]) -> dict[str, Result]:
    """Runs an engine until it is done, waiting for what is on its way."""
    while core.busy:
        advance(core, results)
        if core.stalled:
            time.sleep(0.001)
    return results


def run(core: EngineCore, *jobs: Generation) -> list[Result]:
    results = {one.id: submit(core, one) for one in jobs}
    return list(drive(core, results).values())


def computed_elsewhere(core: EngineCore, one: Generation) -> dict[str, Any]:
    """Computes a job's prompt for another engine; gives the parameters."""
    [result] = run(core, replace(one, max_tokens=1, offered=True, guide=None))
    params = result.deltas[-1].transfer
    assert params is not None
    return params


def source(params: dict[str, Any]) -> Source:
    return Source(params["remote_host"], params["remote_port"], bytes.fromhex(params["remote_request_id"]))


def split(one: EngineCore, other: EngineCore, *jobs: Generation) -> list[Result]:
    """Prompts on one engine, answers on the other."""
    params = computed_elsewhere(one, jobs[0])
    return run(other, *(replace(each, source=source(params)) for each in jobs))


def counts(core: EngineCore) -> dict[str, int]:
    assert core.link is not None
    return {event: count for side in core.link.counts().values() for event, count in side.items()}


def reports(result: Result) -> list[Any]:
    return [report for delta in result.deltas for report in delta.logprobs]
