"""Curated answers: in every dialect with a lone user turn, and only where no field asks for more than a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.dialects import DIALECTS
from tests.gateway.dialects.reading import collect, plain_of, stream_of
from tests.harness import running_gateway

TEXT = "OpenAI was founded in December 2015."
CHAT, COMPLETIONS = DIALECTS["/v1/chat/completions"], DIALECTS["/v1/completions"]
MESSAGES, RESPONSES = DIALECTS["/v1/messages"], DIALECTS["/v1/responses"]
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "?"}]},
    "completions": {"model": "m", "prompt": "?", "max_tokens": 200},
    "messages": {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "?"}]},
    "responses": {"model": "m", "input": "?", "store": False},
}
ALL = pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS, MESSAGES, RESPONSES], ids=lambda dialect: dialect.name)


@ALL
def test_a_curated_text_is_a_whole_answer_in_both_forms(dialect: Any) -> None:
    curated = dialect.curated(ASKED[dialect.name], "m", TEXT)
    assert curated is not None
    message = orjson.loads(curated)
    assert TEXT in orjson.dumps(plain_of(dialect, message)).decode()
    answer = collect(dialect, stream_of(dialect, message))[0]
    assert answer.outcome.finishes == ("stop",) and answer.outcome.fault == ""
    assert answer.message is not None and orjson.loads(answer.message) == message
    assert dialect.read(ASKED[dialect.name], orjson.dumps(plain_of(dialect, message))).outcome.fault == ""
    assert answer.usage == {} or set(answer.usage.values()) == {0}


@ALL
@pytest.mark.parametrize(
    "harmless", [{"stream": True}, {"temperature": 0.7}, {"user": "u"}, {"tools": None}, {"n": 1}, {"seed": 7}]
)
def test_fields_that_leave_it_a_right_answer(dialect: Any, harmless: dict[str, Any]) -> None:
    assert dialect.curated({**ASKED[dialect.name], **harmless}, "m", TEXT) is not None


@ALL
@pytest.mark.parametrize(
    "more",
    [{"tools": [{}]}, {"response_format": {"type": "json_object"}}, {"stop": ["O"]}, {"n": 2}, {"of_tomorrow": 1}],
)
def test_fields_that_ask_for_more(dialect: Any, more: dict[str, Any]) -> None:
    assert dialect.curated({**ASKED[dialect.name], **more}, "m", TEXT) is None


@pytest.mark.parametrize(
    ("dialect", "cap"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
        (MESSAGES, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
    ],
)
def test_a_text_must_fit_its_limit(dialect: Any, cap: str) -> None:
    asked = ASKED[dialect.name]
    assert dialect.curated({**asked, cap: len(TEXT)}, "m", TEXT) is not None
    assert dialect.curated({**asked, cap: len(TEXT) - 1}, "m", TEXT) is None


def test_completions_are_short_unless_told_otherwise() -> None:
    assert COMPLETIONS.curated({"model": "m", "prompt": "?"}, "m", TEXT) is None


@pytest.mark.parametrize("store", [True, None])
def test_an_answer_that_is_to_be_kept_upstream_is_left_to_it(store: bool | None) -> None:
    assert RESPONSES.curated({**ASKED["responses"], "store": store}, "m", TEXT) is None
    assert CHAT.curated({**ASKED["chat"], "store": True}, "m", TEXT) is None


def test_plain_endpoints_have_no_curated_answers() -> None:
    for path in ("/v1/embeddings", "/v1/messages/count_tokens"):
        assert DIALECTS[path].curated({"model": "m", "input": "?"}, "m", TEXT) is None


@ALL
async def test_the_gateway_answers_by_hand_in_every_dialect(dialect: Any, tmp_path: Path) -> None:
    faq = tmp_path / "faq.yaml"
    faq.write_text(f"- ask: ['When was OpenAI founded?']\n  answer: {TEXT}\n")
    body = orjson.loads(orjson.dumps(ASKED[dialect.name]).replace(b'"?"', b'"when was openai founded"'))
    async with running_gateway({"engine": "off", "faq": {"path": str(faq)}}) as gateway:
        plain = await gateway.client.post(dialect.path, json=body)
        streamed = await gateway.client.post(dialect.path, json={**body, "stream": True})
        other = await gateway.client.post(dialect.path, json={**body, "tools": [{"name": "f"}]})
    assert plain.headers["cache-status"] == "warmgate; hit; detail=faq"
    assert TEXT in plain.text
    message = collect(dialect, streamed.content)[0].message
    assert message is not None and TEXT.encode() in message
    assert other.status_code == 503
