"""A block is fetched only where that is expected to be quicker than computing it, and every verdict says why."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.tiering import Cost, Decision, decide

BLOCK = {"block_bytes": 1_000_000, "block_tokens": 32}


def cost(latency: float, per_unit: float, at: float = 0.0) -> Cost:
    learned = Cost()
    learned.observe_latency(latency, at)
    learned.observe(1e6, latency + per_unit * 1e6, at)
    return learned


PREFILL = cost(0.0, 1 / 300)  # 300 tokens/s: 0.107 s a block
HOST = cost(0.0, 1 / 5e9)  # 0.2 ms a block
REDIS = cost(0.002, 1 / 1e9)  # 1 ms a block
FAR = cost(0.5, 1 / 5e6)  # 0.2 s a block: dearer than computing it


def verdict(held, costs, *, prefill=PREFILL, now=1.0, **options) -> Decision:
    return decide(held, costs=costs, prefill=prefill, now=now, **{**BLOCK, **options})


def test_quick_tiers_are_used_to_their_end():
    got = verdict([("host", 12), ("redis", 4)], {"host": HOST, "redis": REDIS})
    assert (got.fetch, got.refused, got.reason) == ((("host", 12), ("redis", 4)), (), "faster")
    assert got.fetch_seconds == pytest.approx(12 * 0.0002 + 0.002 + 4 * 0.001, rel=0.01)
    assert got.recompute_seconds == pytest.approx(16 * 32 / 300, rel=0.01)


def test_a_slow_tier_behind_a_quick_one_is_left_out():
    got = verdict([("host", 12), ("far", 4)], {"host": HOST, "far": FAR})
    assert (got.fetch, got.refused, got.reason) == ((("host", 12),), (("far", 4),), "faster")


def test_where_no_tier_is_quicker_all_is_recomputed():
    got = verdict([("far", 40)], {"far": FAR})
    assert (got.fetch, got.refused, got.reason, got.blocks) == ((), (("far", 40),), "slower", 0)


def test_latency_is_worth_paying_for_many_blocks_only():
    slow_start = {"redis": cost(1.0, 1 / 1e9)}
    assert verdict([("redis", 5)], slow_start).reason == "slower"
    assert verdict([("redis", 40)], slow_start).reason == "faster"


def test_a_slow_tier_is_crossed_where_what_lies_behind_it_pays_for_it():
    got = verdict([("far", 1), ("host", 100)], {"far": FAR, "host": HOST})
    assert got.fetch == (("far", 1), ("host", 100))


def test_the_margin_asks_for_a_clear_win():
    even = {"redis": cost(0.0, 0.8 * 32 / 300 / 1e6)}
    assert verdict([("redis", 9)], even).reason == "faster"
    assert verdict([("redis", 9)], even, margin=1.5).reason == "slower"


def test_the_fetch_ends_on_a_step_and_the_rest_is_recomputed():
    got = verdict([("host", 5), ("redis", 4)], {"host": HOST, "redis": REDIS}, step=4)
    assert (got.fetch, got.refused) == ((("host", 5), ("redis", 3)), (("redis", 1),))
    assert verdict([("host", 3)], {"host": HOST}, step=4).reason == "none"


def test_steps_are_counted_from_the_start_of_the_prompt():
    for start, held, fetched in [(1, 7, 7), (1, 6, 3), (3, 1, 1), (3, 0, 0), (5, 2, 0)]:
        assert verdict([("host", held)], {"host": HOST}, step=4, start=start).blocks == fetched
    slow = {"far": cost(0.5, 1 / 5e6, at=-99.0)}
    assert verdict([("far", 7)], slow, step=4, start=2).fetch == (("far", 2),)


def test_what_was_never_measured_is_tried():
    costs = {"host": HOST, "redis": Cost()}
    got = verdict([("host", 2), ("redis", 4)], costs)
    assert (got.blocks, got.reason, got.fetch_seconds) == (6, "unmeasured", None)
    assert got.recompute_seconds is not None
    got = verdict([("far", 4)], {"far": FAR}, prefill=Cost())
    assert (got.blocks, got.reason, got.recompute_seconds) == (4, "unmeasured", None)


def test_a_tier_that_lost_is_probed_with_one_step_from_time_to_time():
    held, costs = [("host", 4), ("far", 8)], {"host": HOST, "far": cost(0.5, 1 / 5e6, at=100.0)}
    assert verdict(held, costs, now=129.0, step=2).fetch == (("host", 4),)
    got = verdict(held, costs, now=130.0, step=2)
    assert (got.fetch, got.reason) == ((("host", 4), ("far", 2)), "probe")
    costs["far"].observe_latency(0.001, now=130.5)
    costs["far"].observe(2e6, 0.003, now=130.5)
    assert verdict(held, costs, now=131.0, step=2).fetch == (("host", 4), ("far", 8))


def test_nothing_held_is_no_decision():
    assert verdict([], {}).reason == "none"
    assert verdict([("host", 0)], {"host": HOST}).reason == "none"


tiers = st.sampled_from(["host", "redis", "far", "unknown"])


@given(st.lists(st.tuples(tiers, st.integers(0, 20)), max_size=4, unique_by=lambda held: held[0]), st.integers(1, 5))
def test_whatever_is_held_the_verdict_is_a_whole_number_of_steps_and_never_dearer_than_computing(held, step):
    costs = {"host": HOST, "redis": REDIS, "far": FAR, "unknown": Cost()}
    got = verdict(held, costs, step=step)
    assert got.blocks % step == 0
    total = dict.fromkeys(costs, 0)
    for tier, count in (*got.fetch, *got.refused):
        assert count > 0
        total[tier] += count
    assert {tier: count for tier, count in total.items() if count} == {t: n for t, n in held if n}
    if got.reason == "faster":
        assert got.fetch_seconds is not None and got.recompute_seconds is not None
        assert got.fetch_seconds < got.recompute_seconds


def test_latency_and_rate_are_learned_from_noisy_measurements():
    rng, learned = random.Random(1), Cost(weight=0.05)
    for at in range(500):
        size = rng.uniform(1e6, 1e7)
        learned.observe_latency(0.001 * rng.uniform(0.9, 1.1), at / 100)
        learned.observe(size, (0.001 + size / 1e9) * rng.uniform(0.9, 1.1), at / 100)
    assert learned.latency == pytest.approx(0.001, rel=0.1)
    assert learned.per_unit == pytest.approx(1e-9, rel=0.1)


def test_one_slow_load_among_many_does_not_decide_but_several_do():
    learned = cost(0.0, 1.0)
    learned.observe(1, 2.0, now=0.0)
    assert learned.estimate(1) == pytest.approx(1.3)
    for _ in range(10):
        learned.observe(1, 2.0, now=0.0)
    assert learned.estimate(1) == pytest.approx(2.0, rel=0.02)


def test_after_a_long_pause_the_first_measurement_counts_most():
    learned = cost(0.0, 1.0, at=0.0)
    learned.observe(1, 100.0, now=60.0)
    assert learned.estimate(1) == pytest.approx(100, rel=0.02)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 1e3)), min_size=1, max_size=30))
def test_an_estimate_is_never_negative_and_grows_with_the_size(measured):
    learned = Cost()
    for at, (size, seconds) in enumerate(measured):
        learned.observe_latency(seconds / 2, at)
        learned.observe(size, seconds, at)
    small, large = learned.estimate(1), learned.estimate(1e9)
    assert small is not None and large is not None
    assert 0 <= small <= large


def test_what_is_no_measurement_is_ignored():
    learned = Cost()
    learned.observe(0, 1.0, 0.0)
    learned.observe(5, -1.0, 0.0)
    learned.observe_latency(-1.0, 0.0)
    assert learned.estimate(5) is None and learned.observed_at is None and learned.latency == 0
