"""Connections of the short path: those who do not read, who are slow, who leave, and the end of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import uvicorn

from gateway.wire import WireProtocol
from loadtest.stub_upstream import StubUpstream, answer
from tests.harness import Running, running_gateway, upstream
from tests.raw import RawConnection, post
from tests.services import RedisServer, redis_server
from tests.waiting import PATIENCE

CHAT = "/v1/chat/completions"
KNOWN = orjson.dumps({"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "known"}]})
HIT = post(CHAT, KNOWN)


@asynccontextmanager
async def bench(**config: Any) -> AsyncIterator[tuple[Running, StubUpstream]]:
    """A gateway with the short path, and its upstream."""
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url)], **config}) as gateway:
        yield gateway, u


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[WireProtocol]:
    """Every connection that a gateway takes in this test."""
    found: list[WireProtocol] = []
    made = WireProtocol.connection_made

    def connection_made(self: WireProtocol, transport: asyncio.Transport) -> None:  # type: ignore[override]
        found.append(self)
        made(self, transport)

    monkeypatch.setattr(WireProtocol, "connection_made", connection_made)
    return found


async def warm(gateway: Running) -> None:
    for _ in range(2):
        assert (await gateway.client.post(CHAT, content=KNOWN)).status_code == 200


async def test_who_does_not_read_is_not_answered_without_end(protocols: list[WireProtocol]) -> None:
    """Else each small request would make the gateway hold one large answer more."""
    async with bench() as (gateway, u):
        u.reply(answer("x" * 900_000))
        await warm(gateway)
        await warm(gateway)
        async with await RawConnection.open(gateway.url, receive_buffer=16384) as connection:
            connection.send(HIT)
            first = await connection.answer()
            assert first is not None
            for _ in range(20):
                protocols[-1].data_received(HIT)
                await asyncio.sleep(0)
            assert protocols[-1].flow.write_paused
            assert protocols[-1].transport.get_write_buffer_size() < 2_000_000
            connection.widen()
            for _ in range(20):
                told = await connection.answer()
                assert told is not None
                assert len(told.body) > 900_000


async def test_a_slow_body_is_not_cut_by_the_timer_of_the_answer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_alive(monkeypatch, 0.3)
    async with bench() as (gateway, _):
        await warm(gateway)
        async with await RawConnection.open(gateway.url) as connection:
            connection.send(HIT)
            assert await connection.answer()
            for start in range(0, len(HIT), 20):
                connection.send(HIT[start : start + 20])
                await asyncio.sleep(0.06)
            told = await connection.answer()
            assert told is not None
            assert told.status == 200


async def test_an_idle_connection_is_closed_after_a_hit_as_after_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_alive(monkeypatch, 0.3)
    async with bench() as (gateway, _):
        await warm(gateway)
        async with await RawConnection.open(gateway.url) as connection:
            for _ in range(3):
                connection.send(HIT)
                assert await connection.answer()
                await asyncio.sleep(0.2)
            assert await connection.is_closed(2)


def keep_alive(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    made = WireProtocol.__init__

    def init(self: WireProtocol, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.timeout_keep_alive = seconds  # type: ignore[assignment]

    monkeypatch.setattr(WireProtocol, "__init__", init)


@pytest.mark.parametrize("behind", [b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n", HIT, b"GET /heal"])
async def test_who_leaves_ends_its_call_whatever_it_has_sent_behind(behind: bytes) -> None:
    async with bench() as (gateway, u):
        await warm(gateway)
        u.reply(answer(deltas=["x"] * 50).paced(0.1))
        async with await RawConnection.open(gateway.url) as connection:
            connection.send(post(CHAT, KNOWN[:-1] + b',"seed":1,"stream":true}'))
            await connection.head()
            connection.send(behind)
            await asyncio.sleep(0.1)
            connection.reset()
        await u.wait_closed(u.calls[1])


async def test_what_the_operator_asked_for_is_not_undone_by_leaving() -> None:
    """A purge goes on when its caller leaves, with a request to the API behind it."""
    async with bench() as (gateway, _):
        await warm(gateway)
        began, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        purge = gateway.app.runtime.purge

        async def slow(scope: str) -> bool:
            began.set()
            await go.wait()
            purged = await purge(scope)
            done.set()
            return purged

        gateway.app.runtime.purge = slow  # type: ignore[method-assign]
        async with await RawConnection.open(gateway.url) as connection:
            connection.send(post("/admin/purge", b'{"all":true}', host="localhost") + HIT)
            await began.wait()
            connection.reset()
        await asyncio.sleep(0.1)
        go.set()
        await asyncio.wait_for(done.wait(), PATIENCE)
        assert "fwd=uri-miss" in (await gateway.client.post(CHAT, content=KNOWN)).headers["cache-status"]


class Stopping:
    """Ends the one gateway's server of a test, without its harness."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._servers: list[uvicorn.Server] = []
        made = uvicorn.Server.__init__

        def init(server: uvicorn.Server, config: uvicorn.Config) -> None:
            made(server, config)
            self._servers.append(server)

        monkeypatch.setattr(uvicorn.Server, "__init__", init)

    def stop(self) -> None:
        self._servers[0].should_exit = True


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Stopping:
    return Stopping(monkeypatch)


@pytest.mark.parametrize("body", [KNOWN, KNOWN[:-1] + b',"seed":5}'], ids=["hit", "miss"])
async def test_a_request_whose_body_is_still_coming_is_answered_at_the_end(stopping: Stopping, body: bytes) -> None:
    async with bench() as (gateway, _):
        await warm(gateway)
        async with await RawConnection.open(gateway.url) as connection:
            connection.send(HIT)
            assert await connection.answer()
            request = post(CHAT, body)
            connection.send(request[:-10])
            await asyncio.sleep(0.05)
            stopping.stop()
            await asyncio.sleep(0.3)
            connection.send(request[-10:])
            told = await connection.answer()
            assert told is not None
            assert told.status == 200
            assert await connection.is_closed()


@pytest.fixture(scope="module")
def own_redis() -> Any:
    with redis_server() as server:
        yield server


async def test_requests_behind_a_lookup_are_answered_in_order_and_also_at_the_end(
    own_redis: RedisServer, stopping: Stopping
) -> None:
    cache = {"memory": "off", "redis": {"url": own_redis.url, "timeout": "5s"}}
    async with bench(cache=cache) as (gateway, _):
        await warm(gateway)
        other = post(CHAT, KNOWN[:-1] + b',"seed":6}')
        async with await RawConnection.open(gateway.url) as connection:
            own_redis.pause()
            try:
                connection.send(HIT)
                await asyncio.sleep(0.05)
                connection.send(other)
                await asyncio.sleep(0.05)
                connection.send(HIT)
                await asyncio.sleep(0.05)
                stopping.stop()
                await asyncio.sleep(0.2)
            finally:
                own_redis.resume()
            texts = [await connection.answer() for _ in range(3)]
            said = [orjson.loads(told.body)["choices"][0]["message"]["content"] for told in texts if told]
            assert said[:2] == ["ans-1", "ans-2"][: len(said[:2])]
            assert len(said) >= 1
            assert await connection.is_closed(5), "and then the gateway lets go"


async def test_a_lookup_that_fails_leaves_the_request_to_the_full_path(own_redis: RedisServer) -> None:
    cache = {"memory": "off", "redis": {"url": own_redis.url, "timeout": "50ms"}}
    async with bench(cache=cache) as (gateway, u):
        await warm(gateway)
        async with await RawConnection.open(gateway.url) as connection:
            own_redis.pause()
            try:
                for _ in range(8):
                    connection.send(HIT)
                    told = await connection.answer()
                    assert told is not None
                    assert told.status == 200
            finally:
                own_redis.resume()
        assert u.n >= 8
