"""Field cases, section A: what is one question and what are two."""

import os
import subprocess
import sys
from typing import Any

import orjson
import pytest

from loadtest.stub_upstream import StubUpstream
from tests.field.conftest import B, Bench, World, tools
from tests.harness import upstream


async def all_differ(bench: Bench, variants: list[dict[str, Any]]) -> None:
    """Every variant misses once, and then hits its own answer."""
    texts = [(await bench.miss(variant)).text for variant in variants]
    assert len(set(texts)) == len(variants)
    for variant, text in zip(variants, texts, strict=True):
        assert (await bench.hit(variant)).text == text


async def test_o01_different_tools_are_different_questions(bench: Bench) -> None:
    books, news = B | {"tools": tools("search_books")}, B | {"tools": tools("search_news")}
    first = await bench.miss(books)
    await bench.miss(news)
    assert (await bench.hit(books)).text == first.text == "ans-1"
    await bench.miss(B | {"tools": tools("search_books", maxLength=5)})
    assert [call.json["tools"] for call in bench.u.calls[:2]] == [books["tools"], news["tools"]]


async def test_o02_tool_choice_and_parallel_tool_calls_count(bench: Bench) -> None:
    with_tools = B | {"tools": tools("f")}
    named = {"type": "function", "function": {"name": "f"}}
    choices = [with_tools | {"tool_choice": choice} for choice in ("auto", "required", "none", named)]
    await all_differ(bench, choices + [with_tools | {"parallel_tool_calls": flag} for flag in (True, False)])


async def test_o03_response_format_and_message_side_fields_count(bench: Bench) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    formats = [B, B | {"response_format": {"type": "json_object"}}, B | {"response_format": schema}]

    def history(call_id: str, arguments: str, name: str | None = None) -> dict[str, Any]:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": call_id, "content": "1"} | ({"name": name} if name else {})
        return B | {"messages": [*B["messages"], {"role": "assistant", "tool_calls": [call]}, result]}

    await all_differ(
        bench, [*formats, history("a", "{}"), history("b", "{}"), history("a", '{"x":1}'), history("a", "{}", "n")]
    )


async def test_o04_every_sampling_field_counts(bench: Bench) -> None:
    fields: list[dict[str, Any]] = [
        {"max_tokens": 16},
        {"max_tokens": 4000},
        {"max_completion_tokens": 16},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"stop": "x"},
        {"stop": "y"},
        {"stop": ["x"]},
        {"n": 1},
        {"n": 2},
        {"presence_penalty": 0},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {"5": 2}},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 5},
        {"some_vendor_field": 1},
    ]
    await all_differ(bench, [B | field for field in fields])


async def test_o04_without_a_temperature_a_request_is_sampled_never_deterministic(bench: Bench) -> None:
    sampled = {name: value for name, value in B.items() if name != "temperature"}
    first, second = await bench.miss(sampled), await bench.miss(sampled)
    assert (first.text, second.text) == ("ans-1", "ans-2")
    assert "bypass" in first.cache_status
    assert "sampled" in first.cache_status


async def test_o05_zero_null_and_absent_are_told_apart(world: World) -> None:
    async with world.bench(cache={"sampled": "always"}) as bench:
        bare = {name: value for name, value in B.items() if name != "temperature"}
        await all_differ(bench, [B, B | {"seed": 0}, B | {"seed": 1}])
        await all_differ(bench, [bare, bare | {"temperature": 0.7}, bare | {"temperature": 0, "seed": 7}])
        assert (await bench.send(bare | {"temperature": None})).text != (await bench.hit(B)).text


async def test_o06_key_order_and_spacing_do_not_count_but_array_order_does(bench: Bench) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Say A"}]
    body = B | {"messages": messages, "tools": tools("a", "b")}

    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(list(value))}
        return [reversed_keys(item) for item in value] if isinstance(value, list) else value

    await bench.miss(body)
    await bench.hit({key: body[key] for key in reversed(list(body))})
    await bench.hit(reversed_keys(body))
    await bench.hit(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    assert bench.u.n == 1
    await bench.miss(body | {"messages": messages[::-1]})
    await bench.miss(body | {"tools": tools("b", "a")})


def test_o07_every_process_makes_the_same_key() -> None:
    """Three processes with other hash seeds; with one Redis between gateways, see the two-gateway test in section F."""
    program = (
        "import orjson; from cache.response.canonical import Scope, identify, parse\n"
        "from tests.field.conftest import B, tools\n"
        "body = orjson.dumps(B | {'tools': tools('a','b','c','d','e', anyOf=[{'x': {'y': [1]}}, {'z': None}])})\n"
        "print(identify(Scope('chat', 't', '', 'm1', ''), parse(body), frozenset({'stream', 'user', 'metadata'})))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(seen) == 1


async def test_o07_fifty_identical_requests_make_one_call(bench: Bench) -> None:
    body = B | {"tools": tools("a", "b", "c", "d", "e")}
    await bench.miss(body)
    for _ in range(49):
        assert (await bench.hit(body)).text == "ans-1"
    assert bench.u.n == 1


async def test_o08_models_and_directives(world: World) -> None:
    async with world.bench(models={"fast": {"target": "m1"}, "smart": {"target": "m2"}}) as bench:
        fast, smart = B | {"model": "fast"}, B | {"model": "smart"}
        await bench.miss(fast)
        await bench.miss(smart)
        assert (await bench.hit(fast)).text == "ans-1"
        assert (await bench.hit(B)).text == "ans-1", "an alias and its target share answers"
        assert (await bench.miss(fast, cache_control="no-cache")).text == "ans-3"
        assert (await bench.hit(fast)).text == "ans-3", "no-cache renews what is stored"
        other = fast | {"seed": 9}
        await bench.miss(other, cache_control="no-store")
        await bench.miss(other, cache_control="no-store")
        await bench.miss(other)
        assert [call.json["model"] for call in bench.u.calls] == ["m1", "m2", "m1", "m1", "m1", "m1"]
        assert all("cache-control" not in call.headers for call in bench.u.calls)
        assert not any(name.startswith("x-warmgate") for call in bench.u.calls for name in call.headers)


async def test_o09_a_new_revision_or_a_purge_of_a_model_ends_its_answers_alone(world: World) -> None:
    async with StubUpstream(models=("m1", "m2")) as u:
        async with world.bench(u, models={"m1": {"revision": "1"}}) as bench:
            await bench.miss(B)
            await bench.miss(B | {"model": "m2"})
            await bench.hit(B)
            purged = await bench.gateway.client.post("/admin/purge", json={"model": "m1"})
            assert purged.json()["everywhere"] is True
            await bench.miss(B)
            await bench.hit(B | {"model": "m2"})
        if world.store == "memory":
            return
        async with world.bench(u, models={"m1": {"revision": "2"}}) as bench:
            await bench.miss(B)
            await bench.hit(B | {"model": "m2"})
        async with world.bench(u, models={"m1": {"revision": "1"}}) as bench:
            await bench.hit(B)


@pytest.mark.parametrize("content", [rb'"x\ud835y"', rb'"\ud835"', rb'"\udc00\ud835"'])
async def test_o10_broken_unicode_is_a_clear_400(bench: Bench, content: bytes) -> None:
    reply = await bench.send(b'{"model":"m1","temperature":0,"messages":[{"role":"user","content":%s}]}' % content)
    assert reply.status == 400
    assert "surrogate" in reply.response.json()["error"]["message"]
    assert reply.rose == 0


async def test_o10_broken_unicode_in_bookkeeping_that_is_echoed_is_no_500(bench: Bench) -> None:
    body = b'{"model":"m1","temperature":0,"store":false,"input":"x","metadata":{"a":"%s"}}'
    await bench.miss(body % b"good", "/v1/responses")
    for _ in range(2):
        assert (await bench.send(body % b"\\ud835", "/v1/responses")).status == 400


async def test_o10_nul_and_the_two_spellings_of_e_acute(bench: Bench) -> None:
    variants = [B | {"messages": [{"role": "user", "content": text}]} for text in ("\x00", "\u00e9", "e\u0301")]
    await all_differ(bench, variants)


async def test_o11_duplicate_keys_are_refused_and_big_integers_keep_their_digits(bench: Bench) -> None:
    twice = await bench.send(b'{"model":"m1","model":"m2","temperature":0,"messages":[]}')
    assert (twice.status, twice.rose) == (400, 0)
    raw = b'{"model":"m1","temperature":0,"messages":[{"role":"user","content":"x"}],"seed":%s}'
    for digits in (b"9007199254740993", b"9007199254740992", b"36893488147419103233"):
        await bench.miss(raw % digits)
        await bench.hit(raw % digits)
        assert b'"seed":' + digits in bench.u.calls[-1].body


async def test_o11_digits_survive_where_a_field_had_to_be_changed(world: World) -> None:
    async with world.bench(models={"alias": {"target": "m1"}}) as bench:
        await bench.miss(
            b'{"model":"alias","temperature":0.0,"messages":[],"seed":9007199254740993,"top_p":0.10,"stream":true}'
        )
        assert b'"seed":9007199254740993' in bench.u.calls[0].body
        assert b'"top_p":0.10' in bench.u.calls[0].body
        assert bench.u.calls[0].json["model"] == "m1"


async def test_o12_pictures_are_told_apart_by_their_content_and_addresses_are_not_fetched(bench: Bench) -> None:
    def picture(url: str, **more: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": url, **more}}]
        return B | {"messages": [{"role": "user", "content": parts}]}

    data = ["data:image/png;base64,AAAA", "data:image/png;base64,AAAB"]
    await all_differ(bench, [picture(data[0]), picture(data[1]), picture(data[0], detail="low")])
    remote = picture(f"{bench.u.url}/picture.png")
    await bench.miss(remote)
    assert "ttl=" in (await bench.hit(remote)).cache_status, (
        "an address may change its picture; the answer ends with its TTL"
    )
    bench.clock.advance(3601)
    await bench.miss(remote)
    assert bench.u.other_calls == [call for call in bench.u.other_calls if call.path == "/v1/models"]


async def test_one_model_each_of_two_upstreams(world: World) -> None:
    """Derived: the same body for two models that two upstreams serve."""
    async with (
        StubUpstream(models=("m3",)) as other,
        StubUpstream(models=("m1",)) as u,
        world.bench(u, upstreams=[upstream(u.url, "a"), upstream(other.url, "b")]) as bench,
    ):
        for model, name in (("m1", "a"), ("m3", "b")):
            reply = await bench.send(B | {"model": model})
            assert reply.response.headers["x-warmgate-upstream"] == name
            await bench.hit(B | {"model": model})
        assert (u.n, other.n) == (1, 1)
