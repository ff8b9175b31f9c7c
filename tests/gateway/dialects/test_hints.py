"""Hints by which a provider caches prefixes: only where the operator wishes it, never over the caller's own."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects import DIALECTS
from loadtest.stub_upstream import StubUpstream
from tests.harness import running_gateway, upstream

CHAT, RESPONSES, MESSAGES = (DIALECTS[f"/v1/{name}"] for name in ("chat/completions", "responses", "messages"))
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "input_schema": {}}
LATER = {"name": "g", "input_schema": {}, "defer_loading": True}


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **more}


def key_of(body: dict[str, Any], salt: str = "t1", dialect: Any = CHAT) -> str | None:
    return dialect.hint(body, salt).get("prompt_cache_key")


def test_equal_prefixes_of_one_tenant_get_one_key() -> None:
    key = key_of(chat("Be brief.", "Hi"))
    assert key is not None and len(key) <= 64
    assert key_of(chat("Be brief.", "Ho", "Well", "Hm")) == key
    assert key_of(chat("Be verbose.", "Hi")) != key
    assert key_of(chat("Be brief.", "Hi", tools=[TOOL])) != key
    assert key_of(chat("Be brief.", "Hi"), salt="t2") != key


def test_without_a_prefix_or_with_a_key_of_the_callers_there_is_none() -> None:
    assert key_of({"messages": [{"role": "user", "content": "Hi"}]}) is None
    assert key_of({"messages": "odd"}) is None
    assert key_of(chat("Be brief.", "Hi", prompt_cache_key="mine")) is None


def test_responses_are_keyed_by_instructions_and_tools() -> None:
    key = key_of({"instructions": "Be brief.", "input": "Hi"}, dialect=RESPONSES)
    assert key is not None and key == key_of({"instructions": "Be brief.", "input": "Ho"}, dialect=RESPONSES)
    assert key_of({"input": "Hi"}, dialect=RESPONSES) is None


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ({"system": "Be brief."}, {"system": [{"type": "text", "text": "Be brief.", **MARK}]}),
        (
            {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **MARK}]},
        ),
        ({"tools": [TOOL, TOOL]}, {"tools": [TOOL, {**TOOL, **MARK}]}),
        ({"tools": [TOOL, LATER, LATER]}, {"tools": [{**TOOL, **MARK}, LATER, LATER]}),
        ({"tools": [LATER]}, {}),
        ({"tools": [{**TOOL, **MARK}], "system": "Be brief."}, {}),
        ({"system": "Be brief.", "messages": [{"role": "user", "content": [{"type": "text", **MARK}]}]}, {}),
        ({"system": "Be brief.", **MARK}, {}),
        ({"system": " ", "tools": []}, {}),
        ({"system": [{"type": "text", "text": ""}], "tools": ["odd"]}, {}),
        ({}, {}),
    ],
)
def test_breakpoints_stand_behind_tools_and_system(body: dict[str, Any], changes: dict[str, Any]) -> None:
    assert MESSAGES.hint(body, "t1") == changes


async def test_hints_are_given_only_for_models_that_wish_it() -> None:
    models = {"helped": {"target": "m1", "prompt_cache": True}}
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url)], "models": models}) as gateway:
        for model in ("m1", "helped"):
            await gateway.client.post("/v1/chat/completions", json={"model": model, **chat("Be brief.", "Hi")})
            body = {"model": model, "max_tokens": 5, "system": "Be brief.", "messages": []}
            await gateway.client.post("/v1/messages", json=body)
        plain, marked = [call.json for call in u.calls[:2]], [call.json for call in u.calls[2:]]
        assert "prompt_cache_key" not in plain[0] and plain[1]["system"] == "Be brief."
        assert marked[0]["prompt_cache_key"].startswith("wg-")
        assert marked[1]["system"] == [{"type": "text", "text": "Be brief.", **MARK}]
