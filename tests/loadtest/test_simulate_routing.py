"""The routing simulation on a small trace of one's own: what real traces showed must be seen on it too."""

import random

import pytest

from loadtest.simulate_routing import main, simulate
from loadtest.traces import Request

BLOCKS = 40  # what one replica holds


def chats(count: int = 24, turns: int = 6) -> list[Request]:
    """Chats that all begin with block 0 and grow by two blocks a turn, mixed at random."""
    order = [chat for chat in range(count) for _ in range(turns)]
    random.Random(3).shuffle(order)
    lengths = dict.fromkeys(range(count), 0)
    requests = []
    for at, chat in enumerate(order):
        lengths[chat] += 2
        first = 1000 * (chat + 1)
        requests.append(Request(at * 0.2, ((0, 0), (first, first + lengths[chat] - 1)), output_tokens=20))
    return requests


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[float, float]]:
    names = ("round_robin", "load", "sticky", "longest", "prefix")
    found = {name: simulate(chats(), name, 4, BLOCKS) for name in names}
    return {name: (result.hits, result.imbalance) for name, result in found.items()}


def test_pure_longest_match_sends_all_to_one_replica(results):
    """All share a first block: the reason why a prefix may never decide alone."""
    assert results["longest"][1] == 4.0


def test_prefix_routing_reuses_more_than_any_that_ignores_it(results):
    assert results["prefix"][0] > 1.5 * max(results["round_robin"][0], results["load"][0], results["longest"][0])


def test_prefix_routing_keeps_replicas_even(results):
    assert results["prefix"][1] <= 1.3
    assert results["prefix"][0] >= 0.95 * results["sticky"][0]


def test_a_run_repeats_exactly():
    assert simulate(chats(), "prefix", 4, BLOCKS) == simulate(chats(), "prefix", 4, BLOCKS)


def test_a_missing_trace_is_one_sentence(capsys, tmp_path):
    assert main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_policy(capsys, tmp_path):
    lines = (f'{{"timestamp": {i * 100}, "hash_ids": [0, {i % 5}]}}' for i in range(1, 30))
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(lines))
    assert main(["--trace", str(trace), "--replicas", "2", "--capacity", "10"]) == 0
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in ("round_robin", "load", "sticky", "longest", "prefix"))
