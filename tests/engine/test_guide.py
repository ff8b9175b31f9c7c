"""Answers held to a JSON schema: always of the schema, whatever the model would rather say; others are untouched."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch

from engine.core import Generation
from engine.errors import RequestError
from engine.guide import Grammars
from engine.sampling import SamplingParams
from tests.engine import tiny
from tests.engine.drive import run, run_all
from tests.engine.test_prefix import job, prompt, reference
from tests.engine.test_server import CHAT, TEXT, body, client, events, worker  # noqa: F401 - fixtures

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer", "maximum": 9}},
    "required": ["ok", "kind", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
GRAMMARS = Grammars(tiny.tokenizer(), tiny.SPEC.vocab)


def check(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"ok", "kind", "n"}
    assert value["ok"] in (True, False)
    assert value["kind"] in ("cat", "dog")
    assert isinstance(value["n"], int)
    assert value["n"] <= 9


def asked(**fields: Any) -> dict[str, Any]:
    return {**body(response_format=FORMAT, max_tokens=200), "ignore_eos": False} | fields


async def test_every_choice_is_of_the_schema(client: httpx.AsyncClient) -> None:  # noqa: F811
    for seed in range(4):
        answer = (await client.post(CHAT, json=asked(n=3, temperature=1, seed=seed))).json()
        assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            check(choice["message"]["content"])


async def test_a_stream_and_a_text_completion_are_guided_as_well(client: httpx.AsyncClient) -> None:  # noqa: F811
    got = events(await client.post(CHAT, json=asked(stream=True, temperature=1, seed=3)))
    check("".join(event["choices"][0]["delta"].get("content", "") for event in got))
    fields = {"model": "tiny", "prompt": "x", "response_format": FORMAT, "max_tokens": 200, "seed": 1}
    check((await client.post(TEXT, json=fields)).json()["choices"][0]["text"])


async def test_json_object_is_an_object_as_far_as_it_goes(client: httpx.AsyncClient) -> None:  # noqa: F811
    answer = await client.post(CHAT, json=asked(response_format={"type": "json_object"}, max_tokens=30))
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "quantum"},
        {"pattern": "(", "type": "string"},
        {"$ref": "http://x/y"},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"enum": []},
        None,
        [],
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_refused(client: httpx.AsyncClient, schema: Any) -> None:  # noqa: F811
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await client.post(CHAT, json=asked(response_format=bad))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert (await client.post(CHAT, json=asked(ignore_eos=True))).status_code == 400


def guided(name: str, ids: list[int], tokens: int = 220) -> Generation:
    wish = SamplingParams(temperature=1, seed=len(ids))  # greedy, this model writes nothing but tabs
    return Generation(name, ids, tokens, wish, guide=GRAMMARS.guide(FORMAT))


def test_a_guided_neighbour_changes_no_token_of_an_unguided_one() -> None:
    core = tiny.core(128)
    asks = [job("plain", prompt(20), tokens=30), guided("guided", prompt(20, 1)), job("other", prompt(9, 2), tokens=30)]
    results = run_all(core, asks)
    assert results["plain"].tokens == reference(prompt(20), 30)
    assert results["other"].tokens == reference(prompt(9, 2), 30)
    check(results["guided"].text)


def test_preemption_does_not_disturb_a_guide() -> None:
    core = tiny.core(18)
    results = run_all(core, [guided(str(seed), prompt(20, seed), tokens=40) for seed in range(3)])
    assert core.scheduler.preemptions > 0
    for seed in range(3):
        assert results[str(seed)].tokens == run(tiny.core(64), guided("alone", prompt(20, seed), tokens=40)).tokens
    assert core.manager.free == 18


def test_what_is_forbidden_stays_so_under_bias_and_penalty() -> None:
    wish = SamplingParams(temperature=1, logit_bias={ord("x"): 100}, repetition_penalty=2.0, seed=1)
    result = run(tiny.core(64), Generation("a", prompt(9), 150, wish, guide=GRAMMARS.guide(FORMAT)))
    check(result.text)


def test_a_guide_that_gives_up_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny.core(64)
    bad = guided("bad", prompt(9))
    assert bad.guide is not None

    def fail(logits: torch.Tensor) -> torch.Tensor:
        raise RequestError("too complex", status=500)

    monkeypatch.setattr(bad.guide, "mask", fail)
    results = run_all(core, [bad, job("good", prompt(12))])
    assert results["bad"].deltas[-1].error == "too complex"
    assert results["good"].tokens == reference(prompt(12))
    assert core.manager.free == 64
