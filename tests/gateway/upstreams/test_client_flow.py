"""Time, memory and cancellation: an upstream may be slow, silent or endless, a consumer slow or gone."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from gateway.upstreams.client import Timeouts, UpstreamClient, UpstreamError
from tests.gateway.upstreams.raw_server import OK, Peer, ask, serving
from tests.waiting import until

LONG = 30.0
steady = pytest.mark.asyncio(loop_factories=["asyncio"])
"""For what has to come in time itself: on uvloop a limit passes while this process stands still."""
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def fails_with_timeout(after: float) -> AsyncIterator[None]:
    began = time.monotonic()
    with pytest.raises(UpstreamError) as caught:
        yield
    assert caught.value.kind == "timeout"
    assert after * 0.9 <= time.monotonic() - began < after + 5


async def hold(peer: Peer, *writes: bytes, every: float = 0.0) -> None:
    """Answer with these writes, then hold the connection open until the client leaves."""
    await peer.request()
    for data in writes:
        await peer.send(data)
        await asyncio.sleep(every)
    await peer.gone(LONG)


# Time


async def test_first_byte_timeout(client: UpstreamClient) -> None:
    async with serving(lambda peer: hold(peer)) as server, fails_with_timeout(0.15):
        await ask(client, server, timeouts=Timeouts(first_byte=0.15))


async def test_interim_responses_do_not_count_as_first_byte(client: UpstreamClient) -> None:
    interim = [b"HTTP/1.1 100 Continue\r\n\r\n"] * 20
    async with serving(lambda peer: hold(peer, *interim, every=0.05)) as server, fails_with_timeout(0.2):
        await ask(client, server, timeouts=Timeouts(first_byte=0.2))


@steady
async def test_idle_timeout_between_chunks(client: UpstreamClient) -> None:
    async with serving(lambda peer: hold(peer, STREAM + b"3\r\nhel\r\n")) as server:
        response = await ask(client, server, timeouts=Timeouts(idle=0.15))
        chunks = response.chunks()
        assert await anext(chunks) == b"hel"
        async with fails_with_timeout(0.15):
            await anext(chunks)
        await until(lambda: client.open_connections == 0)


@steady
async def test_a_stream_that_never_idles_outlives_the_idle_timeout(client: UpstreamClient) -> None:
    writes = [STREAM, *[b"1\r\na\r\n"] * 10, b"0\r\n\r\n"]
    async with serving(lambda peer: hold(peer, *writes, every=0.05)) as server:
        response = await ask(client, server, timeouts=Timeouts(idle=0.3))
        assert await response.read(100) == b"a" * 10


@steady
async def test_a_consumer_that_pauses_is_not_an_idle_upstream(client: UpstreamClient) -> None:
    async with serving(lambda peer: hold(peer, STREAM + b"3\r\nhel\r\n", every=0.3)) as server:
        response = await ask(client, server, timeouts=Timeouts(idle=0.1))
        await asyncio.sleep(0.3)  # longer than the idle limit, without waiting for data
        chunks = response.chunks()
        assert await anext(chunks) == b"hel"
        async with fails_with_timeout(0.1):
            await anext(chunks)


async def test_total_timeout_ends_a_lively_stream(client: UpstreamClient) -> None:
    lively = [b"1\r\na\r\n"] * 100
    async with serving(lambda peer: hold(peer, STREAM, *lively, every=0.02)) as server, fails_with_timeout(0.3):
        await (await ask(client, server, timeouts=Timeouts(total=0.3))).read(1000)


async def test_total_timeout_ends_a_stream_that_nobody_reads(client: UpstreamClient) -> None:
    async with serving(lambda peer: hold(peer, STREAM + b"1\r\na\r\n")) as server:
        response = await ask(client, server, timeouts=Timeouts(idle=0.1, total=0.3))
        await until(lambda: client.open_connections == 0)
        with pytest.raises(UpstreamError) as caught:
            await response.read(10)
        assert caught.value.kind == "timeout"


@steady
async def test_a_later_request_has_its_own_time(client: UpstreamClient) -> None:
    """The timer of a connection moves with its requests: a short limit after a long one, and a long one after."""

    async def handler(peer: Peer) -> None:
        await peer.answer(OK)
        await peer.request()
        await asyncio.sleep(0.3)
        await peer.send(OK)
        await hold(peer)

    async with serving(handler) as server:
        await (await ask(client, server, timeouts=Timeouts(first_byte=0.2))).read(10)
        await (await ask(client, server, timeouts=Timeouts(first_byte=2))).read(10)
        async with fails_with_timeout(0.15):
            await ask(client, server, timeouts=Timeouts(first_byte=0.15))
        assert server.accepted == 1


async def test_connect_timeout_covers_a_tls_handshake_that_never_ends(client: UpstreamClient) -> None:
    async with serving(lambda peer: hold(peer)) as server:
        server.origin = server.origin._replace(scheme="https")
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server, timeouts=Timeouts(connect=0.15))
        assert (caught.value.kind, caught.value.sent, client.open_connections) == ("timeout", False, 0)


# Back-pressure


async def test_200_megabytes_that_nobody_reads_stay_with_the_upstream(client: UpstreamClient) -> None:
    piece, count = b"x" * 1_000_000, 200
    sent = 0

    async def handler(peer: Peer) -> None:
        nonlocal sent
        await peer.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(piece) * count))
        for _ in range(count):
            await peer.send(piece)
            sent += len(piece)

    async with serving(handler) as server:
        response = await ask(client, server)
        stalled, seen = 0, -1
        while stalled < 10:  # until nothing has moved for a while
            await asyncio.sleep(0.02)
            stalled, seen = (stalled + 1, seen) if sent == seen else (0, sent)
        assert sent < 32_000_000  # what the kernel's two socket buffers hold, and little more
        assert response.buffered < 1_000_000

        total, largest = 0, 0
        async for chunk in response.chunks():
            total += len(chunk)
            largest = max(largest, len(chunk))
        assert total == len(piece) * count
        assert largest < 1_000_000


async def test_a_paused_connection_is_reusable_afterwards(client: UpstreamClient) -> None:
    async def handler(peer: Peer) -> None:
        while True:
            await peer.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + bytes(3_000_000))

    async with serving(handler) as server:
        for _ in range(3):
            response = await ask(client, server)
            await until(lambda r=response: r.buffered > 256 * 1024)
            assert len(await response.read(3_000_000)) == 3_000_000
        assert server.accepted == 1


async def test_read_stops_at_its_limit(client: UpstreamClient) -> None:
    gone = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.answer(STREAM)
        with contextlib.suppress(ConnectionError):
            while True:
                await peer.send(b"4\r\nabcd\r\n" * 1000)
        gone.set()

    async with serving(handler) as server:
        with pytest.raises(UpstreamError) as caught:
            await (await ask(client, server)).read(100_000)
        assert caught.value.kind == "too_large"
        await asyncio.wait_for(gone.wait(), LONG)


async def test_read_takes_exactly_its_limit(client: UpstreamClient) -> None:
    async with serving(lambda peer: hold(peer, OK)) as server:
        assert await (await ask(client, server)).read(2) == b"ok"
    async with serving(lambda peer: hold(peer, OK)) as server:
        with pytest.raises(UpstreamError):
            await (await ask(client, server)).read(1)


# Leaving early


async def left_within_a_second(client: UpstreamClient, leave: str) -> bool:
    """Leave a response in the given way; whether the upstream saw the connection close within a second."""
    seen, asked = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        if leave != "cancel before the head":
            await peer.send(STREAM + b"3\r\nhel\r\n")
        asked.set()
        seen.set_result(await peer.gone(1.0))

    async def use(client: UpstreamClient) -> None:
        response = await ask(client, server)
        if leave == "close":
            response.close()
        elif leave == "close while reading":
            asyncio.get_running_loop().call_later(0.05, response.close)
            with contextlib.suppress(UpstreamError):
                await response.read(100)
        elif leave == "break":
            async with contextlib.aclosing(response.chunks()) as chunks:
                async for _ in chunks:
                    break
        else:
            await response.read(100)

    async with serving(handler) as server:
        task = asyncio.create_task(use(client))
        if leave.startswith("cancel"):
            await asked.wait()
            await asyncio.sleep(0.05)
            task.cancel()
        await asyncio.wait([task])
        return await seen


@pytest.mark.parametrize(
    "leave", ["cancel before the head", "cancel in the body", "close", "close while reading", "break"]
)
async def test_the_upstream_sees_a_client_leave_within_a_second(client: UpstreamClient, leave: str) -> None:
    assert await left_within_a_second(client, leave)
    await until(lambda: client.open_connections == 0)


async def test_closing_twice_or_after_the_end_does_nothing(client: UpstreamClient) -> None:
    async def handler(peer: Peer) -> None:
        while True:
            await peer.answer(OK)

    async with serving(handler) as server:
        response = await ask(client, server)
        await response.read(10)
        response.close()
        response.close()
        await (await ask(client, server)).read(10)
        assert server.accepted == 1


async def test_cancelling_in_the_moment_of_the_answer_leaves_others_alone(client: UpstreamClient) -> None:
    """The cancelled request's connection may already be another's: that one must not be cut."""

    async def handler(peer: Peer) -> None:
        while True:
            await peer.answer(OK)

    async with serving(handler) as server:
        for delay in range(60):
            first = asyncio.create_task(ask(client, server))
            for _ in range(delay % 12):
                await asyncio.sleep(0)
            if delay >= 12:
                await asyncio.sleep(delay * 1e-5)
            first.cancel()
            response = await ask(client, server)
            assert await response.read(10) == b"ok"
            await asyncio.gather(first, return_exceptions=True)


async def test_many_streams_at_once_with_random_leavers(client: UpstreamClient) -> None:
    async def handler(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(STREAM)
            for i in range(10):
                await peer.send(b"2\r\n%02d\r\n" % i)
                await asyncio.sleep(0.001)
            await peer.send(b"0\r\n\r\n")

    async def one(number: int) -> bytes:
        async with asyncio.timeout(0.003 * (number % 10) if number % 3 == 0 else LONG):
            return await (await ask(client, server)).read(100)

    async with serving(handler) as server:
        results = await asyncio.gather(*[one(i) for i in range(150)], return_exceptions=True)
        whole = [r for i, r in enumerate(results) if i % 3]
        assert whole == [b"00010203040506070809"] * 100
        assert client.open_connections == client.idle_connections
