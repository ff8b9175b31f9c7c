"""What a scripted reply may say, and every way in which its delivery may go wrong."""

import asyncio
import json
import time

import httpx
import pytest

from gateway.encoding import decode_body, decoder
from loadtest.stub_upstream import StubUpstream, answer, body, delta, events, json_body, raw
from tests.loadtest.stub_upstream.talk import CHAT, STREAM, URL, Socket, data_lines, streamed_text

# What can be said


async def test_choices_and_finish_reasons(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(answer(finish_reason=["stop", "content_filter"], n=2), answer(n=0), answer(finish_reason="length"))
    two, none, cut = [(await http.post(URL, json=CHAT)).json()["choices"] for _ in range(3)]
    assert [(c["index"], c["finish_reason"]) for c in two] == [(0, "stop"), (1, "content_filter")]
    assert (none, cut[0]["finish_reason"]) == ([], "length")
    assert [c["message"]["content"] for c in (await http.post(URL, json={**CHAT, "n": 2})).json()["choices"]] == [
        "ans-4",
        "ans-4.1",
    ]


async def test_streams_that_never_finish(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(answer(finish_reason=None), answer(n=2, finish_reason=["stop", None]))
    for finished in ([], [0]):
        lines = data_lines((await http.post(URL, json=STREAM)).text)
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        assert [c["index"] for c in choices if c["finish_reason"]] == finished
        assert lines[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "reason"), [("/v1/messages", "refusal"), ("/v1/responses", "max_output_tokens")])
async def test_finish_reasons_of_other_dialects(
    u: StubUpstream, http: httpx.AsyncClient, path: str, reason: str
) -> None:
    u.always(answer(finish_reason=reason))
    for streamed in (False, True):
        assert reason in (await http.post(path, json={"model": "m1", "stream": streamed})).text


async def test_events_of_ones_own(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(events(b": wait\n\n", delta(content="A"), b"event: ping\r\ndata: {}\r\n\r\n", delta("stop"), "[DONE]"))
    text = (await http.post(URL, json=STREAM)).text
    assert text.startswith(": wait\n\ndata: {")
    assert "event: ping\r\ndata: {}\r\n\r\n" in text
    assert [json.loads(line)["choices"][0] for line in data_lines(text) if line[1:3] == '"i'] == [
        {"index": 0, "delta": {"content": "A"}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ]


async def test_any_json_any_status_any_header(u: StubUpstream, http: httpx.AsyncClient) -> None:
    reply = json_body({"error": {"message": "no"}}).status(200).header("Set-Cookie", "a=b").header("Set-Cookie", "c=d")
    u.reply(reply.header("content-type", "application/problem+json"))
    response = await http.post(URL, json=CHAT)
    assert response.json() == {"error": {"message": "no"}}
    assert response.headers.get_list("set-cookie") == ["a=b", "c=d"]
    assert response.headers["content-type"] == "application/problem+json"


# How it can be delivered


async def test_one_write_per_byte(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(answer(deltas=["你好🙂"]).regroup(every=1), answer(deltas=["你好🙂"]).regroup())
    assert await streamed_text(http) == await streamed_text(http) == "你好🙂"
    assert len(u.calls[0].writes) > 300
    assert len(u.calls[1].writes) == 1


async def test_writes_split_at_offsets(u: StubUpstream, wire: Socket) -> None:
    u.reply(events(b"data: 1\n\n", b"data: 2\n\n").regroup(at=[3, 10]))
    reader = await wire.post(STREAM)
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\ndat\r\n7\r\na: 1\n\nd\r\n8\r\nata: 2\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
async def test_content_codings_flow_and_end_well(u: StubUpstream, http: httpx.AsyncClient, coding: str) -> None:
    u.always(answer(deltas=["a", "b", "c"]).encoded(coding))
    async with http.stream("POST", URL, json=CHAT) as plain:
        data = b"".join([piece async for piece in plain.aiter_raw()])
        assert plain.headers["content-encoding"] == coding
        assert json.loads(decode_body(data, coding.encode(), 10_000))["choices"][0]["message"]["content"] == "abc"
    u.always(answer(deltas=["a", "b", "c"]).encoded(coding).pause(before=2, seconds=30))
    async with http.stream("POST", URL, json=STREAM) as stream:
        decode, text = decoder(coding.encode()), b""
        async for piece in stream.aiter_raw():
            text += decode.feed(piece)
            if b'"a"' in text:
                break  # the second event can be read while the third is still 30 seconds away


@pytest.mark.parametrize("after", [0, 3])
async def test_a_stream_cut_short(u: StubUpstream, wire: Socket, after: int) -> None:
    u.reply(answer(deltas=list("abcdef")).cut(after=after))
    reader = await wire.post(STREAM)
    got = await asyncio.wait_for(reader.read(), 5)
    assert got.count(b"data: ") == after
    assert not got.endswith(b"0\r\n\r\n")


async def test_a_stream_that_ends_early_in_good_form(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(answer(deltas=list("abcdef")).cut(after=3, then="end"))
    assert len(data_lines((await http.post(URL, json=STREAM)).text)) == 3


async def test_a_reset_after_all_that_came_before(u: StubUpstream, wire: Socket) -> None:
    u.reply(answer(deltas=list("abcdef")).cut(after=3, then="reset"))
    reader = await wire.post(STREAM)
    got = b""
    with pytest.raises(ConnectionResetError):
        while data := await asyncio.wait_for(reader.read(10_000), 5):
            got += data
    assert got.count(b"data: ") == 3


async def test_a_plain_body_shorter_than_announced(u: StubUpstream, wire: Socket) -> None:
    u.reply(body(b'{"a": 1}').regroup(at=[5]).cut(after=1))
    got = await (await wire.post(CHAT)).read()
    assert b"content-length: 8\r\n" in got
    assert got.endswith(b'\r\n\r\n{"a":')


async def test_other_framings(u: StubUpstream, wire: Socket) -> None:
    u.reply(body(b"abc").framed("close"), body(b"abc").framed("chunked"), raw(b"HTP/9 what\r\n"))
    closed = await (await wire.post(CHAT)).read()
    assert b"content-length" not in closed
    assert closed.endswith(b"\r\n\r\nabc")
    reader = await wire.post(CHAT)
    assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"3\r\nabc\r\n0\r\n\r\n")
    assert await (await wire.post(CHAT)).read() == b"HTP/9 what\r\n"


async def test_delays(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(answer().delayed(0.1), answer(deltas=["a", "b"]).paced(0.03), answer().pause(before=1, seconds=0.1))
    took = []
    for request in (CHAT, STREAM, STREAM):
        began = time.monotonic()
        await http.post(URL, json=request)
        took.append(time.monotonic() - began)
    assert [t >= least for t, least in zip(took, (0.1, 0.12, 0.1), strict=True)] == [True] * 3
    gaps = [b - a for a, b in zip(u.calls[1].writes, u.calls[1].writes[1:], strict=False)]
    assert len(gaps) == 4
    assert min(gaps) >= 0.025


async def test_what_is_held_comes_when_the_gate_is_set(u: StubUpstream, wire: Socket) -> None:
    head, rest = asyncio.Event(), asyncio.Event()
    u.reply(answer(deltas=["a", "b"]).held(head).held(rest, before=2))
    reader = await wire.post(STREAM)
    await u.wait_calls(1)
    assert u.calls[0].writes == []
    head.set()
    assert b'"a"' in await reader.readuntil(b'"a"')
    assert (len(u.calls[0].writes), u.running) == (2, 1)
    rest.set()
    assert b'"b"' in await reader.readuntil(b"0\r\n\r\n")
    await u.wait_idle()


async def test_swapped_step(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(answer(deltas=["a", "b", "c"]).swap(2, b"data: {broken\n\n"))
    assert data_lines((await http.post(URL, json=STREAM)).text)[2] == "{broken"


async def test_200_megabytes_wait_for_the_reader(u: StubUpstream, wire: Socket) -> None:
    u.reply(events(*[b"x" * 1_000_000] * 200))
    await wire.post(STREAM)
    await u.wait_calls(1)
    await asyncio.sleep(0.3)
    assert len(u.calls[0].writes) < 40
    wire.leave()
    await u.wait_closed(u.calls[0])
