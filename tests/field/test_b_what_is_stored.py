"""Field cases, section B: only a whole, good answer is kept; everything else is passed on as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from loadtest.stub_upstream import Reply as Script
from loadtest.stub_upstream import StubUpstream, answer, body, delta, error, events, json_body
from tests.field.conftest import B, Bench, World, both_paths, each_store, one_world
from tests.field.reading import ASKS, events_of

STREAMED = B | {"stream": True}
every_api = pytest.mark.parametrize("api", ASKS)
stream_or_plain = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


async def not_kept(bench: Bench, ask: dict[str, Any], path: str = "/v1/chat/completions") -> None:
    """What was answered last is not served again: the repeat goes upstream, gets the good answer, and that is kept."""
    assert bench.stored == 0
    good = await bench.miss(ask, path)
    assert good.text == f"ans-{bench.u.n}"
    assert (await bench.hit(ask, path)).text == good.text


async def test_o13_an_upstream_error_is_passed_on_with_its_status_and_never_kept(bench: Bench) -> None:
    statuses = (429, 500, 502, 400)
    bench.u.reply(*(error(status, f"no {status}") for status in statuses), json_body({"error": {"message": "no"}}))
    for status in statuses:
        reply = await bench.miss(B)
        assert reply.status == status
        assert reply.response.json()["error"]["message"] == f"no {status}"
        assert "stored" not in reply.cache_status.replace("not stored", "")
    hidden = await bench.miss(B)
    assert (hidden.status, hidden.response.json()) == (200, {"error": {"message": "no"}})
    await not_kept(bench, B)
    assert (await bench.outcomes())["error"] == len(statuses)


@both_paths
@every_api
@pytest.mark.parametrize("status", [302, 401, 403, 404, 408, 413, 422, 503, 529])
async def test_o13_no_other_status_is_kept_either(bench: Bench, api: str, status: int) -> None:
    path, ask = ASKS[api]
    bench.u.reply(answer().status(status), answer().status(status))
    for form in (ask, ask | {"stream": True}):
        reply = await bench.miss(form, path)
        assert reply.status == status
    await not_kept(bench, ask, path)


WRONG_BODIES = {
    "empty": body(b""),
    "not JSON": body(b"<html>busy</html>", "text/html"),
    "cut JSON": body(b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ab'),
    "half a document": answer().cut(after=1).regroup(every=40).cut(after=2),
    "a list": json_body([1, 2]),
    "null": json_body(None),
    "error beside choices": json_body({"error": {"message": "x"}, "choices": [{"message": {"content": "a"}}]}),
    "no message": json_body({"choices": [{"index": 0, "finish_reason": "stop"}]}),
    "choices that are no list": json_body({"choices": {"0": 1}}),
    "a choice that is no object": json_body({"choices": [None]}),
    "a missing choice": json_body(
        {"choices": [{"index": 1, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}
    ),
    "no finish reason": answer(finish_reason=None),
    "a finish reason of an unknown kind": answer(finish_reason="whim"),
    "numbers that readers take differently": body(
        b'{"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":NaN}'
    ),
}


@one_world
@pytest.mark.parametrize("wrong", WRONG_BODIES)
async def test_o13_a_success_that_is_no_answer_is_not_kept(bench: Bench, wrong: str) -> None:
    bench.u.reply(WRONG_BODIES[wrong])
    reply = await bench.miss(B)
    assert reply.status in (200, 502)
    assert bench.not_stored.total() == (1 if reply.status == 200 else 0)
    await not_kept(bench, B)


@one_world
@every_api
async def test_o13_an_error_event_in_a_stream_is_not_kept(bench: Bench, api: str) -> None:
    path, ask = ASKS[api]
    ask = {**ask, "stream": True}
    failed = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"busy"}}\n\n'
    bench.u.reply(answer().swap(3, failed).cut(after=4, then="end"))
    reply = await bench.miss(ask, path)
    assert reply.response.content.endswith(failed), "the upstream's own error event is the last"
    await not_kept(bench, ask, path)


CUTS: dict[str, tuple[dict[str, Any], Script]] = {
    "without anything": (STREAMED, answer().cut(after=3, then="end")),
    "closed": (STREAMED, answer().cut(after=3, then="close")),
    "done without a finish reason": (STREAMED, answer(finish_reason=None)),
    "one of two choices unfinished": (STREAMED | {"n": 2}, answer(finish_reason=["stop", None])),
    "one of two choices missing": (STREAMED | {"n": 2}, answer(n=1)),
    "reset": (STREAMED, answer().cut(after=3, then="reset")),
    "no end mark": (STREAMED, answer().cut(after=6, then="end")),
    "end mark without its blank line": (STREAMED, answer().swap(6, b"data: [DONE]\n")),
    "in the middle of an event": (STREAMED, answer().regroup(every=100).cut(after=3, then="end")),
    "gzip cut short": (STREAMED, answer().encoded("gzip").cut(after=3, then="end")),
    "plain, short of its length": (B, answer().regroup(every=50).cut(after=2)),
    "plain, reset": (B, answer().regroup(every=50).cut(after=2, then="reset")),
    "plain, chunks without an end": (B, answer().framed("chunked").ending("close")),
    "plain gzip cut short": (B, answer().encoded("gzip").regroup(every=50).cut(after=2).framed("close")),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_o14_a_cut_answer_is_not_kept(bench: Bench, cut: str) -> None:
    ask, script = CUTS[cut]
    bench.u.reply(script)
    first = await bench.send(ask)
    assert first.rose == 1
    if ask.get("stream"):
        assert bench.not_stored["incomplete"] == 1
        marks = first.response.text.count("[DONE]")
        assert marks == (1 if cut.startswith(("done", "one of two")) else 0), "an end is not made up"
    else:
        assert first.status == 502
    await not_kept(bench, ask)


@one_world
@pytest.mark.parametrize("api", ["messages", "responses", "completions"])
async def test_o14_no_prefix_of_any_stream_is_kept(bench: Bench, api: str) -> None:
    path, ask = ASKS[api]
    ask = {**ask, "stream": True}
    length = len(events_of((await bench.send(ask, path)).response.content))
    for after in range(1, length):
        other = ask | {"seed": after}
        bench.u.reply(answer().cut(after=after, then="end"))
        await bench.miss(other, path)
        again = await bench.send(other, path)
        assert again.rose == 1, f"a stream cut after {after} of {length} events was kept"


async def test_o15_an_answer_cut_by_a_token_limit_is_not_kept(bench: Bench) -> None:
    for ask in (B, B | {"max_tokens": 5}, STREAMED | {"max_completion_tokens": 5}):
        bench.u.reply(answer(finish_reason="length"))
        first = await bench.miss(ask)
        assert first.status == 200
        await bench.miss(ask)
        await bench.hit(ask)
    assert bench.not_stored["finish reason"] == 3


@one_world
async def test_o15_the_operator_may_keep_answers_of_a_limited_length(world: World) -> None:
    async with world.bench(cache={"store_finish": ["stop", "length"]}) as bench:
        bench.u.reply(answer(finish_reason="length"))
        limited = B | {"max_tokens": 5}
        await bench.miss(limited)
        assert (await bench.hit(limited)).response.json()["choices"][0]["finish_reason"] == "length"


@one_world
@stream_or_plain
@pytest.mark.parametrize(
    ("api", "reason"),
    [
        ("completions", "length"),
        ("messages", "max_tokens"),
        ("messages", "model_context_window_exceeded"),
        ("messages", "pause_turn"),
        ("responses", "max_output_tokens"),
        ("responses", "failed"),
    ],
)
async def test_o15_nor_in_the_other_apis(bench: Bench, api: str, reason: str, stream: bool) -> None:
    path, ask = ASKS[api]
    bench.u.reply(answer(finish_reason=reason))
    await bench.miss(ask | {"stream": stream}, path)
    await not_kept(bench, ask, path)


async def test_o16_a_refusal_is_not_kept(bench: Bench) -> None:
    for ask in (B, STREAMED | {"seed": 1}):
        bench.u.reply(answer(finish_reason="content_filter"))
        assert (await bench.miss(ask)).status == 200
        good = await bench.miss(ask)
        assert (await bench.hit(ask)).text == good.text
    two = B | {"n": 2}
    bench.u.reply(answer(finish_reason=["stop", "content_filter"]))
    await bench.miss(two)
    await bench.miss(two)
    await bench.hit(two)
    assert bench.not_stored["refused"] == 3


REFUSALS: dict[str, tuple[str, Script]] = {
    "chat: a refusal instead of content": (
        "chat",
        json_body(
            {
                "object": "chat.completion",
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": None, "refusal": "I can't."},
                     "finish_reason": "stop"}
                ],
            }
        ),
    ),
    "chat: a streamed refusal": (
        "chat",
        events(delta(role="assistant", content=""), delta(refusal="I can't."), delta("stop"), "[DONE]"),
    ),
    "messages": ("messages", answer(finish_reason="refusal")),
    "responses: filtered": ("responses", answer(finish_reason="content_filter")),
    "completions": ("completions", answer(finish_reason="content_filter")),
}  # fmt: skip


@one_world
@stream_or_plain
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_o16_nor_in_any_other_form_and_whatever_the_operator_lists(
    world: World, refusal: str, stream: bool
) -> None:
    api, script = REFUSALS[refusal]
    path, ask = ASKS[api]
    async with world.bench(cache={"store_finish": ["stop", "content_filter", "refusal"]}) as bench:
        bench.u.reply(script)
        await bench.miss(ask | {"stream": stream}, path)
        assert bench.not_stored["refused"] == 1
        await not_kept(bench, ask, path)


async def leave_after(bench: Bench, ask: dict[str, Any], pieces: int) -> None:
    """A caller that closes its connection after so many pieces."""
    async with bench.streaming(ask) as response:
        reading = response.aiter_raw()
        for _ in range(pieces):
            await anext(reading, b"")


@each_store
async def test_o17_a_caller_who_leaves_in_mid_stream_ends_the_call_and_leaves_nothing_behind(bench: Bench) -> None:
    bench.u.reply(answer(deltas=[f"{i} " for i in range(20)]).paced(0.05))
    await leave_after(bench, STREAMED, 3)
    await bench.u.wait_closed(bench.u.calls[0], timeout=1)
    await bench.at_rest()
    assert not bench.gateway.app.runtime.flights
    await not_kept(bench, STREAMED)
    assert (await bench.rows())[-1]["reason"] == "caller left"


@one_world
async def test_o17_a_caller_who_leaves_at_the_very_end_loses_nothing_or_all(bench: Bench) -> None:
    """Whichever way the race goes: what is kept is whole."""
    for number in range(10):
        ask = STREAMED | {"seed": number}
        await leave_after(bench, ask, number % 5 + 1)
        await bench.at_rest()
        reply = await bench.send(ask)
        assert reply.text.startswith("ans-")
        assert reply.response.content.endswith(b"data: [DONE]\n\n")


@both_paths
@pytest.mark.parametrize(
    "silent", [answer().delayed(5), answer().pause(before=0, seconds=5)], ids=["before the head", "after the head"]
)
@stream_or_plain
async def test_o18_a_caller_who_leaves_before_the_first_token_ends_the_call(
    bench: Bench, silent: Script, stream: bool
) -> None:
    bench.u.reply(silent)
    ask = B | {"stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        await bench.gateway.client.post("/v1/chat/completions", json=ask, timeout=0.5)
    await bench.u.wait_closed(bench.u.calls[0], timeout=1)
    await bench.at_rest()
    assert [member.in_flight for member in bench.gateway.app.runtime.pool.members] == [0]
    await not_kept(bench, ask)


@one_world
async def test_o18_a_call_that_somebody_else_waits_on_goes_on(bench: Bench, gate: asyncio.Event) -> None:
    bench.u.reply(answer().held(gate))
    client = bench.gateway.client
    leaving = asyncio.create_task(client.post("/v1/chat/completions", json=B))
    await bench.u.wait_calls(1)
    staying = asyncio.create_task(client.post("/v1/chat/completions", json=B))
    await bench.gateway.joined(2)
    leaving.cancel()
    await bench.gateway.joined(1)
    gate.set()
    assert (await staying).json()["choices"][0]["message"]["content"] == "ans-1"
    assert bench.u.n == 1


EMPTY = json_body({"id": "x", "object": "chat.completion", "created": 1, "model": "m1", "choices": []})
EMPTY_STREAM = events(
    {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m1", "choices": []}, "[DONE]"
)


async def test_o19_an_answer_without_choices_is_passed_on_and_not_kept(world: World) -> None:
    async with StubUpstream() as u:
        u.always(lambda call: EMPTY_STREAM if call.json.get("stream") else EMPTY)
        for _ in range(2):  # the second is a restart over the same store
            async with world.bench(u) as bench:
                plain = await bench.miss(B)
                assert (plain.status, plain.response.json()["choices"]) == (200, [])
                streamed = await bench.miss(STREAMED)
                assert streamed.status == 200
                assert streamed.streamed
                assert streamed.response.content.endswith(b"data: [DONE]\n\n")
                assert bench.not_stored["incomplete"] == 2
                assert bench.stored == 0


@one_world
@stream_or_plain
@pytest.mark.parametrize(
    ("api", "nothing"),
    [
        ("messages", {"type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn",
                      "usage": {"input_tokens": 1, "output_tokens": 1}}),
        ("responses", {"object": "response", "status": "completed", "output": []}),
        ("completions", {"object": "text_completion", "choices": []}),
    ],
)  # fmt: skip
async def test_o19_nor_nothing_in_the_other_apis(bench: Bench, api: str, nothing: dict[str, Any], stream: bool) -> None:
    path, ask = ASKS[api]
    ask = {**ask, "stream": stream}
    bench.u.reply(body(orjson.dumps(nothing)))
    assert (await bench.miss(ask, path)).status == 200
    await not_kept(bench, ask, path)
