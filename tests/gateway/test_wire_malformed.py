"""What is not HTTP, behind good requests: nobody may take the word for it for the answer to a request before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from loadtest.stub_upstream import StubUpstream, answer
from tests.harness import Running, running_gateway, upstream
from tests.raw import RawConnection, post
from tests.services import RedisServer

CHAT = "/v1/chat/completions"
KNOWN = orjson.dumps({"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "known"}]})
HIT = post(CHAT, KNOWN)
NEW = KNOWN.replace(b"known", b"new")
MALFORMED = b"\x00\x01 is no HTTP\r\n\r\n"

both_paths = pytest.mark.parametrize("short_path", [True, False], ids=["wire", "full"])


@asynccontextmanager
async def bench(short_path: bool, **config: Any) -> AsyncIterator[tuple[Running, StubUpstream]]:
    """A gateway that knows the answer to `HIT`, and its upstream, which takes its time from then on."""
    async with StubUpstream() as u:
        whole = {"upstreams": [upstream(u.url)], **config}
        async with running_gateway(whole, short_path=short_path) as gateway:
            for _ in range(2):
                assert (await gateway.client.post(CHAT, content=KNOWN)).status_code == 200
                await gateway.app.runtime.keeper.drain()
            assert u.n == 1
            u.always(answer(deltas=["x"] * 10).paced(0.05))
            yield gateway, u


async def told_in_order(connection: RawConnection, requests: int) -> None:
    """Holds that the good requests are answered in order, as far as they are, and that only who has all these answers
    is told of what is not HTTP.
    """
    statuses: list[int] = []
    while (told := await connection.answer()) is not None:
        statuses.append(told.status)
        assert (b"Invalid HTTP" in told.body) == (told.status == 400)
    answered = statuses.count(200)
    assert statuses == [200] * answered + [400] * (len(statuses) - answered)
    assert answered == requests if 400 in statuses else answered <= requests
    assert statuses.count(400) <= 1


@both_paths
@pytest.mark.parametrize("between", [0, 1, 2])
async def test_behind_an_answer_that_is_still_being_made(short_path: bool, between: int) -> None:
    async with bench(short_path) as (gateway, u), await RawConnection.open(gateway.url) as connection:
        u.always(answer("late").delayed(0.3))
        connection.send(post(CHAT, NEW))
        await u.wait_calls(2)
        connection.send(between * HIT + MALFORMED)
        await told_in_order(connection, 1 + between)
        await u.wait_idle()
        assert not gateway.app.runtime.flights


@both_paths
async def test_in_one_piece_with_a_request(short_path: bool) -> None:
    async with bench(short_path) as (gateway, _), await RawConnection.open(gateway.url) as connection:
        connection.send(HIT + MALFORMED)
        await told_in_order(connection, 1)


@both_paths
async def test_in_the_midst_of_a_stream(short_path: bool) -> None:
    async with bench(short_path) as (gateway, u), await RawConnection.open(gateway.url) as connection:
        connection.send(post(CHAT, NEW[:-1] + b',"stream":true}'))
        assert (await connection.head()).startswith(b"HTTP/1.1 200 ")
        connection.send(MALFORMED)
        async with asyncio.timeout(5):
            rest = await connection.reader.read()
        stream, _, behind = rest.partition(b"\r\n0\r\n\r\n")
        assert b"HTTP/1.1" not in stream
        assert not behind or behind.startswith(b"HTTP/1.1 400 ")
        await u.wait_idle()


@both_paths
async def test_behind_an_answer_that_is_given(short_path: bool) -> None:
    async with bench(short_path) as (gateway, _), await RawConnection.open(gateway.url) as connection:
        for _ in range(2):
            connection.send(HIT)
            told = await connection.answer()
            assert told is not None
            assert told.status == 200
        connection.send(MALFORMED)
        told = await connection.answer()
        assert told is not None
        assert told.status == 400
        assert await connection.is_closed()


@both_paths
async def test_in_the_body_of_the_request_itself(short_path: bool) -> None:
    async with bench(short_path) as (gateway, _), await RawConnection.open(gateway.url) as connection:
        begun = post(CHAT, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        connection.send(begun + b"5\r\n{    \r\n")
        await asyncio.sleep(0.05)
        connection.send(b"no length\r\n")
        told = await connection.answer()
        assert told is not None
        assert told.status == 400
        assert await connection.is_closed()


@pytest.mark.parametrize("found", [True, False], ids=["which finds it", "which finds nothing"])
async def test_behind_a_lookup_in_the_shared_store(redis_process: RedisServer, found: bool) -> None:
    cache = {"memory": "off", "redis": {"url": redis_process.url, "prefix": f"malformed-{found}", "timeout": "5s"}}
    async with bench(True, cache=cache) as (gateway, _), await RawConnection.open(gateway.url) as connection:
        if not found:
            client = redis_process.client()
            client.delete(*client.keys(f"malformed-{found}*"))
            client.close()
        redis_process.pause()
        try:
            connection.send(HIT)
            await asyncio.sleep(0.1)
            connection.send(MALFORMED)
            await asyncio.sleep(0.1)
        finally:
            redis_process.resume()
        await told_in_order(connection, 1)
