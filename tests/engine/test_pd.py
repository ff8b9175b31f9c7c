"""A prompt computed on one engine and decoded on another: the same numbers as on one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engine.core import Generation
from engine.errors import ModelError
from engine.guide import Grammars
from engine.sampling import SamplingParams
from tests.engine import tiny
from tests.engine.drive import GREEDY, advance, submit
from tests.engine.split import Engine, computed_elsewhere, counts, drive, job, prompt, reports, run, source, split
from tests.waiting import wait_until


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 16, 23, 24, 25, 100, 128])
def test_a_split_run_computes_nothing_of_the_prompt_and_gives_the_same_numbers(engine: Engine, length: int) -> None:
    sampling = SamplingParams(temperature=0, top_logprobs=5)
    one, other = engine(), engine()
    [result] = split(one, other, job(prompt(length), sampling=sampling))
    [whole] = run(tiny.core(), job(prompt(length), sampling=sampling))
    assert (result.tokens, result.text, reports(result)) == (whole.tokens, whole.text, reports(whole))
    assert other.counters.computed_tokens == 0
    assert result.deltas[-1].cached_by == {"transfer": length}


def test_a_hundred_mixed_requests_are_the_same_split_or_whole(engine: Engine) -> None:
    one, other, alone = engine(blocks=256), engine(blocks=256), tiny.core(blocks=256)
    grammars = Grammars(tiny.tokenizer(), tiny.SPEC.vocab)
    rng = random.Random(5)
    for number in range(100):
        tokens = prompt(rng.randrange(1, 140), rng.randrange(3))  # some begin with others
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            seed=number,
            top_p=rng.choice([1.0, 0.8]),
            top_logprobs=rng.choice([None, 0, 3]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            min_tokens=rng.choice([0, 4]),
        )
        fields: dict[str, Any] = {"stops": rng.choice([(), ("a",), ("e", "\n")]), "ignore_eos": rng.random() < 0.5}
        fields |= {"max_tokens": rng.randrange(1, 20), "salt": rng.choice([b"", b"x"]), "sampling": sampling}
        if rng.random() < 0.2:
            fields["guide"] = grammars.guide({"type": "json_object"})
            fields |= {"ignore_eos": False, "sampling": replace(sampling, min_tokens=0)}

        def choices(n: int, tokens: list[int] = tokens, fields: dict[str, Any] = fields) -> list[Generation]:
            guide = fields.get("guide")
            made = [job(tokens, id=f"j{i}", **{**fields, "guide": guide and guide.copy()}) for i in range(n)]
            return [
                replace(each, sampling=replace(each.sampling, seed=(each.sampling.seed or 0) + i))
                for i, each in enumerate(made)
            ]

        n = rng.choice([1, 1, 3])
        got, expected = split(one, other, *choices(n)), run(alone, *choices(n))
        for a, b in zip(got, expected, strict=True):
            assert (a.tokens, a.text, a.reason) == (b.tokens, b.text, b.reason), number
            numbers = [[report.logprob for report in reports(result)] for result in (a, b)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-4), number  # batches differ in their order
    assert other.counters.computed_tokens == 0
    assert counts(other)["complete"] == 100


def test_choices_of_one_request_share_one_fetch(engine: Engine) -> None:
    one, other = engine(), engine()
    results = split(one, other, *(job(prompt(50), id=f"j{i}") for i in range(3)))
    assert counts(one) == {"offered": 1, "sent": 1}
    assert counts(other) == {"complete": 1}
    assert len({tuple(result.tokens) for result in results}) == 1


def test_what_the_decode_side_holds_is_not_sent_again(engine: Engine) -> None:
    one, other = engine(), engine()
    run(other, job(prompt(40)))
    before = other.counters.computed_tokens
    [result] = split(one, other, job(prompt(40) + prompt(30, 1)))
    assert result.deltas[-1].cached_by == {"device": 40, "transfer": 30}
    assert other.counters.computed_tokens == before


def test_a_transferred_prefix_can_be_found_by_others(engine: Engine) -> None:
    one, other = engine(), engine()
    split(one, other, job(prompt(50)))
    [result] = run(other, job(prompt(50) + prompt(9, 1)))
    assert result.deltas[-1].cached_by == {"device": 48}, "whole chunks only"
    [whole] = run(tiny.core(), job(prompt(50) + prompt(9, 1)))
    assert result.tokens == whole.tokens


def test_a_long_prompt_is_taken_up_bit_by_bit_beside_others(engine: Engine) -> None:
    one, other = engine(), engine(blocks=128)
    params = computed_elsewhere(one, job(prompt(200)))
    results = {"a": submit(other, job(prompt(5), id="a", max_tokens=40))}
    advance(other, results)
    results["b"] = submit(other, job(prompt(200), id="b", source=source(params)))
    pull = results["b"].sequence.pull
    assert pull is not None
    wait_until(lambda: pull.done)
    steps = 0
    while not results["b"].deltas:
        advance(other, results)
        steps += 1
        assert len(results["a"].deltas) == steps + 1, "the other went on"
    assert steps == 4, "50 blocks, at most 16 in one step"
    drive(other, results)
    [whole] = run(tiny.core(), job(prompt(200)))
    assert results["b"].tokens == whole.tokens


def test_a_preempted_sequence_computes_its_prompt_again(engine: Engine) -> None:
    one, other = engine(), engine(blocks=32)
    params = computed_elsewhere(one, job(prompt(40), max_tokens=60))
    results = {"a": submit(other, job(prompt(30, 1), id="a", max_tokens=60))}
    advance(other, results)
    results["b"] = submit(other, job(prompt(40), id="b", max_tokens=60, source=source(params)))
    pull = results["b"].sequence.pull
    assert pull is not None
    wait_until(lambda: pull.done)
    drive(other, results)
    assert other.scheduler.preemptions
    alone = tiny.core()
    for name, tokens in (("a", prompt(30, 1)), ("b", prompt(40))):
        [whole] = run(alone, job(tokens, max_tokens=60))
        assert results[name].tokens == whole.tokens


def test_offered_blocks_are_not_written_over(engine: Engine) -> None:
    one, other = engine(blocks=40), engine()
    params = computed_elsewhere(one, job(prompt(100)))
    for seed in range(1, 6):  # more than the rest of the pool
        run(one, job(prompt(40, seed)))
    [result] = run(other, job(prompt(100), source=source(params)))
    assert result.tokens == run(tiny.core(), job(prompt(100)))[0].tokens
    assert counts(other) == {"complete": 1}


def test_no_more_is_staged_than_half_the_pool(engine: Engine) -> None:
    one, other = engine(blocks=256), engine(blocks=64)
    jobs = [job(prompt(80, seed), id=f"j{seed}") for seed in range(4)]  # 20 blocks each
    all_params = [computed_elsewhere(one, each) for each in jobs]
    results = {
        each.id: submit(other, replace(each, source=source(params)))
        for each, params in zip(jobs, all_params, strict=True)
    }
    started = [result.sequence.pull is not None and result.sequence.pull.started for result in results.values()]
    assert started == [True, False, False, False]
    drive(other, results)
    alone = tiny.core()
    for each in jobs:
        assert results[each.id].tokens == run(alone, each)[0].tokens
    assert counts(other) == {"complete": 4}


@pytest.mark.parametrize("address", ["here", "0.0.0.0:0", "[::]:1", "127.0.0.1:99999", "192.0.2.1:80"])
def test_an_impossible_address_is_one_sentence(address: str) -> None:
    with pytest.raises(ModelError, match=r"KV"):
        tiny.core(kv_transfer=address)


def test_nothing_ends_an_answer_before_its_least_length(engine: Engine) -> None:
    one, other = engine(), engine()
    ends = SamplingParams(temperature=0, logit_bias={256: 100.0})  # the end, at once
    assert [len(run(one, job(prompt(9), sampling=ends, ignore_eos=False))[0].tokens)] == [1]
    [result] = split(one, other, job(prompt(9), sampling=replace(ends, min_tokens=5), ignore_eos=False))
    assert 256 not in result.tokens[:5] and (result.tokens[5:], result.reason) == ([256], "stop")
    [free] = run(one, job(prompt(9)))
    stop = one.tokenizer.bytes_of(free.tokens[0]).decode("latin-1")
    [stopped] = split(one, other, job(prompt(9), stops=(free.text[:1],), sampling=replace(GREEDY, min_tokens=3)))
    assert len(stopped.tokens) > 3 and stopped.text[:1] == free.text[:1], stop
