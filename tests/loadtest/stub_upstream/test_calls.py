"""Which script answers a call, and what a test can see of it."""

import asyncio
import subprocess
import sys

import httpx
import pytest

from loadtest.stub_upstream import StubUpstream, answer, body, error
from tests.loadtest.stub_upstream.talk import CHAT, STREAM, URL, Socket

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
