"""Text completions: the older form of the same grammar."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.dialects.completions import Completions
from tests.gateway.dialects.reading import DONE, bare_stream_of, collect, data_of, joined, plain_of, sse, stream_of

COMPLETIONS = Completions()
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def chunk(text: str, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, **more}
    return {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def test_texts_and_log_probabilities_join() -> None:
    first = {"tokens": ["Once"], "token_logprobs": [-0.1], "text_offset": [0]}
    second = {"tokens": [" upon"], "token_logprobs": [-0.2], "text_offset": [4]}
    raw = sse(chunk("Once", logprobs=first), chunk(" upon", logprobs=second), chunk("", "stop"), DONE)
    message = joined(COMPLETIONS, raw)
    whole = {"tokens": ["Once", " upon"], "token_logprobs": [-0.1, -0.2], "text_offset": [0, 4]}
    assert message["choices"] == [{"index": 0, "text": "Once upon", "logprobs": whole, "finish_reason": "stop"}]
    assert joined(COMPLETIONS, stream_of(COMPLETIONS, message)) == message
    assert plain_of(COMPLETIONS, message)["object"] == "text_completion"


def test_choices_may_come_mixed() -> None:
    raw = sse(chunk("a", index=1), chunk("b"), chunk("c", index=1), chunk("", "stop"), chunk("", "stop", index=1), DONE)
    assert [choice["text"] for choice in joined(COMPLETIONS, raw, {"n": 2})["choices"]] == ["b", "ac"]


def test_usage_beside_an_empty_choice_is_kept_from_those_who_did_not_ask() -> None:
    raw = sse(chunk("a"), chunk("", "stop"), {**chunk(""), "usage": USAGE}, DONE)
    answer, _, unasked = collect(COMPLETIONS, raw)
    assert answer.usage == {"prompt": 3, "output": 2}
    assert len(data_of(unasked)) == 2
    assert not any("usage" in event for event in data_of(bare_stream_of(COMPLETIONS, joined(COMPLETIONS, raw))))


@pytest.mark.parametrize(
    ("body", "choices", "complete"),
    [
        ({"prompt": "a"}, 1, True),
        ({"prompt": ["a", "b"]}, 1, False),
        ({"prompt": ["a", "b"]}, 2, True),
        ({"prompt": ["a", "b"], "n": 2}, 2, False),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4, True),
        ({"prompt": [1, 2, 3]}, 1, True),
    ],
)
def test_every_prompt_of_a_batch_must_be_answered(body: dict[str, Any], choices: int, complete: bool) -> None:
    found = [{"index": i, "text": "x", "finish_reason": "stop"} for i in range(choices)]
    outcome = COMPLETIONS.read(body, orjson.dumps({"choices": found})).outcome
    assert (outcome.fault == "") == complete
