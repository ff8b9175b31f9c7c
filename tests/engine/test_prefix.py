"""Prefix reuse on the device: what is shared, what never is, and that reuse never changes an answer by a single bit.

Blocks hold 4 tokens, prefill chunks 8 (see `tiny.config`). The reference is the same request with every cache off.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from cache.prefix.blocks import chain
from engine.core import EngineCore, Generation
from engine.kv.manager import BlockManager, NoEvents
from engine.sampling import SamplingParams
from engine.scheduler import Step
from engine.sequence import Sequence
from tests.engine import tiny
from tests.engine.drive import GREEDY, advance, run, run_all, submit

CHUNK = 8
PLAIN = tiny.core(prefix_reuse=False, speculate="off")


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def job(name: str, ids: list[int], *, tokens: int = 6, salt: bytes = b"", priority: int = 0) -> Generation:
    return Generation(name, ids, tokens, GREEDY, salt=salt, priority=priority, ignore_eos=True)


def reference(ids: list[int], tokens: int = 6) -> list[int]:
    return run(PLAIN, job("ref", ids, tokens=tokens)).tokens


@pytest.fixture
def core() -> EngineCore:
    return tiny.core()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 60])
def test_o66_warm_equals_cold_at_every_border(core: EngineCore, length: int) -> None:
    ids = prompt(length)
    cold, warm = run(core, job("a", ids)), run(core, job("b", ids))
    assert cold.tokens == warm.tokens == reference(ids)
    assert cold.cached == 0
    assert warm.cached == (length - 1) // CHUNK * CHUNK  # at least the last token is computed again
    core.check_integrity()


def collect_logits(core: EngineCore, seen: list[torch.Tensor]) -> None:
    """Appends to `seen` all logits from which a token is chosen."""
    compute = core.runner.run

    def spy(step: Step) -> list[tuple[Sequence, torch.Tensor]]:
        results = compute(step)
        seen.extend(logits for _, logits in results)
        return results

    core.runner.run = spy  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_gives_bitwise_the_same_logits(dtype: str) -> None:
    core = tiny.core(dtype=dtype, speculate="off")
    seen: list[torch.Tensor] = []

    collect_logits(core, seen)
    ids = prompt(30)
    run(core, job("a", ids, tokens=3))
    run(core, job("b", ids, tokens=3))
    run(core, job("c", ids[:24] + prompt(9, 5), tokens=3))
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:6], strict=True))
    assert not torch.equal(seen[0], seen[6])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scattered_blocks_give_bitwise_the_same_logits_as_a_single_run(dtype: str) -> None:
    seen: list[torch.Tensor] = []

    def serve(every: int) -> list[int]:
        core = tiny.core(32, dtype=dtype, speculate="off")
        taken = core.manager.allocate(core.manager.total)
        assert taken is not None
        core.manager.release(taken[::every][::-1])  # the first released is the first taken
        collect_logits(core, seen)
        result, blocks = submit(core, job("a", prompt(45), tokens=3)), []
        while core.busy:
            blocks = list(result.sequence.blocks)
            advance(core, {"a": result})
        return blocks

    assert serve(1) == list(range(12))
    assert serve(2) == list(range(0, 24, 2))
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


def test_a_common_prefix_is_shared_and_the_rest_is_not(core: EngineCore) -> None:
    head = prompt(20)
    run(core, job("a", head + prompt(10, 1)))
    other = head + prompt(10, 2)
    result = run(core, job("b", other))
    assert result.cached == 16
    assert result.tokens == reference(other)


def test_o56_one_changed_token_at_the_head_shares_nothing(core: EngineCore) -> None:
    ids = prompt(40)
    run(core, job("a", ids))
    assert run(core, job("b", [(ids[0] + 1) % 256, *ids[1:]])).cached == 0


def test_o40_tenants_share_nothing_and_compute_as_if_cold(core: EngineCore) -> None:
    ids = prompt(40)
    run(core, job("a", ids, salt=b"T1"))
    before = core.counters.computed_tokens
    other = run(core, job("b", ids, salt=b"T2"))
    assert other.cached == 0
    assert core.counters.computed_tokens - before == 40
    assert run(core, job("c", ids)).cached == 0
    assert run(core, job("d", ids, salt=b"T1")).cached == 32


def test_two_waiting_requests_prefill_a_common_prefix_once(core: EngineCore) -> None:
    head = prompt(40)
    asks = [job(str(i), head + prompt(5, i + 1)) for i in range(4)]
    results = run_all(core, asks)
    assert core.counters.computed_tokens == 40 + 4 * 5
    for ask in asks:
        assert results[ask.id].tokens == reference(list(ask.prompt))


def test_a_common_prefix_is_taken_over_when_its_first_request_is_cancelled(core: EngineCore) -> None:
    head = prompt(40)
    ask = job("b", head + prompt(5, 2))
    results = {"a": submit(core, job("a", head + prompt(5, 1))), "b": submit(core, ask)}
    advance(core, results)
    core.cancel("a")
    while core.busy:
        advance(core, results)
    assert results["b"].tokens == reference(list(ask.prompt))
    core.check_integrity()


def test_o58_colliding_hashes_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    four_bits = partial(chain, hash_function=lambda digest: bytes([digest[0] & 15]))
    monkeypatch.setattr("engine.core.chain", four_bits)
    core = tiny.core(blocks=200)
    heads = [prompt(16, seed) for seed in range(10)]
    for number in range(200):
        ids = heads[number % 10] + prompt(4, number)
        assert run(core, job(str(number), ids, tokens=2)).tokens == reference(ids, 2)
    assert core.manager.collisions > 0
    core.check_integrity()


def test_blocks_written_by_decode_are_never_shared(core: EngineCore) -> None:
    ids = prompt(9)
    answer = run(core, job("a", ids, tokens=30)).tokens
    follow = [*ids, *answer, *prompt(4, 1)]
    result = run(core, job("b", follow))
    assert result.cached == 8
    assert result.tokens == reference(follow)


def test_o65_blocks_in_use_survive_eviction_pressure() -> None:
    core = tiny.core(blocks=16)
    held = prompt(17)
    run(core, job("warm", held))
    ask = job("held", held, tokens=30)
    results = {"held": submit(core, ask)}
    for number in range(20):
        filler = job(f"f{number}", prompt(12, number + 10), tokens=2)
        results[filler.id] = submit(core, filler)
        advance(core, results)
        core.check_integrity()
    while core.busy:
        advance(core, results)
    assert results["held"].tokens == reference(held, 30)
    assert core.manager.evictions > 0
    assert core.manager.free == 16


def test_tails_are_evicted_before_heads() -> None:
    core = tiny.core(blocks=12)
    ids = prompt(33)
    run(core, job("a", ids, tokens=1))
    run(core, job("b", prompt(20, 1), tokens=1))
    assert 0 < run(core, job("c", ids, tokens=1)).cached < 32


def test_preemption_changes_nothing_but_time() -> None:
    core = tiny.core(blocks=16)
    asks = [job(str(i), prompt(10 + i, i), tokens=25) for i in range(5)]
    results = run_all(core, asks)
    assert core.scheduler.preemptions > 0
    for ask in asks:
        assert results[ask.id].tokens == reference(list(ask.prompt), 25)
    assert core.manager.free == 16


def test_priority_goes_first_and_equals_stay_in_order() -> None:
    core = tiny.core(max_running=1)
    asks = [job("late", prompt(9, 1)), job("later", prompt(9, 2)), job("first", prompt(9, 3), priority=-1)]
    results = {ask.id: submit(core, ask) for ask in asks}
    order: list[str] = []
    while core.busy:
        advance(core, results)
        order += [name for name, result in results.items() if result.reason and name not in order]
    assert order == ["first", "late", "later"]


def test_sampled_answers_do_not_depend_on_reuse_or_company(core: EngineCore) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=11, frequency_penalty=0.5)
    ids = prompt(30)
    alone = run(core, Generation("a", ids, 20, params, ignore_eos=True)).tokens
    crowd = [Generation("b", ids, 20, params, ignore_eos=True), *(job(f"x{i}", prompt(12, i)) for i in range(5))]
    assert run_all(core, crowd)["b"].tokens == alone


def test_a_reset_while_running_leaves_the_running_alone(core: EngineCore) -> None:
    ids = prompt(40)
    results = {"a": submit(core, job("a", ids, tokens=20))}
    for _ in range(6):
        advance(core, results)
    core.reset_prefix_cache()
    core.check_integrity()
    while core.busy:
        advance(core, results)
    assert results["a"].tokens == reference(ids, 20)
    assert run(core, job("b", ids)).cached == 0


def test_integrity_checks_can_fail(core: EngineCore) -> None:
    core.add(job("a", prompt(9)))
    core.step()
    assert core.manager.allocate(1)
    with pytest.raises(AssertionError):
        core.check_integrity()
    assert BlockManager(4, NoEvents()).allocate(5) is None
