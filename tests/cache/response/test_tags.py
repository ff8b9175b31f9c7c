"""Purging by generation: what a purge covers, and what it leaves."""

import pytest

from cache.response.tags import EVERYTHING, Generations, before, scopes_of, soft

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


def test_a_soft_purge_makes_older_entries_stale_and_leaves_newer_ones() -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(soft("tag:a"), 100_000)
    assert generations.softened(stamped, 99.9)
    assert not generations.softened(stamped, 100.1)
    assert generations.alive(stamped, 99.9)


def test_before_ends_or_softens_all_that_is_older_than_a_moment() -> None:
    generations = Generations()
    stamped = generations.stamp(SCOPES)
    generations.learn(soft(before(60)), 1)
    generations.learn(before(50), 1)
    assert not generations.alive(stamped, 49)
    assert generations.alive(stamped, 51)
    assert generations.softened(stamped, 51)
    assert not generations.softened(stamped, 61)
