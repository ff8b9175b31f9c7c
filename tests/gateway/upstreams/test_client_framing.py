"""The client understands every honest way to frame a response and refuses every dishonest one."""

import asyncio

import pytest

from gateway.upstreams.client import UpstreamClient, UpstreamError
from tests.gateway.upstreams.raw_server import OK, Peer, ask, serving
from tests.waiting import until


async def fetched(client: UpstreamClient, wire: bytes, method: str = "POST") -> tuple[int, bytes]:
    """Status and body of a response that is exactly `wire`, after which the server closes."""
    async with serving(lambda peer: peer.answer(wire)) as server:
        response = await ask(client, server, method=method)
        return response.status, await response.read(1_000_000)


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\nx-sum: 1\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    ],
    ids=["length", "empty", "chunked", "trailers", "until close", "http 1.0", "no reason"],
)
async def test_body_is_delimited_as_the_headers_say(client: UpstreamClient, wire: bytes, body: bytes) -> None:
    assert await fetched(client, wire) == (200, body)


async def test_headers_keep_order_and_repeats_with_lower_case_names(client: UpstreamClient) -> None:
    wire = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nSet-Cookie: a=b\r\nset-cookie: c=d\r\nX-C: \xff\r\nContent-Length: 0\r\n\r\n"
    async with serving(lambda peer: peer.answer(wire)) as server:
        response = await ask(client, server)
    expected = [(b"x-a", b"1"), (b"set-cookie", b"a=b"), (b"set-cookie", b"c=d"), (b"x-c", b"\xff")]
    assert response.headers == [*expected, (b"content-length", b"0")]


async def test_trailers_are_no_headers(client: UpstreamClient) -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-late: 1\r\n\r\n"
    async with serving(lambda peer: peer.answer(wire)) as server:
        response = await ask(client, server)
        assert await response.read(10) == b"a"
        assert response.headers == [(b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(client: UpstreamClient, status: int) -> None:
    async def handler(peer: Peer) -> None:
        await peer.answer(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status)
        await peer.answer(OK)

    async with serving(handler) as server:
        response = await ask(client, server)
        assert (response.status, await response.read(10)) == (status, b"")
        assert await (await ask(client, server)).read(10) == b"ok"
        assert server.accepted == 1


@pytest.mark.parametrize("framing", [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
async def test_head_has_no_body_whatever_its_headers_say(client: UpstreamClient, framing: bytes) -> None:
    async def handler(peer: Peer) -> None:
        await peer.answer(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        await peer.answer(OK)

    async with serving(handler) as server:
        assert await (await ask(client, server, method="HEAD", body=b"")).read(10) == b""
        assert await (await ask(client, server)).read(10) == b"ok"
        assert server.accepted == 1


async def test_interim_responses_are_skipped(client: UpstreamClient) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with serving(lambda peer: peer.answer(interim + OK)) as server:
        response = await ask(client, server)
        assert (response.status, response.headers) == (200, [(b"content-length", b"2")])
        assert await response.read(10) == b"ok"


@pytest.mark.parametrize("wire", [OK, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"])
async def test_a_response_in_one_byte_writes(client: UpstreamClient, wire: bytes) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        for i in range(len(wire)):
            await peer.send(wire[i : i + 1])
            await asyncio.sleep(0)

    async with serving(handler) as server:
        response = await ask(client, server)
        assert b"".join([chunk async for chunk in response.chunks()]) == b"ok"
        assert response.complete


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n0\r\n",
    ],
    ids=["length", "between chunks", "in a chunk", "before the last line"],
)
async def test_a_short_body_is_passed_on_and_then_a_reset(client: UpstreamClient, wire: bytes) -> None:
    async with serving(lambda peer: peer.answer(wire)) as server:
        response = await ask(client, server)
        got = b""
        with pytest.raises(UpstreamError) as caught:
            async for chunk in response.chunks():
                got += chunk
        assert (caught.value.kind, caught.value.sent, got, response.complete) == ("reset", True, b"hel", False)


async def test_a_reset_is_not_the_end_of_an_undelimited_body(client: UpstreamClient) -> None:
    arrived = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.answer(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await arrived.wait()
        peer.reset()

    async with serving(handler) as server:
        chunks = (await ask(client, server)).chunks()
        assert await anext(chunks) == b"hel"
        arrived.set()
        with pytest.raises(UpstreamError) as caught:
            await anext(chunks)
        assert caught.value.kind == "reset"


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 2xx OK\r\n\r\n",
        b"HTP/1.1 200 OK\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b'{"error":"not http"}',
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nraw",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nA: b\x00c\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded: c\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nBig: " + b"a" * 70_000 + b"\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"Content-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nEndless: " + b"a" * 5_000_000,
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10_000,
    ],
)
async def test_what_is_not_honest_http_is_refused(client: UpstreamClient, wire: bytes) -> None:
    async with serving(lambda peer: peer.answer(wire)) as server:
        with pytest.raises(UpstreamError) as caught:
            response = await ask(client, server)
            await response.read(1_000_000)
        assert (caught.value.kind, caught.value.sent) == ("protocol", True)
        assert client.idle_connections == 0


async def test_endless_trailers_are_refused(client: UpstreamClient) -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nendless: " + b"a" * 5_000_000
    async with serving(lambda peer: peer.answer(wire)) as server:
        with pytest.raises(UpstreamError) as caught:
            await (await ask(client, server)).read(1_000_000)
        assert caught.value.kind == "protocol"


async def test_a_broken_chunk_size_in_the_middle_is_refused(client: UpstreamClient) -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\nzz\r\nlo"
    async with serving(lambda peer: peer.answer(wire)) as server:
        chunks = (await ask(client, server)).chunks()
        assert await anext(chunks) == b"hel"
        with pytest.raises(UpstreamError) as caught:
            await anext(chunks)
        assert caught.value.kind == "protocol"


@pytest.mark.parametrize(
    "extra",
    [b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison", b"HTTP/1.1 200 OK\r\nX-Half: "],
    ids=["garbage", "second response", "half a response"],
)
@pytest.mark.parametrize("together", [True, False], ids=["one write", "two writes"])
async def test_bytes_after_the_end_drop_the_connection(client: UpstreamClient, extra: bytes, together: bool) -> None:
    answered = asyncio.Event()

    async def handler(peer: Peer) -> None:
        if peer.number > 1:
            await peer.answer(OK)
            return
        await peer.answer(OK + extra if together else OK)
        if not together:
            await answered.wait()
            await peer.send(extra)
        await peer.gone(5)

    async with serving(handler) as server:
        assert await (await ask(client, server)).read(10) == b"ok"
        answered.set()
        await until(lambda: client.open_connections == 0)
        assert await (await ask(client, server)).read(10) == b"ok"
        assert server.accepted == 2


async def test_a_body_after_head_is_never_taken_for_an_answer(client: UpstreamClient) -> None:
    wire = b"HTTP/1.1 200 OK\r\nContent-Length: 48\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison...."
    async with serving(lambda peer: peer.answer(wire if peer.number == 1 else OK)) as server:
        assert await (await ask(client, server, method="HEAD", body=b"")).read(100) == b""
        assert await (await ask(client, server)).read(100) == b"ok"
        assert server.accepted == 2
