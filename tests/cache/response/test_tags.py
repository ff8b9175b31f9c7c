"""Purging by generation: what a purge covers, and what it leaves."""

import pytest

from cache.response.tags import EVERYTHING, MARKS, Generations, before, scopes_of, soft

SCOPES = scopes_of(key=b"\x01" * 16, tenant="t1", namespace="n", model="m1", tags=("a", "b"))


@pytest.mark.parametrize(
    "scope", [EVERYTHING, "tenant:t1", "model:m1", "namespace:t1/n", "tag:a", "tag:b", "key:" + "01" * 16]
)
def test_a_purge_of_any_of_its_scopes_ends_an_entry(scope: str) -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    assert generations.alive(stamped, 100)
    generations.learn(scope, 5)
    assert not generations.alive(stamped, 100)
    assert generations.alive(generations.stamp(SCOPES), 100), "an entry made after the purge lives"


@pytest.mark.parametrize(
    "scope", ["tenant:t2", "model:m2", "namespace:t1/other", "namespace:t2/n", "tag:c", "key:" + "02" * 16]
)
def test_a_purge_of_anything_else_leaves_it(scope: str) -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(scope, 5)
    assert generations.alive(stamped, 100)


def test_an_entry_stamped_before_a_purge_was_heard_of_is_dead_once_it_is() -> None:
    """Another process purges, we store under the old generation, then we hear of it: the answer may be older than the
    purge.
    """
    here = Generations()
    stamped = here.stamp(SCOPES)
    here.learn("model:m1", 7)
    assert not here.alive(stamped, 100)


def test_an_entry_stamped_elsewhere_after_a_purge_not_yet_heard_of_is_not_served() -> None:
    there = Generations()
    there.learn("model:m1", 7)
    stamped = there.stamp(SCOPES)
    here = Generations()
    here.learn("tag:zzz", 1)
    assert not here.alive(stamped, 100)
    here.learn("model:m1", 7)
    assert here.alive(stamped, 100)


def test_generations_never_go_back() -> None:
    generations = Generations()
    generations.learn("model:m1", 7)
    stamped = generations.stamp(SCOPES)
    generations.learn("model:m1", 3)
    assert generations.alive(stamped, 100)


def test_a_soft_purge_makes_older_entries_stale_from_its_moment_on_and_leaves_newer_ones() -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(soft("tag:a"), 100_000)
    assert generations.fresh_until(stamped, 90, expires=200) == 100
    assert generations.fresh_until(stamped, 90, expires=95) == 95, "what had expired before expired then"
    assert generations.fresh_until(generations.stamp(SCOPES), 100, expires=200) == 200
    assert generations.alive(stamped, 90)


def test_a_second_soft_purge_reaches_what_was_made_after_the_first() -> None:
    generations = Generations()
    generations.learn(soft("tag:a"), 100_000)
    stamped = generations.stamp(SCOPES)
    generations.learn(soft("model:m1"), 100_001)
    assert generations.fresh_until(stamped, 100, expires=200) == 100.001
    assert generations.alive(stamped, 100)


def test_purges_that_no_store_numbers_never_share_a_generation() -> None:
    """Two purges in one millisecond, and an answer made between them."""
    generations = Generations()
    generations.purge("tag:a", now=100)
    stamped = generations.stamp(SCOPES)
    generations.purge("tag:a", now=100)
    assert not generations.alive(stamped, 100)


def test_before_ends_or_softens_all_that_is_older_than_a_moment() -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(soft(before(60)), 70_000)
    generations.learn(before(50), 70_000)
    assert not generations.alive(stamped, 49)
    assert generations.alive(stamped, 51)
    assert generations.fresh_until(stamped, 51, expires=200) == 70
    assert generations.fresh_until(stamped, 61, expires=200) == 200


@pytest.mark.parametrize("scope", [soft("tag:a"), soft(before(95))])
def test_what_is_stale_is_not_made_fresher_by_purging_it_softly_again(scope: str) -> None:
    """Else it could be served stale for ever."""
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(scope, 100_000)
    between = generations.stamp(SCOPES)
    for later in range(MARKS + 5):
        generations.learn(scope if "before" not in scope else soft(before(96 + later)), 101_000 + later)
        assert generations.fresh_until(stamped, 90, expires=200) == 100
    assert generations.fresh_until(between, 95.5, expires=200) <= 101, "of many purges the first count as one"


def test_purges_in_another_order_come_to_the_same() -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(soft(before(60)), 70_000)
    generations.learn(soft(before(50)), 65_000)
    assert [generations.fresh_until(stamped, born, expires=200) for born in (49, 55, 61)] == [65, 70, 200]
