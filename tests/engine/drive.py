"""Drives an `EngineCore` by hand: submit generations, step until they are done, collect what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core import EngineCore, Generation
from engine.output import Delta
from engine.sampling import SamplingParams
from engine.sequence import Sequence

GREEDY = SamplingParams(temperature=0)


@dataclass
class Result:
    """Everything one generation gave."""

    sequence: Sequence
    text: str = ""
    reason: str | None = None
    cached: int = 0
    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.sequence.prompt_length :]


def submit(core: EngineCore, job: Generation) -> Result:
    """Queues a job; `advance` fills the result."""
    return Result(core.add(job))


def run_all(core: EngineCore, jobs: Iterable[Generation]) -> dict[str, Result]:
    """Runs all jobs to their end, together. Fails if a step makes no progress."""
    results = {job.id: submit(core, job) for job in jobs}
    while core.busy:
        advance(core, results)
    return results


def advance(core: EngineCore, results: dict[str, Result]) -> None:
    """One step; its deltas go into `results`."""
    for job, delta in core.step():
        result = results[job]
        result.text += delta.text
        result.reason, result.cached = delta.finish_reason, delta.cached_tokens
        result.deltas.append(delta)


def run(core: EngineCore, job: Generation) -> Result:
    """Runs one job alone."""
    return run_all(core, [job])[job.id]
