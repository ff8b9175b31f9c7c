"""A stored answer loses nothing on its way: what is split for a stream joins to the very same message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.response.canonical import spell
from gateway.dialects import DIALECTS, Dialect
from tests.gateway.dialects import strategies
from tests.gateway.dialects.reading import collect, joined, plain_of, stream_of

CHAT, COMPLETIONS = DIALECTS["/v1/chat/completions"], DIALECTS["/v1/completions"]
MESSAGES, RESPONSES = DIALECTS["/v1/messages"], DIALECTS["/v1/responses"]
ANSWERS: list[tuple[Dialect, st.SearchStrategy[dict[str, Any]]]] = [
    (CHAT, strategies.chat_answers),
    (COMPLETIONS, strategies.completion_answers),
    (MESSAGES, strategies.message_answers),
    (RESPONSES, strategies.response_answers),
]
EXAMPLES = 50
EACH = pytest.mark.parametrize(("dialect", "answers"), ANSWERS, ids=lambda part: getattr(part, "name", ""))


@EACH
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_what_is_split_joins_to_the_same_message(
    dialect: Dialect, answers: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    message = data.draw(answers)
    assert spell(joined(dialect, stream_of(dialect, message))) == spell(message)


@EACH
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_the_plain_form_differs_from_what_was_read_only_in_what_is_the_callers_own(
    dialect: Dialect, answers: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    message = data.draw(answers)
    replayed = plain_of(dialect, message)
    assert {name: value for name, value in replayed.items() if name in message} == message
    own = ("id", "created", "created_at", "metadata", "user", "store", "safety_identifier")
    assert replayed.keys() - message.keys() <= {*own, "prompt_cache_key", "prompt_cache_retention"}


@EACH
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data(), size=st.integers(1, 7))
def test_borders_between_network_chunks_do_not_matter(
    dialect: Dialect, answers: st.SearchStrategy[dict[str, Any]], data: st.DataObject, size: int
) -> None:
    stream = stream_of(dialect, data.draw(answers))
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    answer, asked, _ = collect(dialect, parts)
    assert asked == stream
    assert answer.message == collect(dialect, stream)[0].message


@EACH
@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_a_stream_without_its_end_is_never_a_message(
    dialect: Dialect, answers: st.SearchStrategy[dict[str, Any]], data: st.DataObject
) -> None:
    stream = stream_of(dialect, data.draw(answers))
    events = stream.split(b"\n\n")[:-1]
    kept = data.draw(st.integers(0, len(events) - 1))
    answer, _, _ = collect(dialect, b"".join(event + b"\n\n" for event in events[:kept]))
    assert answer.message is None
    assert answer.outcome.fault.startswith("incomplete")
