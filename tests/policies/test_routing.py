"""Routing: the cheapest engine wins, no engine is buried, and every figure stays a figure."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.routing import SLACK, Ask, Engine, PrefixPolicy, Reason, make_policy, settle_rates

NAMES = ("prefix", "load", "round_robin", "sticky")


def prefix_policy(ratio: float = 1.3, seed: int = 0) -> PrefixPolicy:
    return PrefixPolicy(random.Random(seed).randrange, ratio)


def engines(count: int) -> list[Engine]:
    return [Engine(f"e{i}") for i in range(count)]


def route(policy: PrefixPolicy, fleet: list[Engine], ask: Ask, now: float = 0.0) -> tuple[str, Reason]:
    decision = policy.choose(fleet, ask, now)
    return fleet[decision.index].name, decision.reason


ENGINE = st.builds(
    Engine,
    name=st.sampled_from("abcdefgh"),
    weight=st.floats(0.01, 100),
    prefill_rate=st.floats(0.1, 1e7),
    pending=st.floats(0, 1e9),
    running=st.integers(0, 10_000),
)
FLEETS = st.lists(ENGINE, min_size=1, max_size=8)
SHARES = st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 10)), max_size=3)
ASKS = st.builds(
    Ask,
    prompt=st.integers(0, 1_000_000),
    held=st.dictionaries(st.integers(0, 7), SHARES),
    session=st.integers(0, 2**62),
    shared=st.integers(0, 1_000_000),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(fleet=FLEETS, ask=ASKS, now=st.floats(0, 1e9), work=st.floats(0, 1e12))
def test_any_fleet_and_any_request_give_a_decision_in_finite_figures(name, fleet, ask, now, work):
    fleet[0].add_work(work, now / 2)
    decision = make_policy(name, random.Random(0).randrange).choose(fleet, ask, now)
    assert 0 <= decision.index < len(fleet)
    assert 0 <= decision.cached <= ask.prompt
    assert decision.cached + decision.uncached == ask.prompt
    assert all(math.isfinite(engine.work(now)) for engine in fleet)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(asks=st.lists(ASKS, max_size=5))
def test_the_same_calls_give_the_same_choices(name, asks):
    def choices() -> list[int]:
        policy, fleet = make_policy(name, random.Random(7).randrange), engines(5)
        return [policy.choose(fleet, ask, float(at)).index for at, ask in enumerate(asks)]

    assert choices() == choices()


@given(
    count=st.integers(2, 9),
    ratio=st.floats(1, 4),
    ends=st.lists(st.booleans(), min_size=1, max_size=200),
    held=st.integers(0, 1000),
)
def test_no_engine_runs_more_than_its_bound_however_much_it_holds(count, ratio, ends, held):
    fleet, policy = engines(count), prefix_policy(ratio)
    for ended in ends:
        if ended and fleet[0].running:
            fleet[0].running -= 1
            continue
        chosen = fleet[policy.choose(fleet, Ask(1000, {0: ((held, 0.0),)} if held else {}), 0.0).index]
        fair = (sum(engine.running for engine in fleet) + 1) / count
        assert chosen.running <= fair * ratio + SLACK
        chosen.running += 1


def test_no_engine_is_given_more_than_its_bound_of_work_while_busy():
    fleet, policy, given_to = engines(4), prefix_policy(), [0, 0, 0, 0]
    ask = Ask(10_000, {0: ((5000, 0.0),)})  # all share a beginning that one engine holds
    for second in range(1000):
        decision = policy.choose(fleet, ask, float(second))
        fleet[decision.index].add_work(decision.uncached, float(second))
        given_to[decision.index] += decision.uncached
    assert max(given_to) <= 1.35 * sum(given_to) / 4


def test_the_bound_follows_the_weights():
    fleet, policy = engines(2), prefix_policy()
    fleet[1].weight = 3.0
    for _ in range(400):
        fleet[policy.choose(fleet, Ask(10), 0.0).index].running += 1
    assert fleet[0].running <= 1.3 * 100 + SLACK


def test_with_nothing_going_on_the_engine_that_holds_the_prompt_gets_it():
    assert route(prefix_policy(), engines(8), Ask(1000, {5: ((300, 0.0),)})) == ("e5", "prefix")


def test_a_system_prompt_that_one_engine_holds_does_not_draw_every_new_session_there():
    fleet, policy = engines(4), prefix_policy()
    holders: set[int] = set()
    for number in range(40):
        held = dict.fromkeys(holders, ((900, 0.0),))
        index = policy.choose(fleet, Ask(1000, held, number + 1, shared=900), float(number)).index
        fleet[index].add_work(100 if index in holders else 1000, float(number))
        fleet[index].running += 1
        holders.add(index)
    assert holders == {0, 1, 2, 3}
    assert max(engine.running for engine in fleet) <= 1.3 * 10


def test_what_a_session_alone_holds_counts_for_more_than_what_all_share():
    held = {0: ((900, 0.0),), 1: ((700, 0.0),)}
    assert route(prefix_policy(), engines(2), Ask(1000, held, shared=500)) == ("e0", "prefix")


def test_more_held_wins_over_less_held():
    assert route(prefix_policy(), engines(3), Ask(1000, {0: ((300, 0.0),), 2: ((900, 0.0),)})) == ("e2", "prefix")


def test_a_queue_that_outweighs_what_is_held_sends_it_elsewhere():
    fleet = engines(2)
    fleet[0].pending = 5000
    assert route(prefix_policy(), fleet, Ask(1000, {0: ((900, 0.0),)})) == ("e1", "load")
    fleet[0].pending = 500
    assert route(prefix_policy(), fleet, Ask(1000, {0: ((900, 0.0),)})) == ("e0", "prefix")


def test_the_busy_engine_does_not_win_by_holding_little_of_other_prompts():
    fleet, policy = engines(2), prefix_policy()
    fleet[0].running = 50
    for _ in range(20):
        fleet[policy.choose(fleet, Ask(20), 0.0).index].running += 1
    assert fleet[1].running >= 18


def test_a_tier_counts_by_what_fetching_from_it_costs():
    quick, slow = ((900, 1e-6),), ((900, 1.0),)
    policy, fleet = prefix_policy(), engines(3)
    assert route(policy, fleet, Ask(1000, {0: slow, 1: quick})) == ("e1", "prefix")
    fleet[2].pending = -1  # a hair's breadth better than one whose tier is too slow to use
    assert policy.choose(fleet, Ask(1000, {0: slow}), 0.0).index in (1, 2)


def test_past_the_bound_the_reason_says_so():
    fleet = engines(4)
    fleet[0].running = 40
    assert route(prefix_policy(), fleet, Ask(10_000, {0: ((9999, 0.0),)}))[1] == "bound"


def test_when_every_engine_is_past_the_bound_one_is_chosen_all_the_same():
    fleet = engines(2)
    for engine in fleet:
        engine.running = 10_000
    assert route(prefix_policy(), fleet, Ask(10))[1] in ("load", "prefix")


def test_a_session_goes_home_when_nothing_else_speaks_and_leaves_when_home_is_busy():
    fleet, policy = engines(8), prefix_policy()
    home, reason = route(policy, fleet, Ask(1000, session=77))
    assert reason == "session"
    assert {route(policy, fleet, Ask(1000, session=77))[0] for _ in range(20)} == {home}
    next(engine for engine in fleet if engine.name == home).pending = 1000
    assert route(policy, fleet, Ask(1000, session=77))[0] != home


def test_sessions_spread_and_hardly_any_moves_when_an_engine_leaves():
    policy, fleet = make_policy("sticky", random.Random(0).randrange), engines(8)
    sessions = [random.Random(i).getrandbits(60) | 1 for i in range(2000)]
    before = [fleet[policy.choose(fleet, Ask(1, session=s), 0.0).index].name for s in sessions]
    after = [fleet[:7][policy.choose(fleet[:7], Ask(1, session=s), 0.0).index].name for s in sessions]
    assert max(before.count(engine.name) for engine in fleet) < 1.3 * 2000 / 8
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "e7")


def test_equal_engines_share_new_prompts_evenly():
    fleet, policy = engines(4), prefix_policy()
    for _ in range(100):
        chosen = fleet[policy.choose(fleet, Ask(1000), 0.0).index]
        chosen.running += 1
        chosen.pending += 1000
    assert {engine.running for engine in fleet} == {25}


class TestRates:
    def test_before_anything_is_measured_nothing_changes(self):
        fleet = engines(3)
        settle_rates(fleet)
        assert {engine.prefill_rate for engine in fleet} == {5000.0}

    def test_an_engine_that_was_never_timed_is_taken_to_be_like_the_others(self):
        fleet = engines(3)
        fleet[0].timed(1000)
        fleet[1].timed(1000)
        settle_rates(fleet)
        assert [engine.prefill_rate for engine in fleet] == pytest.approx([1000] * 3)

    def test_one_bad_measurement_starves_nobody(self):
        fleet = engines(4)
        for engine in fleet[1:]:
            for _ in range(10):
                engine.timed(1500)
        fleet[0].timed(100)
        settle_rates(fleet)
        assert fleet[0].prefill_rate > 900

    def test_many_measurements_show_who_is_slow(self):
        fleet = engines(2)
        for _ in range(100):
            fleet[0].timed(500)
            fleet[1].timed(4000)
        settle_rates(fleet)
        assert fleet[0].prefill_rate < 1000
        assert fleet[1].prefill_rate > 2500

    @given(st.lists(st.tuples(st.integers(0, 3), st.floats(1e-3, 1e12)), max_size=60))
    def test_rates_stay_within_what_was_measured(self, seen):
        fleet = engines(4)
        for index, rate in seen:
            fleet[index].timed(rate)
        settle_rates(fleet)
        rates = [rate for _, rate in seen] or [5000.0]
        for engine in fleet:
            assert min(rates) * 0.99 <= engine.prefill_rate <= max(rates) * 1.01


def test_past_work_fades():
    engine = Engine("e")
    engine.add_work(1000, now=0.0)
    assert engine.work(120.0) == pytest.approx(500)
    engine.add_work(-9999, now=120.0)
    assert engine.work(120.0) == 0


def test_round_robin_takes_turns_and_least_load_takes_the_idlest():
    fleet = engines(3)
    turns = make_policy("round_robin", random.Random(0).randrange)
    assert [turns.choose(fleet, Ask(1), 0.0).index for _ in range(4)] == [0, 1, 2, 0]
    fleet[0].running, fleet[1].running, fleet[2].running = 2, 0, 1
    assert make_policy("load", random.Random(0).randrange).choose(fleet, Ask(1), 0.0).index == 1
