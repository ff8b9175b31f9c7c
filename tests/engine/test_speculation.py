"""O-67: several tokens verified at once, and never another answer; whatever is guessed, wherever the blocks lie.

The reference is the same request without drafts. Drafts come from a list here (always right, always wrong, random), in
the last tests from what was really said before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Rows

import pytest
import torch

from engine.attention import Row
from engine.config import EngineConfig
from engine.core import EngineCore, Generation
from engine.decoding import TorchDecoder
from engine.kv.pool import KVPool
from engine.model.weights import open_model
from engine.sampling import SamplingParams
from engine.sequence import Sequence
from engine.speculate.drafter import Drafter, Drafting
from engine.speculate.exact import ExactRows
from engine.speculate.lookup import Answers, Match, Runs
from policies.speculation import Chances
from tests.engine import tiny
from tests.engine.drive import GREEDY, Result, advance, run, run_all, submit
from tests.engine.test_prefix import job, prompt, reference

Guess = Callable[[Sequence, int], list[int]]


class Oracle(Drafter):
    """Drafts what it is told to, at full length."""

    def __init__(self, most_rows: Callable[[int], int], guess: Guess) -> None:
        super().__init__(most_rows)
        self.guess = guess

    def draft(self, sequence: Sequence, sequences: int, room: int) -> list[int]:
        draft = self.guess(sequence, min(room, sequence.max_tokens - sequence.output_length - 1))
        sequence.drafting = Drafting(Runs([]), Chances(), Match(3, draft, 0))
        return draft


def drafting(guess: Guess, blocks: int = 64) -> EngineCore:
    core = tiny.core(blocks)
    assert core.drafter is not None
    core.drafter = core.scheduler._drafter = Oracle(core.drafter.most_rows, guess)
    return core


def timeless(core: EngineCore) -> EngineCore:
    """Keeps what a row costs here and now out of the decision to draft."""
    assert core.drafter is not None
    core.drafter.timed = lambda rows, seconds: None  # type: ignore[method-assign]
    return core


def right(answers: dict[str, list[int]]) -> Guess:
    return lambda s, most: answers[s.id][s.output_length : s.output_length + max(0, most)]


def wrong(answers: dict[str, list[int]]) -> Guess:
    return lambda s, most: [(token + 1) % 256 for token in right(answers)(s, most)]


def sometimes(answers: dict[str, list[int]]) -> Guess:
    rng = random.Random(1)

    def guess(s: Sequence, most: int) -> list[int]:
        draft = right(answers)(s, most)
        if draft and rng.random() < 0.7:
            draft[rng.randrange(len(draft))] ^= 1
        return draft

    return guess


@pytest.mark.parametrize("kind", [right, wrong, sometimes])
def test_o67_any_draft_gives_the_reference_cold_and_warm_on_scattered_blocks(kind: Callable[..., Guess]) -> None:
    ids = prompt(21)  # the answer crosses the borders of blocks of 4
    answers = {name: reference(ids, 30) for name in "ab"}
    core = drafting(kind(answers))
    taken = core.manager.allocate(core.manager.total)
    assert taken is not None
    core.manager.release(taken[::2])
    for name in "ab":
        result = run(core, job(name, ids, tokens=30))
        assert result.tokens == answers[name]
        assert result.cached == (16 if name == "b" else 0)
        core.manager.check_integrity([taken[1::2]])
    drafter = core.drafter
    assert drafter is not None
    assert drafter.drafted > 0
    assert (drafter.accepted == drafter.drafted) == (kind is right)
    assert (drafter.accepted == 0) == (kind is wrong)


def test_o67_no_block_of_unverified_tokens_can_ever_be_found() -> None:
    ids = prompt(9)
    answers = {"a": reference(ids, 30)}
    core = drafting(wrong(answers))
    result = submit(core, job("a", ids, tokens=30))
    while core.busy:
        advance(core, {"a": result})
        assert all(block.index < 2 for block in core.manager.indexed())  # the prompt's two whole blocks


@pytest.mark.parametrize("kind", [right, wrong, sometimes])
def test_drafts_under_pressure_never_cost_another_sequence_its_blocks(kind: Callable[..., Guess]) -> None:
    asks = [job(str(i), prompt(9 + i, i), tokens=28) for i in range(5)]
    answers = {ask.id: reference(list(ask.prompt), 28) for ask in asks}
    core = drafting(kind(answers), blocks=16)
    results: dict[str, Result] = {ask.id: submit(core, ask) for ask in asks}
    while core.busy:
        advance(core, results)
        core.check_integrity()
    assert {name: result.tokens for name, result in results.items()} == answers
    assert core.scheduler.preemptions > 0
    assert core.manager.free == 16


def test_limits_stops_and_reports_are_as_without_drafts() -> None:
    ids = prompt(12)
    plain = tiny.core(speculate="off")
    whole = run(plain, job("a", ids, tokens=40))
    stop = whole.text[20:23]
    params = SamplingParams(temperature=0, top_logprobs=3)
    for tokens, stops in ((1, ()), (2, ()), (17, ()), (40, (stop,))):
        ask = Generation("a", ids, tokens, params, stops=stops, ignore_eos=True)
        expected, got = run(plain, ask), run(drafting(right({"a": whole.tokens})), ask)
        assert (got.text, got.reason, got.tokens) == (expected.text, expected.reason, expected.tokens)
        assert [d.logprobs for d in got.deltas] == [d.logprobs for d in expected.deltas]


def test_sampled_answers_are_the_same_draws() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, frequency_penalty=0.3, repetition_penalty=1.1)
    ask = Generation("a", prompt(15), 40, params, ignore_eos=True)
    expected = run(tiny.core(speculate="off"), ask).tokens
    for kind in (right, sometimes):
        core = drafting(kind({"a": expected}))
        assert run(core, ask).tokens == expected
        assert core.drafter is not None
        assert core.drafter.accepted > 0


def test_rows_that_would_change_a_bit_are_not_added() -> None:
    core = tiny.core()

    class Careless(TorchDecoder):
        def over(self, pool: KVPool) -> Careless:
            return Careless(core.model, pool)

        def run(self, rows: Rows[Row], layers: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, logits = super().run(rows, layers)
            return hidden * (1 + 1e-6 * (len(rows) > 8)), logits

    exact = ExactRows(core.model, Careless(core.model, core.pool))
    assert [exact.most(rows) for rows in (1, 4, 5, 12, 16)] == [1, 4, 5, 16, 16]


def test_the_longest_match_is_found_and_goes_on_past_its_own_end() -> None:
    text = [1, 2, 3, 4, 9, 7, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    match = Runs(text).longest(text)
    assert match is not None
    assert (match.length, match.guess(3)) == (4, [9, 7, 2])
    loop = [5, 6, 7, 8, 5, 6, 7]
    match = Runs(loop).longest(loop)
    assert match is not None
    assert match.guess(9) == [8, 5, 6, 7, 8, 5, 6, 7, 8]
    assert Runs([1, 2, 3, 4]).longest([1, 2, 3, 4]) is None


def test_answers_are_remembered_for_their_own_tenant_only_and_not_for_ever() -> None:
    answers = Answers()
    answers.add(b"T1", [1, 2, 3], [4, 5, 6])
    match = answers.longest(b"T1", [0, 1, 2, 3])
    assert match is not None
    assert match.guess(8) == [4, 5, 6]
    assert answers.longest(b"T2", [0, 1, 2, 3]) is None
    for number in range(40):
        answers.add(b"T1", [], [1000 * number + at for at in range(1000)])
    assert answers.longest(b"T1", [0, 1, 2, 3]) is None
    assert answers.longest(b"T1", [39_001, 39_002, 39_003]) is not None


def test_a_question_asked_again_is_answered_in_a_few_steps() -> None:
    core = timeless(tiny.core())
    assert core.drafter is not None
    ask = job("a", prompt(20), tokens=60)
    first, before = run(core, ask), core.drafter.accepted
    again = run(core, ask)
    assert again.tokens == first.tokens == reference(prompt(20), 60)
    assert core.drafter.accepted - before > 40


@pytest.mark.real
def test_the_real_model_says_the_same_with_drafts_alone_and_in_company() -> None:
    files = open_model("smollm2-135m-instruct")
    plain, quick = (
        EngineCore(EngineConfig(dtype="bfloat16", speculate=how, kv_bytes=64 << 20, threads=1), files)
        for how in ("off", "auto")
    )
    timeless(quick)
    ids = plain.tokenizer.encode("alpha, beta, gamma, delta. alpha, beta, gamma, delta. alpha, beta, gamma,")
    other = plain.tokenizer.encode("The sea was calm that morning, and the keeper")
    asks = [Generation("loop", ids, 48, GREEDY), Generation("free", other, 48, GREEDY, ignore_eos=True)]
    expected = run_all(plain, asks)
    for _ in range(2):
        got = run_all(quick, asks)
        assert {name: r.tokens for name, r in got.items()} == {name: r.tokens for name, r in expected.items()}
        assert run(quick, asks[1]).tokens == expected["free"].tokens
    assert quick.drafter is not None
    assert quick.drafter.accepted > 48
