"""The stub upstream answers as the real services do (their own SDKs understand it) and fails exactly as it is told."""

import asyncio
import base64
import json
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Literal

import anthropic
import httpx
import openai
import pytest

from gateway.encoding import decode_body, decoder
from loadtest.stub_upstream import StubUpstream, answer, body, delta, error, events, json_body, known_vector, raw

CHAT = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "Say A"}]}
STREAM = {**CHAT, "stream": True}
URL = "/v1/chat/completions"


@pytest.fixture
async def u() -> AsyncIterator[StubUpstream]:
    async with StubUpstream() as stub:
        yield stub


@pytest.fixture
async def http(u: StubUpstream) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=u.url, trust_env=False) as client:
        yield client


@pytest.fixture
async def sdk(u: StubUpstream) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=u.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(u: StubUpstream) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=u.url, api_key="k", max_retries=0) as client:
        yield client


def data_lines(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def streamed_text(http: httpx.AsyncClient) -> str:
    text = (await http.post(URL, json=STREAM)).text
    chunks = [json.loads(line) for line in data_lines(text) if line != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


class Socket:
    """A client at the level of the socket: each `post` on a connection of its own."""

    def __init__(self, u: StubUpstream) -> None:
        self._port = u.port
        self._writers: list[asyncio.StreamWriter] = []

    async def send(self, data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(data)
        return reader

    async def post(self, request: dict[str, object]) -> asyncio.StreamReader:
        data = json.dumps(request).encode()
        return await self.send(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (URL.encode(), len(data)) + data)

    def leave(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@pytest.fixture
async def wire(u: StubUpstream) -> AsyncIterator[Socket]:
    wire = Socket(u)
    yield wire
    wire.leave()


# Good answers


async def test_plain_answers_are_numbered(u: StubUpstream, sdk: openai.AsyncOpenAI) -> None:
    for number in (1, 2):
        made = await sdk.chat.completions.create(**CHAT)
        assert made.choices[0].message.content == f"ans-{number}"
        assert (made.choices[0].finish_reason, made.model) == ("stop", "m1")
        assert made.usage is not None
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (10, 5)
    assert u.n == 2


async def test_streamed_chat(sdk: openai.AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await sdk.chat.completions.create(**STREAM)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == "ans-1"
    assert sum(bool(d.content) for d in deltas) >= 2
    assert [d.role for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_a_stream_ends_with_done(http: httpx.AsyncClient) -> None:
    response = await http.post(URL, json=STREAM)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert data_lines(response.text).count("[DONE]") == 1
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("usage_as", "choices"),
    [
        ("separate", []),
        ("with_choice", [{"delta": {}, "finish_reason": None}]),
        ("merged", [{"finish_reason": "stop"}]),
    ],
)
async def test_streamed_usage_when_asked_for(
    u: StubUpstream,
    http: httpx.AsyncClient,
    usage_as: Literal["separate", "with_choice", "merged"],
    choices: list[dict[str, object]],
) -> None:
    u.always(answer(usage_as=usage_as))
    text = (await http.post(URL, json={**STREAM, "stream_options": {"include_usage": True}})).text
    chunks = [json.loads(line) for line in data_lines(text)[:-1]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["total_tokens"] == 15
    assert len(chunks[-1]["choices"]) == len(choices)
    assert all(want.items() <= got.items() for want, got in zip(choices, chunks[-1]["choices"], strict=True))


async def test_plain_and_streamed_completions(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.completions.create(model="m1", prompt="x")
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("ans-1", "stop")
    chunks = [chunk async for chunk in await sdk.completions.create(model="m1", prompt="x", stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ans-2"


async def test_plain_and_streamed_responses(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.responses.create(model="m1", input="x")
    assert (made.output_text, made.status) == ("ans-1", "completed")
    async with sdk.responses.stream(model="m1", input="x") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (final.output_text, final.status) == ("ans-2", "completed")
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens) == (10, 5)


async def test_plain_and_streamed_messages(u: StubUpstream, claude: anthropic.AsyncAnthropic) -> None:
    ask = {"model": "m1", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    made = await claude.messages.create(**ask)  # type: ignore[arg-type]
    assert (made.content[0].text, made.stop_reason) == ("ans-1", "end_turn")  # type: ignore[union-attr]
    async with claude.messages.stream(**ask) as stream:  # type: ignore[arg-type]
        final = await stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == ("ans-2", "end_turn")  # type: ignore[union-attr]
    assert (final.usage.input_tokens, final.usage.output_tokens) == (10, 5)
    assert u.calls[0].headers["anthropic-version"]


@pytest.mark.parametrize("repeat", [False, True])
async def test_message_usage_comes_in_two_events(u: StubUpstream, http: httpx.AsyncClient, repeat: bool) -> None:
    usage = {
        "input_tokens": 50,
        "cache_read_input_tokens": 2400,
        "cache_creation_input_tokens": 120,
        "output_tokens": 9,
    }
    u.always(answer(usage=usage, repeat_usage=repeat))
    text = (await http.post("/v1/messages", json={"model": "m1", "stream": True})).text
    kinds = {event["type"]: event for event in map(json.loads, data_lines(text))}
    assert kinds["message_start"]["message"]["usage"] == {**usage, "output_tokens": 1}
    assert kinds["message_delta"]["usage"] == (usage if repeat else {"output_tokens": 9})


async def test_embeddings_are_known_from_the_text(u: StubUpstream, http: httpx.AsyncClient) -> None:
    made = (await http.post("/v1/embeddings", json={"model": "e", "input": ["b", "a", "b"]})).json()
    assert [item["index"] for item in made["data"]] == [0, 1, 2]
    assert [item["embedding"] for item in made["data"]] == [known_vector("b"), known_vector("a"), known_vector("b")]
    assert known_vector("a") != known_vector("b")
    one = {"model": "e", "input": "a", "dimensions": 3, "encoding_format": "base64"}
    packed = (await http.post("/v1/embeddings", json=one)).json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(packed))) == known_vector("a", 3)
    tokens = (await http.post("/v1/embeddings", json={"model": "e", "input": [[1, 2], [3]]})).json()
    assert [item["embedding"] for item in tokens["data"]] == [known_vector([1, 2]), known_vector([3])]
    assert len((await http.post("/v1/embeddings", json={"model": "e", "input": [1, 2]})).json()["data"]) == 1
    assert (await http.post("/v1/embeddings", json={"model": "e", "input": []})).status_code == 400
    assert u.n == 5


async def test_models_and_health_do_not_count(
    u: StubUpstream, sdk: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    assert [model.id async for model in sdk.models.list()] == ["m1"]
    assert (await sdk.models.retrieve("m1")).id == "m1"
    assert (await http.get("/health")).status_code == 200
    assert (u.n, [call.path for call in u.other_calls]) == (0, ["/v1/models", "/v1/models/m1", "/health"])


@pytest.mark.parametrize(
    "path", ["/chat/completions", "//chat/completions", "/v1/v1/chat/completions", URL + "/", "/v1"]
)
async def test_wrong_paths_are_counted_and_not_found(u: StubUpstream, http: httpx.AsyncClient, path: str) -> None:
    assert (await http.post(u.url + path, json=CHAT)).status_code == 404
    assert (u.n, u.calls[0].path) == (1, path)


async def test_another_base_path() -> None:
    async with StubUpstream(base_path="/api/x/v1") as u, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.post(u.url + "/api/x/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await http.post(u.url + URL, json=CHAT)).status_code == 404


# What a test can see


async def test_requests_are_kept_to_the_byte(u: StubUpstream, wire: Socket) -> None:
    head = b"POST /v1/x?y=1 HTTP/1.1\r\nHost: u\r\nX-A: 1\r\nx-a:  2\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = head + b'4\r\n{"a"\r\n3\r\n:1}\r\n0\r\n\r\n'
    await (await wire.send(sent)).readuntil(b"\r\n\r\n")
    call = u.calls[0]
    assert (call.raw, call.body, call.json) == (sent, b'{"a":1}', {"a": 1})
    assert (call.method, call.target, call.path, call.number) == ("POST", "/v1/x?y=1", "/v1/x", 1)
    assert call.raw_headers[1:3] == [(b"X-A", b"1"), (b"x-a", b"2")]
    assert call.headers["x-a"] == "2"


async def test_pipelined_requests_are_answered_in_order(u: StubUpstream, wire: Socket) -> None:
    u.reply(body(b"one").delayed(0.05), body(b"two"))
    reader = await wire.send(b"POST /v1/x HTTP/1.1\r\nHost: u\r\nContent-Length: 1\r\n\r\nx" * 2)
    assert (await reader.readuntil(b"one")).endswith(b"one")
    assert (await reader.readuntil(b"two")).endswith(b"two")


async def test_a_client_that_leaves_is_seen(u: StubUpstream, wire: Socket) -> None:
    u.reply(answer().delayed(30), answer().pause(before=0, seconds=30), answer().paced(0.05), answer().ending("stall"))
    for number in range(4):
        await wire.post(STREAM)
        await u.wait_calls(number + 1)
        await asyncio.sleep(0.1)
        assert u.running == u.open_connections == 1
        wire.leave()
        await u.wait_closed(u.calls[number], timeout=1)
        assert not u.calls[number].answered.is_set()
    assert u.closed_by_peer == u.calls
    assert u.running == 0


async def test_leaving_after_the_answer_is_no_early_close(u: StubUpstream, http: httpx.AsyncClient) -> None:
    await http.post(URL, json=CHAT)
    await http.aclose()
    await u.wait_idle()
    assert u.calls[0].answered.is_set()
    assert u.closed_by_peer == []


async def test_stop_and_start_on_the_same_port(u: StubUpstream) -> None:
    async with httpx.AsyncClient(base_url=u.url, trust_env=False) as http:
        await http.post(URL, json=CHAT)
        await u.stop()
        assert u.open_connections == 0
        with pytest.raises(httpx.ConnectError):
            await http.post(URL, json=CHAT)
        await u.start()
        assert "ans-2" in (await http.post(URL, json=CHAT)).text


# Which script answers


async def test_queue_then_standing_script_then_default(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(error(429), error(500))
    assert [(await http.post(URL, json=CHAT)).status_code for _ in range(3)] == [429, 500, 200]
    u.always(error(503))
    u.reply(answer("once"))
    assert [(await http.post(URL, json=CHAT)).status_code for _ in range(3)] == [200, 503, 503]
    u.script = lambda call: answer(f"to {call.json['messages'][0]['content']}")
    assert "to Say A" in (await http.post(URL, json=CHAT)).text


async def test_scripts_by_path(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.on("/v1/models", error(503))
    u.on("/v1/audio/speech", body(b"RIFF", "audio/wav"))
    assert (await http.get("/v1/models")).status_code == 503
    assert (await http.post("/v1/audio/speech", json={})).headers["content-type"] == "audio/wav"
    assert (await http.post(URL, json=CHAT)).status_code == 200


async def test_a_broken_script_is_said(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.reply(lambda call: answer(call.json["nothing"]))
    response = await http.post(URL, json=CHAT)
    assert (response.status_code, "KeyError" in response.text) == (500, True)


async def test_errors_have_the_form_of_their_dialect(u: StubUpstream, http: httpx.AsyncClient) -> None:
    u.always(error(429, "slow down", "rate_limit_error").header("retry-after", "7"))
    openai_form = await http.post(URL, json=CHAT)
    assert openai_form.json()["error"] == {
        "message": "slow down",
        "type": "rate_limit_error",
        "param": None,
        "code": None,
    }
    assert openai_form.headers["retry-after"] == "7"
    anthropic_form = (await http.post("/v1/messages", json={})).json()
    assert anthropic_form == {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}


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


# By hand


def test_the_command_line_serves() -> None:
    command = [sys.executable, "-m", "loadtest.stub_upstream", "--port", "0", "--model", "big", "--tokens", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(",")[0].removeprefix("stub upstream at ")
            made = httpx.post(url + "/chat/completions", json=CHAT, trust_env=False).json()
            assert made["choices"][0]["message"]["content"] == "ans-1 word word"
            assert httpx.get(url + "/models", trust_env=False).json()["data"][0]["id"] == "big"
        finally:
            process.terminate()
