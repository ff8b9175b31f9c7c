"""Whether a prompt is split from its answer: by uncached tokens, loads, and the price of moving it."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policies.disaggregation import Decision, Side, decide

IDLE = Side(2000, rate=1000.0)
BUSY = Side(2000, running=8, rate=1000.0)


def choose(
    prompt: int = 2000,
    output: int | None = None,
    prefills: tuple[Side, ...] = (IDLE,),
    decode: Side = BUSY,
    per_token: float = 1e-5,
) -> Decision:
    return decide(prompt, output, prefills, decode, least=256, latency=0.01, per_token=per_token)


def test_a_long_prompt_is_kept_away_from_running_answers() -> None:
    decision = choose()
    assert (decision.prefill, decision.reason) == (0, "split")
    assert decision.whole == 2 + 9 * 2 and math.isclose(decision.split, 2 + 0.01 + 0.02)


def test_a_short_prompt_stays_whole() -> None:
    assert choose(100, decode=replace(BUSY, uncached=100)).reason == "short"


def test_a_warm_prompt_stays_whole_however_long() -> None:
    assert choose(8000, decode=replace(BUSY, uncached=200)).reason == "warm"


def test_an_answer_of_one_token_has_nothing_to_split() -> None:
    assert choose(output=1).reason == "one token"
    assert choose(output=2).reason == "split"


def test_a_long_queue_at_the_prefill_side_keeps_it_whole() -> None:
    jam = replace(IDLE, pending=50_000)
    assert choose(prefills=(jam,)).reason == "prefill busy"
    assert choose(prefills=(jam, IDLE)).prefill == 1
    assert choose(prefills=(jam,), decode=replace(BUSY, running=60)).reason == "split", "many would be held up"


def test_a_slow_network_keeps_it_whole() -> None:
    assert choose(per_token=0.1).reason == "transfer slow"


def test_the_prefill_side_that_holds_more_of_it_is_taken() -> None:
    assert choose(prefills=(IDLE, replace(IDLE, uncached=500))).prefill == 1


def test_what_the_decode_side_holds_need_not_be_moved() -> None:
    held = replace(BUSY, uncached=400)
    assert choose(per_token=0.005).split > choose(per_token=0.005, decode=held).split


sides = st.builds(
    Side,
    uncached=st.integers(0, 100_000),
    pending=st.floats(0, 1e6),
    running=st.integers(0, 1000),
    rate=st.floats(0.1, 1e6),
)


@given(st.integers(1, 100_000), st.none() | st.integers(1, 9999), st.lists(sides, min_size=1, max_size=4), sides)
def test_it_always_decides_and_says_why(prompt: int, output: int | None, prefills: list[Side], decode: Side) -> None:
    decision = decide(prompt, output, prefills, decode, least=256, per_token=1e-5)
    assert (decision.prefill is not None) == (decision.reason == "split")
    assert not math.isnan(decision.whole + decision.split)
    if decision.prefill is not None:
        assert decision.split <= decision.whole
        assert prefills[decision.prefill].seconds == min(side.seconds for side in prefills)
    busier = replace(decode, running=decode.running + 5)
    if decision.reason == "split":
        assert decide(prompt, output, prefills, busier, least=256, per_token=1e-5).reason == "split"
