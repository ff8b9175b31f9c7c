"""The short path against the full path: whatever is sent, it says the same, byte for byte, or closes the connection."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from loadtest.stub_upstream import StubUpstream
from tests.gateway.odd_requests import (
    CHAT,
    HIT,
    KNOWN,
    ODD,
    STREAM,
    UPGRADE,
    USAGE,
    first,
    line,
)
from tests.gateway.pair import AWAIT, SAID, Pair, Side, running_pair
from tests.harness import running_gateway, upstream
from tests.raw import post
from tests.waiting import until

TENANTS: list[dict[str, Any]] = [
    {
        "name": "t1",
        "keys": [
            "sha256:" + hashlib.sha256(b"K1").hexdigest(),
            {"key": "sha256:" + hashlib.sha256(b"K1-narrow").hexdigest(), "models": ["m2"]},
        ],
    },
    {"name": "t2", "keys": ["sha256:" + hashlib.sha256(b"K2").hexdigest()]},
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two gateways, open, that know the answers to `KNOWN` in both forms."""
    with running_pair({}) as made:
        for body in (KNOWN, STREAM, USAGE):
            made.in_step(post(CHAT, body))
        yield made


@pytest.fixture
def closed_pair(changes: dict[str, Any]) -> Iterator[Pair]:
    """Two gateways with tenants, of which K1 has asked; ``changes`` are taken into use by a reload."""
    with running_pair({"tenants": TENANTS}, changes) as made:
        made.in_step(keyed("K1"))
        yield made


@pytest.fixture
def changes() -> dict[str, Any]:
    return {}


def keyed(key: str, body: bytes = KNOWN) -> bytes:
    return post(CHAT, body, f"Authorization: Bearer {key}")


def fresh(number: object) -> bytes:
    """A question that nobody has asked."""
    return KNOWN.replace(b"known", f"new {number}".encode())


async def reload(side: Side) -> None:
    response = await side.running.client.post("/admin/reload")
    assert response.status_code == 200, response.text


# What is for the short path


@pytest.mark.parametrize("body", [KNOWN, STREAM, USAGE], ids=["plain", "stream", "stream with usage"])
def test_a_repeat_is_answered_without_the_pipeline_and_with_the_same_bytes(pair: Pair, body: bytes) -> None:
    told = pair.shortened(post(CHAT, body))
    assert told.statuses == [200, 200]
    assert b"detail=exact" in told.responses[0][0]
    assert SAID.split(" ")[0].encode() in told.responses[0][1]
    pair.clock.advance(7)
    assert b"\r\nage: %d\r\n" % (pair.clock.monotonic() - 1000) in pair.shortened(post(CHAT, body)).responses[0][0]


def test_many_repeats_over_one_connection(pair: Pair) -> None:
    told = pair.shortened(*[HIT, AWAIT] * 19, HIT)
    assert told.statuses == [200] * 21


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Request-Id: mine-1"],
        ["X-Request-Id: " + "0123456789abcdef" * 2],
        ["accept: */*", "accept-encoding: gzip, deflate, br, zstd", "accept-language: *", "user-agent: x/1 (y; z)"],
        ["Connection: keep-alive"],
        ["CONNECTION: Keep-Alive"],
        ["X-STAINLESS-Lang: python", "x-stainless-retry-count: 0", "OpenAI-Organization: o", "OpenAI-Project: p"],
        ["Authorization: Bearer whatever"],
        ["traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate: a=b"],
        ["x-api-key: whatever"],
    ],
)
def test_the_usual_headers_do_not_stand_in_its_way(pair: Pair, headers: list[str]) -> None:
    told = pair.shortened(post(CHAT, KNOWN, *headers))
    assert told.statuses == [200, 200]
    if headers == ["X-Request-Id: mine-1"]:
        assert b"\r\nx-request-id: mine-1\r\n" in told.responses[0][0]


async def test_the_official_clients_take_it() -> None:
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url)]}) as gateway:
        entered = 0
        enter = gateway.app.pipeline.answer

        async def counted(*arguments: Any) -> Any:
            nonlocal entered
            entered += 1
            return await enter(*arguments)

        gateway.app.pipeline.answer = counted  # type: ignore[method-assign]
        chat: Any = orjson.loads(KNOWN)
        message: Any = {"model": "m1", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        message["extra_body"] = {"temperature": 0}
        async with (
            openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as gpt,
            anthropic.AsyncAnthropic(base_url=gateway.url, api_key="k", max_retries=0) as claude,
        ):
            for _ in range(3):
                await gpt.chat.completions.create(**chat)
                await claude.messages.create(**message)
                assert [c async for c in await gpt.chat.completions.create(**chat, stream=True)]
        assert u.n == 2
        assert entered == 3, "each form of a question goes through the pipeline once"


@pytest.mark.parametrize("body", [KNOWN, STREAM])
def test_cut_anywhere_in_two(pair: Pair, body: bytes) -> None:
    whole = post(CHAT, body, "X-Request-Id: cut")
    for at in range(1, len(whole), 3 if body is STREAM else 1):
        told = pair.shortened(whole[:at], whole[at:], gap=0.001) if at > whole.index(b"\r\n\r\n") + 3 else None
        assert (told or pair.in_step(whole[:at], whole[at:], gap=0.001)).statuses == [200, 200]


def test_byte_by_byte(pair: Pair) -> None:
    whole = HIT + post(CHAT, fresh("byte by byte")) + HIT
    assert pair.in_step(*(whole[i : i + 1] for i in range(len(whole))), gap=0.0002).statuses == [200] * 4


def test_a_large_body_in_many_pieces(pair: Pair) -> None:
    large = KNOWN.replace(b"known", b"x" * 300_000)
    pair.in_step(post(CHAT, large))
    whole = post(CHAT, large)
    pieces = cut(whole, 7001)
    assert pair.shortened(*pieces, gap=0.0005).statuses == [200, 200]
    assert pair.in_step(*pieces[:-1], pieces[-1] + HIT, gap=0.0005).statuses == [200, 200, 200]


# What is not, and must come out the same


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("before", [False, True], ids=["first", "after a hit"])
def test_whatever_is_odd_comes_out_the_same(pair: Pair, odd: str, before: bool) -> None:
    hits = (HIT, AWAIT) if before else ()
    told = pair.in_step(*hits, ODD[odd], HIT, gap=0.002)
    if before:
        assert b"detail=exact" in told.responses[0][0]


PIPELINES: dict[str, list[bytes]] = {
    "hits": [HIT] * 7,
    "hit and miss": [HIT, post(CHAT, fresh("p1")), HIT],
    "miss and hit": [post(CHAT, fresh("p2")), HIT, HIT],
    "bad and hit": [post(CHAT, b"{"), HIT],
    "hit and bad": [HIT, post(CHAT, b"{"), HIT],
    "hit and garbage": [HIT, b"\x00\x01garbage\r\n\r\n"],
    "hit and closing": [HIT, line(b"Connection: close"), HIT],
    "closing and hit": [line(b"Connection: close"), HIT],
    "stream and plain": [post(CHAT, STREAM), HIT, post(CHAT, USAGE), HIT],
    "hit and GET": [HIT, b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", HIT],
    "hit and chunked": [HIT, ODD["chunked"], HIT],
    "chunked and hit": [ODD["chunked"], HIT],
    "hit and expecting": [HIT, ODD["expecting"], HIT],
    "too long a body and hit": [ODD["one too short"], HIT],
    "unread admin body and hit": [first(b"POST /admin/nothing HTTP/1.1"), HIT],
    "half a request": [HIT, HIT[:50]],
    "half a body": [HIT, HIT[:-5]],
    "upgrade and hit": [UPGRADE, HIT],
    "smuggled": [ODD["chunked and a length"], HIT],
    "sampled": [post(CHAT, KNOWN.replace(b'"temperature":0,', b"")), HIT],
}  # fmt: skip


def cut(whole: bytes, size: int) -> list[bytes]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


GROUPED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "together": lambda requests: [b"".join(requests)],
    "apart": lambda requests: requests,
    "in turn": lambda requests: [part for request in requests[:-1] for part in (request, AWAIT)] + requests[-1:],
    "cut at odd places": lambda requests: cut(b"".join(requests), 97),
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("grouped", GROUPED)
def test_several_requests_over_one_connection(pair: Pair, name: str, grouped: str) -> None:
    requests = [relength(request.replace(b"new p", f"new {grouped} p".encode())) for request in PIPELINES[name]]
    pair.in_step(*GROUPED[grouped](requests), gap=0.004)


def relength(request: bytes) -> bytes:
    """The request with its length as it is, where it was right and the body has changed since."""
    head, mark, body = request.partition(b"\r\n\r\n")
    if b"new " not in body:
        return request
    told = next(part for part in head.split(b"\r\n") if part.startswith(b"Content-Length"))
    return head.replace(told, b"Content-Length: %d" % len(body)) + mark + body


# Who may have it


def test_keys_of_one_tenant_with_other_rights(closed_pair: Pair) -> None:
    assert closed_pair.shortened(keyed("K1")).statuses == [200, 200]
    for key, status in (("K1-narrow", 403), ("wrong", 401), ("", 401)):
        assert closed_pair.in_step(keyed(key)).statuses == [status, 200]
    assert closed_pair.in_step(HIT).statuses == [401, 200]
    assert closed_pair.in_step(post(CHAT, KNOWN, "X-Api-Key: K1")).statuses == [200, 200]
    assert closed_pair.in_step(post(CHAT, KNOWN, "X-Api-Key: K1", "Authorization: Bearer K2")).statuses[0] == 200
    told = closed_pair.in_step(keyed("K1"), keyed("K1-narrow"), keyed("K2"), keyed("K1"), gap=0.005)
    assert told.statuses == [200, 403, 200, 200, 200]
    assert (closed_pair.wire.upstream.n, closed_pair.full.upstream.n) == (2, 2)


def test_a_reload_takes_rights_away_at_once(closed_pair: Pair, changes: dict[str, Any]) -> None:
    assert closed_pair.shortened(keyed("K1")).statuses == [200, 200]
    changes["tenants"] = [TENANTS[1]]
    closed_pair.both(reload)
    assert closed_pair.in_step(keyed("K1")).statuses == [401, 200]
    changes["tenants"] = [{**TENANTS[0], "models": ["m2"]}, TENANTS[1]]
    closed_pair.both(reload)
    assert closed_pair.in_step(keyed("K1")).statuses == [403, 200]
    changes["tenants"] = [{**TENANTS[0], "limits": {"requests_per_minute": 2}}, TENANTS[1]]
    closed_pair.both(reload)
    told = closed_pair.in_step(*[keyed("K1")] * 4, gap=0.01)
    assert told.statuses == [200, 200, 429, 429, 200]
    changes["tenants"] = TENANTS
    closed_pair.both(reload)
    assert closed_pair.in_step(keyed("K1")).statuses == [200, 200]


def test_a_reload_changes_what_a_name_stands_for_and_how_large_a_body_may_be(changes: dict[str, Any]) -> None:
    with running_pair({"models": {"alias": {"target": "m1"}}}, changes) as pair:
        request = post(CHAT, KNOWN.replace(b'"m1"', b'"alias"'))
        pair.in_step(request)
        assert b'"model":"m1"' in pair.shortened(request).responses[0][1]
        changes["models"] = {"alias": {"target": "m2"}}
        pair.both(reload)
        told = pair.in_step(request)
        assert b"fwd=uri-miss" in told.responses[0][0]
        assert b'"model":"m2"' in told.responses[0][1]
        changes["limits"] = {"max_body": 50}
        pair.both(reload)
        assert pair.same(request).statuses == [413]
        changes["limits"] = {"max_body": 5000}
        pair.both(reload)
        assert pair.in_step(request).statuses == [200, 200]


def test_purges_and_expiry_are_seen_at_once(changes: dict[str, Any]) -> None:
    with running_pair({"cache": {"ttl": "100s", "stale_while_revalidate": "1h"}}, changes) as pair:

        def purge(**order: Any) -> None:
            async def send(side: Side) -> None:
                await side.running.client.post("/admin/purge", json=order)

            pair.both(send)

        for order in ({"model": "m1"}, {"all": True}, {"tenant": "default"}):
            pair.in_step(HIT)
            pair.shortened(HIT)
            purge(**order)
            assert b"fwd=uri-miss" in pair.in_step(HIT).responses[0][0]
        pair.shortened(HIT)
        purge(model="m1", soft=True)
        assert b"detail=stale" in pair.in_step(HIT).responses[0][0]
        settle(pair)
        pair.shortened(HIT)
        pair.clock.advance(99)
        assert b"ttl=1;" in pair.shortened(HIT).responses[0][0]
        pair.clock.advance(1)
        assert b"detail=stale" in pair.in_step(HIT).responses[0][0]
        settle(pair)
        pair.shortened(HIT)


def settle(pair: Pair) -> None:
    """Waits until what is renewed in the background is renewed."""

    async def wait(side: Side) -> None:
        await asyncio.sleep(0.05)
        await until(lambda: not side.running.app.runtime.flights, "nothing is under way")

    pair.both(wait)


def test_a_change_of_the_curated_answers_is_seen_at_once(tmp_path: Path) -> None:
    path = tmp_path / "faq.yaml"
    path.write_text("[]\n")
    with running_pair({"faq": {"path": str(path)}}) as pair:
        pair.in_step(HIT)
        pair.shortened(HIT)

        def write(text: str) -> None:
            async def put(side: Side) -> None:
                response = await side.running.client.put("/admin/faq", content=text)
                assert response.status_code == 200

            pair.both(put)

        write('- ask: ["known"]\n  answer: "curated"\n')
        told = pair.in_step(HIT)
        assert b"detail=faq" in told.responses[0][0]
        assert b"curated" in told.responses[0][1]
        write("[]\n")
        assert b"detail=exact" in pair.in_step(HIT).responses[0][0]


def test_what_is_varied_by_a_header_is_kept_apart(pair: Pair) -> None:
    message = orjson.dumps({"model": "m1", "max_tokens": 9, "temperature": 0, "messages": []})
    for beta in ("a", "b", "a,b"):
        request = post("/v1/messages", message, f"Anthropic-Beta: {beta}", "anthropic-version: 1")
        assert b"fwd=uri-miss" in pair.in_step(request).responses[0][0]
        pair.shortened(request)
    other = post("/v1/messages", message, "Anthropic-Beta: a", "anthropic-version: 2")
    assert b"fwd=uri-miss" in pair.in_step(other).responses[0][0]
