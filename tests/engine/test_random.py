"""A model-based random test: thousands of rounds of submit, cancel, evict and reset on tiny pools.

Every finished request must equal its cache-off reference token for token, and every block must come back.
"""

from __future__ import annotations

import random

import pytest

from cache.prefix.blocks import Block
from engine.core import EngineCore, Generation
from engine.decoding import MakeDecoder, TorchDecoder, quickest_decoder
from engine.kv.manager import NoEvents
from engine.sampling import SamplingParams
from tests.engine import tiny
from tests.engine.drive import GREEDY, Result, advance, run, submit

DECODERS: dict[str, MakeDecoder] = {"quickest": quickest_decoder, "torch": TorchDecoder}
REFERENCES = {
    name: tiny.core(blocks=64, prefix_reuse=False, speculate="off", make_decoder=make)
    for name, make in DECODERS.items()
}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3)


class HeadsLast(NoEvents):
    """Sees to it that no block is evicted before those behind it, but for what is in use."""

    core: EngineCore
    seen = 0

    def removed(self, block: Block) -> None:
        manager = self.core.manager
        for tail in manager.indexed():
            place = manager.find(tail)
            assert tail.parent != block.digest or (place is not None and manager.is_held(place))
        self.seen += 1


class Machine:
    """Random actions on one engine, checked against what is known."""

    def __init__(self, seed: int, blocks: int, decoder: str) -> None:
        self.rng = random.Random(seed)
        self.order, self.reference = HeadsLast(), REFERENCES[decoder]
        most, make = self.rng.choice([1, 3, 8]), DECODERS[decoder]
        self.core = tiny.core(blocks=blocks, max_running=most, events=self.order, make_decoder=make)
        self.order.core = self.core
        assert self.core.drafter is not None
        self.core.drafter.timed = lambda rows, seconds: None  # type: ignore[method-assign]  # no clock decides here
        self.heads = [[self.rng.randrange(256) for _ in range(self.rng.randrange(4, 40))] for _ in range(5)]
        self.results: dict[str, Result] = {}
        self.jobs: dict[str, Generation] = {}
        self.checked = 0

    def submit(self) -> None:
        rng = self.rng
        ids = rng.choice(self.heads) + [rng.randrange(256) for _ in range(rng.randrange(1, 14))]
        longest = self.core.context - len(ids)
        job = Generation(
            id=str(len(self.jobs)),
            prompt=ids,
            max_tokens=min(rng.randrange(1, 24), longest),
            sampling=rng.choice([GREEDY, GREEDY, SAMPLED]),
            salt=rng.choice([b"", b"", b"T1"]),
            priority=rng.choice([0, 0, 0, 1, -1]),
        )
        self.jobs[job.id] = job
        self.results[job.id] = submit(self.core, job)

    def cancel(self) -> None:
        if running := self.core.jobs():
            job = self.rng.choice(running)
            self.core.cancel(job)
            del self.results[job]

    def step(self) -> None:
        advance(self.core, self.results)

    def act(self) -> None:
        actions = [self.step, self.submit, self.cancel, self.core.reset_prefix_cache]
        [action] = self.rng.choices(actions, [70, 22, 6, 2])
        if action == self.submit and len(self.core.jobs()) > 12:
            action = self.step
        action()
        self.core.check_integrity()

    def check_finished(self) -> None:
        for name, result in list(self.results.items()):
            if result.reason is not None:
                del self.results[name]
                job = self.jobs[name]
                plain = Generation("ref", job.prompt, job.max_tokens, job.sampling)
                expected = run(self.reference, plain)
                assert (result.tokens, result.text, result.reason) == (expected.tokens, expected.text, expected.reason)
                self.checked += 1


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("seed", "blocks"), [(1, 14), (2, 16), (3, 24), (4, 40)])
def test_random_lives_end_as_their_references_do(seed: int, blocks: int, decoder: str) -> None:
    machine = Machine(seed, blocks, decoder)
    for _ in range(800):
        machine.act()
        machine.check_finished()
    while machine.core.busy:
        machine.step()
        machine.core.check_integrity()
    machine.check_finished()
    assert not machine.results
    assert machine.checked > 30 and machine.order.seen > 30
    assert machine.core.manager.free == blocks
    assert machine.core.drafter is not None
    assert machine.core.drafter.accepted > 0
