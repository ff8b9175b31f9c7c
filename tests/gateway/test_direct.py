"""Requests that take no part in the cache go straight from socket to socket: whatever the upstream does, the caller is
told what the full path would have told, the ledger counts the same, and nothing is left counted as under way.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from gateway.ledger.counters import LATENCY_US
from gateway.ledger.query import FOREVER, Scope, rows, sums
from gateway.ledger.schema import GROUP
from loadtest.stub_upstream import Reply, answer, body, error, events, raw
from tests.gateway.pair import AWAIT, SENTINEL, Pair, Side, running_pair
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m1", "temperature": 1, "messages": [{"role": "user", "content": "Say something"}]}
STREAM = PLAIN | {"stream": True}
WITH_USAGE = STREAM | {"stream_options": {"include_usage": True}}
RETRY = {"rounds": 1, "base": "10ms", "longest": "50ms"}


def post(asked: dict[str, Any], *headers: str) -> bytes:
    data = orjson.dumps(asked)
    lines = ["POST " + CHAT + " HTTP/1.1", "Host: h", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair({"retry": RETRY}) as made:
        made.same(post(PLAIN), AWAIT, SENTINEL)  # models are known then, and there is a connection to be used again
        yield made


def reply(pair: Pair, reply: Reply) -> None:
    for side in (pair.wire, pair.full):
        side.upstream.always(reply)


def under_way(side: Side) -> list[float]:
    member = side.running.app.runtime.pool.members[0]
    usage = side.running.app.runtime.usages.of("default")
    return [member.in_flight, member.engine.running, member.engine.pending, usage.concurrent]


def counted(pair: Pair, side: Side) -> tuple[list[Any], list[Any]]:
    """All that the ledger has counted so far, and each of its last rows, times and ids aside."""
    ledger = side.running.app.runtime.ledger
    found = pair.run(ledger.read(lambda connection: sums(connection, Scope(0, FOREVER), GROUP)))
    kept = pair.run(ledger.read(lambda connection: rows(connection, Scope(0, FOREVER), 20)))
    aside = ("at", "latency", "ttft", "request_id")
    shown = [{name: value for name, value in row.items() if name not in aside} for row in kept]
    return sorted((line.key, line.counts[:LATENCY_US]) for line in found), shown


def settled(pair: Pair) -> None:
    """Nothing is left under way on either side, and both have counted the same."""
    for side in (pair.wire, pair.full):
        wait_until(lambda side=side: under_way(side) == [0, 0, 0, 0], "nothing is under way")
    assert counted(pair, pair.wire) == counted(pair, pair.full)


REPLIES: dict[str, Reply] = {
    "good": answer("well"),
    "two choices": answer("well", n=2),
    "without usage": body(b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"choices":[]}'),
    "absurd usage": answer("well", usage={"prompt_tokens": -5, "completion_tokens": "x"}),
    "not JSON": body(b"hello"),
    "a web page": body(b"<html></html>", "text/html"),
    "empty": body(b""),
    "compressed": answer("well").encoded("gzip"),
    "an unknown coding": answer("well").header("content-encoding", "zzz"),
    "a damaged coding": body(b"not gzip").header("content-encoding", "gzip"),
    "framed by its end": answer("well").framed("close"),
    "chunked": answer("well").framed("chunked"),
    "cut": answer("well").cut(after=1, then="close"),
    "reset in the middle": answer("well well well").cut(after=2, then="reset"),
    "broken in its first chunk": raw(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"),
    "a hostile header": answer("well").header("openai-x", "a\x0bb"),
    "400": error(400),
    "401": error(401),
    "404": error(404),
    "429": error(429).header("retry-after", "0"),
    "500": error(500),
    "503": error(503),
    "closed at once": raw(b"", then="close"),
    "reset at once": raw(b"", then="reset"),
    "not HTTP": raw(b"what?\r\n\r\n"),
    "an interim response": raw(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", then="end"
    ),
    "an error event": events({"error": {"message": "no", "code": 1}}),
    "events that are not JSON": events(b"data: {\n\n"),
    "comments first": events(b": wait\n\n", {"choices": []}, "[DONE]"),
    "an end without an end": events({"choices": [{"index": 0, "delta": {"content": "a"}}]}),
    "event by event": answer(deltas=["a", "b", "c"]).paced(0.01),
    "cut anywhere": answer("你好🙂 well").regroup(every=1),
}


@pytest.mark.parametrize("asked", [PLAIN, STREAM, WITH_USAGE], ids=["plain", "stream", "stream with usage"])
@pytest.mark.parametrize("name", REPLIES)
def test_the_caller_and_the_ledger_are_told_what_the_full_path_tells(
    pair: Pair, name: str, asked: dict[str, Any]
) -> None:
    begun = pair.wire.direct
    reply(pair, REPLIES[name])
    pair.same(post(asked, "x-request-id: mine"), AWAIT, SENTINEL)
    assert pair.wire.direct == begun + 1, "it was not sent directly"
    reply(pair, answer("again"))
    told = pair.same(post(PLAIN), AWAIT, SENTINEL)
    assert told.statuses == [200, 200], "what one answer was like concerns no other"
    settled(pair)


@pytest.mark.parametrize(
    "asked",
    [
        PLAIN | {"temperature": 0},
        PLAIN | {"model": "nobody's"},
        PLAIN | {"model": ""},
        PLAIN | {"store": True},
        PLAIN | {"tools": [{"type": "web_search"}]},
        [],
    ],
)
def test_what_it_is_not_for_is_left_alone(pair: Pair, asked: Any) -> None:
    reply(pair, answer("well"))
    pair.in_step(post(asked))
    settled(pair)


def test_pipelined_requests_are_answered_in_their_order(pair: Pair) -> None:
    reply(pair, answer("well"))
    told = pair.same(post(PLAIN, "x-request-id: a") + post(STREAM, "x-request-id: b") + post(PLAIN, "x-request-id: c"))
    assert [head.split(b"x-request-id: ")[1][:1] for head, _ in told.responses] == [b"a", b"b", b"c"]
    told = pair.same(post(STREAM, "x-request-id: a"), post(PLAIN, "x-request-id: b"), post(STREAM, "x-request-id: c"))
    assert [head.split(b"x-request-id: ")[1][:1] for head, _ in told.responses] == [b"a", b"b", b"c"]
    settled(pair)


def connect(side: Side) -> socket.socket:
    parts = urlsplit(side.running.url)
    return socket.create_connection((parts.hostname, parts.port))


@pytest.mark.parametrize("when", ["before the head", "in the stream"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_caller_who_leaves_ends_the_upstream_call(pair: Pair, when: str, how: str) -> None:
    never = asyncio.Event()
    reply(pair, answer(deltas=["a"] * 9).held(never, before=None if when == "before the head" else 3))
    for side in (pair.wire, pair.full):
        with connect(side) as sock:
            sock.sendall(post(STREAM))
            if when == "in the stream":
                assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            else:
                wait_until(lambda side=side: side.upstream.running == 1, "its call is under way")
                assert under_way(side)[0] == 1
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    settled(pair)
    for side in (pair.wire, pair.full):
        wait_until(side.upstream.calls[-1].closed_by_peer.is_set, "the upstream computes for nobody no more")


def test_a_slow_caller_gets_all_and_holds_the_upstream_back(pair: Pair) -> None:
    piece = "x" * 65_536
    reply(pair, answer(deltas=[piece] * 60))
    for side in (pair.wire, pair.full):
        with connect(side) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            sock.sendall(post(STREAM, "connection: keep-alive"))
            time.sleep(0.5)
            buffered = side.running.app.runtime.client._connections
            held = [c._response.buffered for c in buffered if c._response is not None]
            assert all(size < 1 << 20 for size in held)
            got = bytearray()
            while b"[DONE]\n\n\r\n0\r\n\r\n" not in got[-64:]:
                data = sock.recv(1 << 20)
                assert data
                got += data
            assert got.count(piece.encode()) == 60
    settled(pair)
