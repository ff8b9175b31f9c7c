"""Specification of `loadtest.simulate`: what is counted, and how the policies compare on traffic of known kind."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.baselines import Lfu, belady_hits
from loadtest.simulate import CACHES, LIMIT, PrefixCache, hit_ratio, infinite_hit_ratio, main
from loadtest.traces import Request

chains = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), min_size=1, max_size=30)


def trace(*prompts: list[int]) -> list[Request]:
    return [Request(at, tuple((block, block) for block in blocks)) for at, blocks in enumerate(prompts)]


def conversations(seed: int, count: int, *, returning: float = 0.6, others: int = 2) -> list[Request]:
    """Chats that share a system prompt of three blocks and return with probability `returning`, amid `others` that
    never do; think times are exponential, so that no age is privileged."""
    rng = random.Random(seed)
    fresh = itertools.count(3)

    def new(blocks: int) -> list[int]:
        return [next(fresh) for _ in range(blocks)]

    waiting: list[list[int]] = []
    prompts: list[list[int]] = []
    while len(prompts) < count:
        prompts += [[0, 1, 2, *new(rng.randint(2, 12))] for _ in range(others)]
        chat = waiting.pop(rng.randrange(len(waiting))) if len(waiting) > 20 else [0, 1, 2, *new(4)]
        prompts.append(chat)
        if rng.random() < returning:
            waiting.append(chat + new(2))
    return trace(*prompts)


def test_only_leading_blocks_count():
    requests = trace([1, 2, 3], [1, 9, 3], [1, 2, 3])
    # The second finds 1 (3 is there, but behind a gap), the third finds all.
    assert infinite_hit_ratio(requests) == 4 / 9
    assert {hit_ratio(requests, name, 100) for name in CACHES} == {4 / 9}


def test_tails_are_evicted_before_heads():
    requests = trace([1, 2, 3, 4], [1, 2, 3, 4])
    assert hit_ratio(requests, "lru", 3) == 3 / 8
    assert hit_ratio(requests, "prefix", 3) == 3 / 8


@pytest.mark.parametrize("name", CACHES)
@given(prompts=chains, capacity=st.integers(1, 8))
def test_no_policy_beats_belady_nor_the_infinite_cache(name: str, prompts: list[list[int]], capacity: int):
    requests = trace(*prompts)
    ratio = hit_ratio(requests, name, capacity)
    assert 0 <= ratio <= hit_ratio(requests, LIMIT, capacity)
    assert ratio <= infinite_hit_ratio(requests)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 3))
def test_belady_is_the_best_of_all_choices(blocks: list[int], capacity: int):
    """Against an exhaustive search over what to keep after each block."""
    states = {frozenset[int](): 0}  # what may be held -> most hits on the way there
    for block in blocks:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            hits += block in held
            for size in range(capacity + 1):
                for kept in map(frozenset, itertools.combinations(held | {block}, size)):
                    following[kept] = max(following.get(kept, 0), hits)
        states = following
    assert belady_hits([blocks], capacity) == max(states.values())


@given(st.lists(st.integers(0, 8), max_size=60), st.integers(1, 4))
def test_lfu_equals_its_definition(requests: list[int], capacity: int):
    policy = Lfu(capacity)
    held: dict[int, tuple[int, int]] = {}  # key -> (uses, when last used)
    for now, key in enumerate(requests):
        if key in held:
            policy.touch(key)
            held[key] = (held[key][0] + 1, now)
        else:
            evicted = []
            if len(held) == capacity:
                evicted = [min(held, key=lambda k: held[k])]
                del held[evicted[0]]
            held[key] = (1, now)
            assert policy.insert(key, 1) == evicted
        assert {k for k in range(9) if k in policy} == held.keys()


@pytest.mark.parametrize("capacity", [100, 300])
def test_on_conversations_amid_one_off_prompts_ours_leads(capacity: int):
    requests = conversations(1, 3000)
    ours = hit_ratio(requests, "prefix", capacity)
    assert ours > max(hit_ratio(requests, name, capacity) for name in ("lru", "lfu", "s3fifo", "sieve"))
    assert hit_ratio(requests, "prefix-pool", capacity) > hit_ratio(requests, "lru", capacity)


def test_where_chains_grow_together_ours_does_not_collapse_as_sieve_does():
    """Interleaved sessions, each longer with every request, as agents make them."""
    rng = random.Random(3)
    fresh = itertools.count()
    prompts: list[list[int]] = []
    sessions: list[list[int]] = []
    for turn in range(2000):
        if turn % 50 == 0:  # one ends, one begins
            sessions = [*sessions[-7:], [next(fresh) for _ in range(20)]]
        grown = sessions[rng.randrange(len(sessions))]
        grown += [next(fresh), next(fresh)]
        prompts.append(list(grown))
    requests = trace(*prompts)
    capacity = 1000
    assert hit_ratio(requests, "sieve", capacity) < 0.5
    assert hit_ratio(requests, "prefix", capacity) > 0.98 * hit_ratio(requests, "lru", capacity) > 0.9


def test_a_prompt_larger_than_the_cache_keeps_its_head():
    cache = PrefixCache(4, refuses=True)
    assert [cache.serve(range(10)), cache.serve(range(10))] == [0, 4]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": [1, 2]}) + "\n" for _ in range(4)))
    assert main(["--trace", str(path), "--policy", "prefix", "belady", "--capacity", "1", "2000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small.jsonl: 4 requests, 8 blocks, 2 distinct."
    assert lines[1] == "A cache that forgets nothing hits .7500."
    assert lines[3:5] == ["| policy | 1 | 2,000 | seconds |", "| --- | --- | --- | --- |"]
    assert [line.split(" | ")[:3] for line in lines[5:]] == [
        ["| prefix", ".3750", ".7500"],
        ["| belady", ".3750", ".7500"],
    ]


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    for wrong in (["--policy", "mru"], ["--capacity", "0"], ["--capacity", "many"]):
        with pytest.raises(SystemExit):
            main(["--trace", "any.jsonl", *wrong])
        assert "error:" in capsys.readouterr().err
