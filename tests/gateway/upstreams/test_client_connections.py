"""Connections are kept and reused while nothing is wrong with them, and never after trouble."""

import asyncio
import ssl

import pytest
import trustme

from gateway.upstreams.client import Origin, Timeouts, UpstreamClient, UpstreamError
from tests.gateway.upstreams.raw_server import OK, Peer, ask, serving
from tests.waiting import until


async def answer_always(peer: Peer) -> None:
    while True:
        await peer.answer(OK)


async def test_requests_in_a_row_share_one_connection(client: UpstreamClient) -> None:
    async with serving(answer_always) as server:
        for _ in range(5):
            assert await (await ask(client, server)).read(10) == b"ok"
        assert (server.accepted, client.open_connections, client.idle_connections) == (1, 1, 1)


async def test_requests_at_once_have_a_connection_each(client: UpstreamClient) -> None:
    async with serving(answer_always) as server:
        responses = await asyncio.gather(*[ask(client, server) for _ in range(5)])
        assert [await response.read(10) for response in responses] == [b"ok"] * 5
        assert (server.accepted, client.idle_connections) == (5, 5)


async def test_the_request_arrives_as_sent(client: UpstreamClient) -> None:
    seen = asyncio.get_running_loop().create_future()

    async def handler(peer: Peer) -> None:
        seen.set_result(await peer.request())
        await peer.send(OK)

    async with serving(handler) as server:
        body = bytes(range(256)) * 4096
        await (await ask(client, server, body=body, headers=[(b"X-A", b"1")])).read(10)
        head, _, rest = (await seen).partition(b"\r\n\r\n")
        host = b"127.0.0.1:%d" % server.origin.port
        assert head == b"POST /v1/x HTTP/1.1\r\nhost: " + host + b"\r\nX-A: 1\r\ncontent-length: %d" % len(body)
        assert rest == body


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
async def test_a_connection_that_the_upstream_wants_closed_is_closed(client: UpstreamClient, wire: bytes) -> None:
    closed = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.answer(wire)
        if await peer.gone(5):
            closed.set()

    async with serving(handler) as server:
        assert await (await ask(client, server)).read(10) == b"ok"
        await asyncio.wait_for(closed.wait(), 5)
        assert client.open_connections == 0


async def test_an_answer_ahead_of_the_whole_request_ends_the_connection(client: UpstreamClient) -> None:
    """A 413 while 8 MB are still under way: the rest of that body must not be read as the next request."""

    async def handler(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(60)

    async with serving(handler) as server:
        response = await ask(client, server, body=bytes(32_000_000))
        assert (response.status, await response.read(10)) == (413, b"no")
        assert client.idle_connections == 0


# Stale connections


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_connection_closed_while_idle_is_forgotten(client: UpstreamClient, how: str) -> None:
    async def handler(peer: Peer) -> None:
        await peer.answer(OK)
        if how == "reset":
            peer.reset()

    async with serving(handler) as server:
        await (await ask(client, server)).read(10)
        await until(lambda: client.open_connections == 0)
        assert await (await ask(client, server)).read(10) == b"ok"


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_stale_connection_is_replaced_once(client: UpstreamClient, how: str) -> None:
    """The upstream closes a kept connection just as the next request is on its way."""

    async def handler(peer: Peer) -> None:
        await peer.answer(OK)
        if peer.number == 1:
            await peer.request()
            if how == "reset":
                peer.reset()
            return
        await answer_always(peer)

    async with serving(handler) as server:
        await (await ask(client, server)).read(10)
        assert await (await ask(client, server)).read(10) == b"ok"
        assert server.accepted == 2


async def test_a_fresh_connection_that_dies_is_an_error(client: UpstreamClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()

    async with serving(handler) as server:
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server)
        assert (caught.value.kind, caught.value.sent, server.accepted) == ("reset", True, 1)


async def test_the_replacement_is_not_replaced_again(client: UpstreamClient) -> None:
    async def handler(peer: Peer) -> None:
        if peer.number == 1:
            await peer.answer(OK)
        await peer.request()

    async with serving(handler) as server:
        await (await ask(client, server)).read(10)
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server)
        assert (caught.value.kind, server.accepted) == ("reset", 2)


@pytest.mark.parametrize(
    "part", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"]
)
async def test_no_second_try_once_a_byte_of_the_answer_came(client: UpstreamClient, part: bytes) -> None:
    async def handler(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.answer(part)

    async with serving(handler) as server:
        await (await ask(client, server)).read(10)
        with pytest.raises(UpstreamError) as caught:
            await (await ask(client, server)).read(10)
        assert (caught.value.kind, server.accepted) == ("reset", 1)


async def test_no_second_try_for_a_request_that_was_being_worked_on(
    client: UpstreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept connection that dies well after the request came was not stale: the work may have been done."""
    monkeypatch.setattr("gateway.upstreams.connection.STALE_WINDOW", 0.0)

    async def handler(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.request()

    async with serving(handler) as server:
        await (await ask(client, server)).read(10)
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server)
        assert (caught.value.kind, caught.value.sent, server.accepted) == ("reset", True, 1)


# The pool


async def test_idle_connections_are_closed_after_a_while() -> None:
    client = UpstreamClient(keep_idle=0.05)
    gone = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.answer(OK)
        if await peer.gone(5):
            gone.set()

    async with serving(handler) as server:
        await (await ask(client, server)).read(10)
        assert client.idle_connections == 1
        await asyncio.wait_for(gone.wait(), 5)
        await until(lambda: client.open_connections == client.idle_connections == 0)
        await client.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])  # on uvloop the limit passes while this process stands still
async def test_a_connection_in_use_outlives_the_idle_limit() -> None:
    client = UpstreamClient(keep_idle=0.05)
    async with serving(answer_always) as server:
        for _ in range(15):
            await (await ask(client, server)).read(10)
            await asyncio.sleep(0.01)
        assert server.accepted == 1
        await client.close()


async def test_close_ends_what_is_under_way(client: UpstreamClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel")
        await peer.gone(5)

    async with serving(handler) as server:
        response = await ask(client, server)
        await client.close()
        with pytest.raises(UpstreamError) as caught:
            await response.read(10)
        assert caught.value.kind == "reset"
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server)
        assert (caught.value.kind, caught.value.sent) == ("connect", False)


# No connection at all


async def test_nobody_listens(client: UpstreamClient) -> None:
    async with serving(answer_always) as server:
        pass
    with pytest.raises(UpstreamError) as caught:
        await ask(client, server)
    assert (caught.value.kind, caught.value.sent) == ("connect", False)


async def test_unknown_host(client: UpstreamClient) -> None:
    with pytest.raises(UpstreamError) as caught:
        await client.send(Origin("http", "no-such-host.invalid", 80), "GET", b"/", [], b"", Timeouts(connect=30))
    assert (caught.value.kind, caught.value.sent) == ("dns", False)


@pytest.mark.parametrize(
    ("origin", "authority"),
    [
        (Origin("http", "u.example", 80), b"u.example"),
        (Origin("https", "u.example", 443), b"u.example"),
        (Origin("https", "u.example", 80), b"u.example:80"),
        (Origin("http", "::1", 9001), b"[::1]:9001"),
        (Origin("http", "bücher.example", 81), b"xn--bcher-kva.example:81"),
    ],
)
def test_host_header(origin: Origin, authority: bytes) -> None:
    assert origin.authority() == authority


# TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


async def test_tls_with_a_trusted_certificate(authority: trustme.CA) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    client = UpstreamClient(trusting)
    async with serving(answer_always, server_context(authority, "127.0.0.1")) as server:
        for _ in range(3):
            assert await (await ask(client, server)).read(10) == b"ok"
        assert server.accepted == 1
        await client.close()


@pytest.mark.parametrize(("name", "trusted"), [("127.0.0.1", False), ("other.example", True)])
async def test_tls_refuses_strangers_and_wrong_names(authority: trustme.CA, name: str, trusted: bool) -> None:
    context = ssl.create_default_context()
    if trusted:
        authority.configure_trust(context)
    client = UpstreamClient(context)
    async with serving(answer_always, server_context(authority, name)) as server:
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server)
        assert (caught.value.kind, caught.value.sent) == ("tls", False)
    assert client.open_connections == 0


async def test_tls_with_a_server_that_speaks_plain_http() -> None:
    client = UpstreamClient(ssl.create_default_context())

    async def handler(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.gone(5)

    async with serving(handler) as server:
        server.origin = server.origin._replace(scheme="https")
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server)
        assert caught.value.kind == "tls"
