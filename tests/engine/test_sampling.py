"""Choosing tokens: each parameter does what its name says, and a seed repeats exactly."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def draws(count: int = 2000, prompt: list[int] | None = None, **params: float) -> Counter[int]:
    """Tokens drawn, each by a fresh sampler, so that penalties see no history."""
    return Counter(
        Sampler(SamplingParams(seed=seed, **params), prompt or []).choose(LOGITS)  # type: ignore[arg-type]
        for seed in range(count)
    )


def test_greedy_takes_the_largest() -> None:
    assert draws(3, temperature=0) == {0: 3}


def test_draws_follow_the_softmax_at_a_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(LOGITS / temperature, 0)
        got = draws(temperature=temperature)
        for token in range(5):
            assert abs(got[token] / 2000 - float(expected[token])) < 0.04


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert set(draws(top_k=2)) == {0, 1}
    assert set(draws(top_p=0.5)) == {0}  # the likeliest alone has 0.64
    assert set(draws(top_p=0.8)) == {0, 1}
    assert set(draws(min_p=0.1)) == {0, 1, 2}
    assert set(draws(top_k=3, top_p=0.8)) == {0, 1}
    for tiny in (1e-9, 1e-46, 5e-324):
        assert set(draws(200, top_p=tiny)) == {0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_next_to_no_temperature_takes_the_largest(temperature: float) -> None:
    assert draws(3, temperature=temperature) == {0: 3}


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=2.0), [])
        return [sampler.choose(torch.zeros(1000)) for _ in range(8)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(None) != run(None)
    assert run(-1) == run(-1)


def test_logit_bias_forces_and_forbids() -> None:
    assert draws(20, logit_bias={4: 100.0}) == {4: 20}  # type: ignore[arg-type]
    assert 0 not in draws(200, logit_bias={0: -100.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_penalties_count_the_output(params: dict[str, float]) -> None:
    sampler = Sampler(SamplingParams(temperature=0, **params), [0, 0, 0])  # type: ignore[arg-type]
    assert [sampler.choose(torch.tensor([2.0, 1.0, -5.0])) for _ in range(2)] == [0, 1]


def test_frequency_grows_and_presence_does_not() -> None:
    once = SamplingParams(temperature=0, presence_penalty=0.6)
    often = SamplingParams(temperature=0, frequency_penalty=0.6)
    logits = torch.tensor([2.0, 1.0])
    by_presence, by_frequency = Sampler(once, []), Sampler(often, [])
    assert [by_presence.choose(logits) for _ in range(4)] == [0, 0, 0, 0]
    assert 1 in [by_frequency.choose(logits) for _ in range(4)]


def test_repetition_penalty_counts_the_prompt_too() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=4.0), [0])
    assert sampler.choose(torch.tensor([2.0, 1.0, 0.4])) == 1
    assert sampler.choose(torch.tensor([-0.1, -0.2, -1.0])) == 0


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.clone()
    Sampler(SamplingParams(logit_bias={0: 5.0}, repetition_penalty=2.0), [1]).choose(logits)
    assert torch.equal(logits, LOGITS)


def test_reports_are_the_models_own_log_probabilities() -> None:
    sampler = Sampler(SamplingParams(temperature=0, logit_bias={4: 100.0}, top_logprobs=2), [])
    report = sampler.report(LOGITS, sampler.choose(LOGITS))
    assert report is not None
    expected = torch.log_softmax(LOGITS, 0)
    assert (report.token, report.logprob) == (4, pytest.approx(float(expected[4])))
    assert report.top == [(0, pytest.approx(float(expected[0]))), (1, pytest.approx(float(expected[1])))]
    assert Sampler(SamplingParams(), []).report(LOGITS, 0) is None
