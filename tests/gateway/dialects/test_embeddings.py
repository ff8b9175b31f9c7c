"""Embeddings, item by item, without a gateway around them: items, what is kept of them, and answers put together."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.embeddings import Embeddings, assemble, items_of, kept_items, shares

EMBEDDINGS = Embeddings()


def answer(*vectors: Any, **more: Any) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 6, "total_tokens": 6}
    return orjson.dumps({"object": "list", "data": data, "model": "e-1", "usage": usage, **more})


@pytest.mark.parametrize(
    ("given", "items"),
    [
        ("a", ["a"]),
        (["a", "b", "a"], ["a", "b", "a"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], None),
        ([[]], None),
        (["a", 1], None),
        ([True], None),
        ([1, [2]], None),
        (None, None),
        ({"text": "a"}, None),
    ],
)
def test_items_of_every_form_of_input(given: Any, items: list[Any] | None) -> None:
    assert items_of({"input": given}) == items


def test_what_is_kept_comes_together_in_any_order() -> None:
    read = EMBEDDINGS.read({"input": ["a", "b"]}, answer([0.5], "AAAA"))
    assert read.usage["prompt"] == 6
    first, second = kept_items(read.message or b"")
    whole = orjson.loads(assemble([second, first, second], 9))
    assert [(vector["index"], vector["embedding"]) for vector in whole["data"]] == [
        (0, "AAAA"),
        (1, [0.5]),
        (2, "AAAA"),
    ]
    assert (whole["object"], whole["model"]) == ("list", "e-1")
    assert whole["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert "usage" not in orjson.loads(assemble([first], None))


def test_vectors_belong_to_items_by_their_index_not_by_their_place() -> None:
    swapped = orjson.loads(answer([1.0], [2.0]))
    swapped["data"].reverse()
    read = EMBEDDINGS.read({"input": ["a", "b"]}, orjson.dumps(swapped))
    assert read.message == EMBEDDINGS.read({"input": ["a", "b"]}, answer([1.0], [2.0])).message


@pytest.mark.parametrize(
    "found",
    [
        b"x",
        b"[]",
        b'{"error":{"message":"no"}}',
        answer([1.0]),
        answer([1.0], [2.0], [3.0]),
        answer([1.0], None),
        answer([1.0], [2.0], news="?"),
        answer([1.0], [2.0]).replace(b'"index":1', b'"index":0'),
        answer([1.0], [2.0]).replace(b'"index":1', b'"index":true'),
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_not_kept(found: bytes) -> None:
    assert EMBEDDINGS.read({"input": ["a", "b"]}, found).message is None


@given(
    total=st.integers(0, 10**6),
    items=st.lists(st.text(max_size=20) | st.lists(st.integers(), min_size=1), min_size=1, max_size=50),
)
def test_shares_add_up_to_what_was_counted(total: int, items: list[Any]) -> None:
    found = shares(total, items)
    assert sum(found) == total
    assert len(found) == len(items) and min(found) >= 0


def test_token_lists_have_the_share_of_their_length() -> None:
    assert shares(6, [[1, 2, 3], [4], [5, 6]]) == [3, 1, 2]
