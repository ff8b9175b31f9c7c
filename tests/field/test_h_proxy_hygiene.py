"""Field cases, section H: codings, addresses, sizes, memory and headers on the way through."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from loadtest.stub_upstream import StubUpstream, answer, body, delta, events, json_body
from tests.field.conftest import CHAT, B, Bench, World, both_paths, hashed, one_world
from tests.field.reading import ASKS, events_of
from tests.harness import upstream
from tests.raw import RawConnection, post

STREAMED = B | {"stream": True}


def spoken() -> list[bytes]:
    """A stream of a few words."""
    return [b"data: " + orjson.dumps(delta(content=word)) + b"\n\n" for word in ("a", "b", "c", "d", "e")]


EVERY_API = {**ASKS, "embeddings": ("/v1/embeddings", {"model": "m1", "input": "a"})}
CODINGS = ("gzip", "br", "deflate", "zstd")


@contextmanager
def growth_below(megabytes: float) -> Iterator[None]:
    """Holds that this process never grows by more, within, over what it had before."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    yield
    growth = _status("VmHWM") - before
    assert growth < megabytes, f"{growth:.1f} MB"


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(name))


@both_paths
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_o48_an_answer_in_any_coding_is_readable_by_anyone(bench: Bench, stream: bool) -> None:
    for number, coding in enumerate(CODINGS):
        for wanted in (None, "identity", "gzip, br, zstd"):
            ask = B | {"stream": stream, "seed": number, "user": wanted, "stop": str(wanted)}
            bench.u.reply(answer("coded ✓").encoded(coding))
            headers = {"accept_encoding": wanted} if wanted else {}
            missed, hit = await bench.miss(ask, **headers), await bench.hit(ask, **headers)
            other = await bench.hit(ask | {"stream": not stream}, accept_encoding="identity")
            for reply in (missed, hit, other):
                assert reply.text == "coded ✓"
                assert "content-encoding" not in reply.response.headers
                length = reply.response.headers.get("content-length")
                assert length is None or int(length) == len(reply.response.content)


@one_world
async def test_o48_the_openai_client_reads_them_all(bench: Bench) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bench.gateway.url}/v1", api_key="k", max_retries=0) as client:
        for number, coding in enumerate(CODINGS):
            bench.u.reply(answer("coded ✓").encoded(coding))
            ask: Any = B | {"seed": number}
            for _ in range(2):
                assert (await client.chat.completions.create(**ask)).choices[0].message.content == "coded ✓"
                chunks = [c async for c in await client.chat.completions.create(**ask, stream=True)]
                assert "".join(c.choices[0].delta.content or "" for c in chunks) == "coded ✓"
    assert bench.u.n == len(CODINGS)


@one_world
async def test_o48_the_upstream_is_not_invited_to_encode_and_errors_are_readable_too(bench: Bench) -> None:
    bench.u.reply(json_body({"error": {"message": "no"}}, status=400).encoded("gzip"))
    reply = await bench.miss(B, accept_encoding="gzip")
    assert reply.response.json() == {"error": {"message": "no"}}
    assert bench.u.calls[0].headers["accept-encoding"] == "identity"


@one_world
async def test_o48_a_coding_that_nobody_here_knows_is_passed_on_with_its_label(bench: Bench) -> None:
    secret = b"\x01\x02 not ours to read"
    for stream in (False, True):
        script = body(secret, "text/event-stream" if stream else "application/json")
        bench.u.reply(script.header("content-encoding", "snappy"))
        async with bench.streaming(B | {"stream": stream}) as response:
            assert response.headers["content-encoding"] == "snappy"
            assert b"".join([piece async for piece in response.aiter_raw()]) == secret
    assert bench.stored == 0


@one_world
@pytest.mark.parametrize("coding", CODINGS)
async def test_o48_a_request_body_may_be_encoded_as_well(bench: Bench, coding: str) -> None:
    """Derived: the same question, encoded or not, is one question."""
    from loadtest.stub_upstream.codings import compressor

    compress, _, finish = compressor(coding)
    raw = orjson.dumps(B)
    encoded = compress(raw)
    encoded += finish()
    await bench.miss(encoded, content_encoding=coding)
    assert bench.u.calls[0].json == B
    assert "content-encoding" not in bench.u.calls[0].headers
    await bench.hit(raw)
    await bench.hit(encoded, content_encoding=coding)


BASES = [
    ("", "/v1"),
    ("/", "/v1"),
    ("/v1", "/v1"),
    ("/v1/", "/v1"),
    ("/api/x/v1/", "/api/x/v1"),
    ("/api/x", "/api/x/v1"),
    ("/openai/", "/openai/v1"),
]


@one_world
@pytest.mark.parametrize(("suffix", "base"), BASES, ids=[suffix or "none" for suffix, _ in BASES])
async def test_o49_the_upstream_sees_one_right_path(world: World, suffix: str, base: str) -> None:
    async with StubUpstream(base_path=base) as u, world.bench(u, upstreams=[upstream(u.url + suffix)]) as bench:
        for path, ask in EVERY_API.values():
            for slash in ("", "/"):
                reply = await bench.miss({**ask, "seed": len(slash)}, path + slash)
                assert reply.status == 200
                assert not reply.response.history
                assert u.calls[-1].path == base + path.removeprefix("/v1")
        await bench.send({"model": "m1"}, "/v1/audio/speech")
        assert u.calls[-1].path == f"{base}/audio/speech"
        models = await bench.gateway.client.get("/v1/models")
        assert [model["id"] for model in models.json()["data"]] == ["m1"]


LIMIT = 1_000_000
BIG = orjson.dumps(B | {"messages": [{"role": "user", "content": "x" * 2_000_000}]})


def chunked(path: str, whole: bytes, size: int = 60_000) -> bytes:
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


TOO_LARGE = {
    "announced": post(CHAT, BIG),
    "chunked": chunked(CHAT, BIG),
    "expecting": post(CHAT, BIG, "Expect: 100-continue")[: -len(BIG)],
    "a bomb": post(CHAT, gzip.compress(b" " * 50_000_000), "Content-Encoding: gzip"),
    "a chunked bomb": chunked(CHAT, gzip.compress(b" " * 50_000_000)).replace(
        b"Host: h", b"Host: h\r\nContent-Encoding: gzip"
    ),
    "one byte": post(CHAT, orjson.dumps(B) + b" " * (LIMIT + 1 - len(orjson.dumps(B)))),
}


@both_paths
@pytest.mark.parametrize("how", TOO_LARGE)
async def test_o50_what_is_too_large_is_told_so_and_never_held(world: World, how: str) -> None:
    async with world.bench(limits={"max_body": LIMIT}) as bench:
        async with await RawConnection.open(bench.gateway.url) as connection:
            with growth_below(12):
                connection.send(TOO_LARGE[how])
                refused = await connection.answer()
            assert refused is not None
            assert refused.status == 413
            assert orjson.loads(refused.body)["error"]["code"] == "request_too_large"
            assert refused.header("x-request-id")
            assert await connection.is_closed()
        assert bench.u.n == 0
        assert (await bench.outcomes()) == {"error": 1}
        just = orjson.dumps(B)
        assert (await bench.miss(just + b" " * (LIMIT - len(just)))).status == 200


@one_world
async def test_o50_in_the_form_of_each_api(world: World) -> None:
    async with world.bench(limits={"max_body": LIMIT}) as bench:
        for path, kind in (("/v1/messages", "request_too_large"), ("/v1/responses", "invalid_request_error")):
            reply = await bench.send(BIG, path)
            assert reply.status == 413
            assert reply.response.json()["error"]["type"] == kind


@both_paths
async def test_o50_a_false_small_length_is_a_short_body_and_what_follows_is_no_request(world: World) -> None:
    async with world.bench(limits={"max_body": LIMIT}) as bench:
        async with await RawConnection.open(bench.gateway.url) as connection:
            connection.send(post(CHAT, BIG[:10]) + BIG[10:])
            refused = await connection.answer()
            assert refused is not None
            assert refused.status == 400
            following = await connection.answer()
            assert following is None or following.status == 400
            assert await connection.is_closed()
        assert bench.u.n == 0


@both_paths
async def test_o50_a_body_without_end_is_cut_off(world: World) -> None:
    """Derived: whoever goes on sending for ever is not drained for ever."""
    async with world.bench(limits={"max_body": 100_000}) as bench:
        async with await RawConnection.open(bench.gateway.url) as connection:
            connection.send(f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            piece = b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000)
            sent = 0
            with pytest.raises((ConnectionError, TimeoutError)):
                async with asyncio.timeout(10):
                    while sent < 200:
                        connection.send(piece)
                        await connection.writer.drain()
                        await asyncio.sleep(0)
                        sent += 1
                    raise AssertionError("it was all taken")
        assert bench.u.n == 0


@both_paths
async def test_o51_a_caller_that_does_not_read_holds_the_upstream_back(bench: Bench) -> None:
    piece = b"data: " + orjson.dumps(delta(content="x" * 100_000)) + b"\n\n"
    bench.u.reply(events(*[piece] * 2000))  # 200 MB
    async with await RawConnection.open(bench.gateway.url, receive_buffer=65536) as connection:
        with growth_below(24):
            connection.send(post(CHAT, orjson.dumps(STREAMED)))
            await bench.u.wait_calls(1)
            written = -1
            while written != len(bench.u.calls[0].writes):
                written = len(bench.u.calls[0].writes)
                await asyncio.sleep(0.3)
        assert written * 100_000 < 40_000_000, "the rest waits at the upstream"
    await bench.u.wait_closed(bench.u.calls[0])
    await bench.at_rest()
    assert bench.stored == 0


@one_world
async def test_o51_an_event_without_end_is_given_up(bench: Bench) -> None:
    bench.u.reply(events(b"data: {", *[b"x" * 100_000] * 500))  # 50 MB
    with growth_below(64):
        reply = await bench.miss(STREAMED)
    seen = events_of(reply.response.content)
    assert len(seen) == 1
    assert "error" in seen[0].json
    assert len(reply.response.content) < 1000
    assert bench.stored == 0


@one_world
async def test_o51_memory_is_bounded_in_bytes(world: World) -> None:
    settings = {"memory": {"max_bytes": "32MiB"}, "max_entry": "16MiB"}
    async with world.bench(cache=settings) as bench:
        memory = bench.gateway.app.runtime.memory
        assert memory is not None
        for number in range(10):
            bench.u.reply(answer("x" * 10_000_000))
            await bench.miss(B | {"seed": number})
            assert memory.bytes <= 32 * 1024 * 1024
        assert 0 < len(memory) <= 3


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_o51_an_answer_too_large_to_keep_is_passed_on_whole(bench: Bench, stream: bool) -> None:
    bench.u.always(answer(deltas=["x" * 100_000] * 15))
    for _ in range(2):
        assert len((await bench.miss(B | {"stream": stream})).text) == 1_500_000
    assert bench.not_stored["too large to keep"] == 2
    assert bench.stored == 0


@one_world
@pytest.mark.parametrize("path", [CHAT, "/v1/unknown"])
async def test_o51_a_caller_who_leaves_before_its_answer_is_begun_releases_all_it_holds(
    bench: Bench, path: str
) -> None:
    """Derived: its connection is full, so that not even the head can be sent; then it is gone."""
    bench.u.always(events(*spoken()).paced(0.2))
    whole, asked = orjson.dumps(STREAMED), asyncio.Event()

    async def receive() -> Any:
        return {"type": "http.request", "body": whole}

    async def send(_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    headers = [(b"host", b"h"), (b"content-length", b"%d" % len(whole))]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    caller = asyncio.create_task(bench.gateway.app(scope, receive, send))  # type: ignore[arg-type]
    await asked.wait()
    caller.cancel()
    await asyncio.wait([caller])
    await bench.u.wait_closed(bench.u.calls[0])
    await bench.at_rest()
    assert bench.gateway.app.runtime.tenants._open.usage.concurrent == 0
    assert await bench.outcomes() == {"error": 1}


@both_paths
async def test_o52_headers_that_change_the_answer_reach_the_upstream_and_the_key(world: World) -> None:
    path, ask = ASKS["messages"]
    asked: list[dict[str, str]] = [
        {"anthropic_version": "2023-06-01", "anthropic_beta": "a"},
        {"anthropic_version": "2023-06-01", "anthropic_beta": "b"},
        {"anthropic_version": "2023-06-01", "anthropic_beta": "a,b"},
        {"anthropic_version": "2023-06-01"},
        {"anthropic_version": "2024-01-01"},
        {},
    ]
    tenants = [{"name": "t1", "keys": [hashed("K1"), hashed("K1-too")]}, {"name": "t2", "keys": [hashed("K2")]}]
    async with world.bench(tenants=tenants) as bench:
        for number, headers in enumerate(asked):
            reply = await bench.miss(ask, path, key="K1", **headers)
            assert reply.text == f"ans-{number + 1}"
            seen = bench.u.calls[-1].headers
            for name in ("anthropic_beta", "anthropic_version"):
                assert seen.get(name.replace("_", "-")) == headers.get(name)
            assert "authorization" not in seen
        for number, headers in enumerate(asked):
            for key in ({"authorization": "Bearer K1"}, {"x_api_key": "K1"}, {"x_api_key": "K1-too"}):
                assert (await bench.hit(ask, path, **key, **headers)).text == f"ans-{number + 1}"
        await bench.miss(ask, path, key="K2")


@one_world
@pytest.mark.parametrize("api", ["chat", "completions", "responses", "embeddings"])
async def test_o52_openai_beta_as_well(bench: Bench, api: str) -> None:
    """Derived: it is sent upstream, so it belongs to the question; organisation and project are bookkeeping."""
    path, ask = EVERY_API[api]
    await bench.miss(ask, path)
    await bench.miss(ask, path, openai_beta="one=v1")
    assert bench.u.calls[-1].headers["openai-beta"] == "one=v1"
    await bench.hit(ask, path, openai_beta="one=v1")
    await bench.hit(ask, path, openai_organization="org", openai_project="p")


@one_world
async def test_o52_an_unknown_endpoint_is_passed_through_with_its_headers(bench: Bench) -> None:
    bench.u.on("/v1/rerank", json_body({"results": []}).header("x-own", "kept"))
    reply = await bench.send({"model": "m1"}, "/v1/rerank?deep=1", anthropic_beta="a", x_own="mine", cookie="no")
    assert reply.response.json() == {"results": []}
    assert reply.response.headers["x-own"] == "kept"
    seen = bench.u.calls[-1]
    assert seen.target == "/v1/rerank?deep=1"
    assert (seen.headers["anthropic-beta"], seen.headers["x-own"]) == ("a", "mine")
    assert "cookie" not in seen.headers


async def test_a_key_for_some_models_cannot_name_two(world: World) -> None:
    """O-11 on a path that is passed through: the model that is checked is the one that the upstream reads."""
    async with world.bench(tenants=[{"name": "t1", "keys": [hashed("K1")], "models": ["m1"]}]) as bench:
        bench.u.on("/v1/rerank", json_body({"results": []}))
        for twice in (b'{"model":"m2","model":"m1"}', b'{"model":"m2","\\u006dodel":"m1"}'):
            refused = await bench.send(twice, "/v1/rerank", key="K1")
            assert refused.status == 400 and "twice" in refused.response.json()["error"]["message"]
        assert (await bench.send({"model": "m2"}, "/v1/rerank", key="K1")).status == 403
        assert not bench.u.other_calls
        assert (await bench.send({"model": "m1"}, "/v1/rerank", key="K1")).status == 200
