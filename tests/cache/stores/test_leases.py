"""Leases in a real Redis: who leads, who waits, what was told, and that all of it expires."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cache.stores.base import StoreError
from cache.stores.leases import Leases, Told
from cache.stores.redis import RedisStore
from tests.services import redis_server

NAME = b"n"


@pytest.fixture(scope="module")
def redis_url():
    with redis_server() as server:
        yield server.url


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, uuid.uuid4().hex, timeout=2)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def leases(store: RedisStore) -> Leases:
    return store.leases


async def test_the_first_leads_and_the_others_are_told_who_and_counted(leases: Leases) -> None:
    assert await leases.board(NAME, b"a", 5) == b"a"
    assert [await leases.board(NAME, token, 5) for token in (b"b", b"c")] == [b"a", b"a"]
    assert await leases.renew(NAME, b"a", 5, 5) == 2
    await leases.leave(NAME, b"a")
    assert await leases.renew(NAME, b"a", 5, 5) == 1
    assert await leases.board(b"other", b"z", 5) == b"z"


async def test_a_lease_that_is_not_renewed_runs_out(store: RedisStore, leases: Leases) -> None:
    await leases.board(NAME, b"a", 30)
    assert await leases.renew(NAME, b"a", 60, 60) == 0
    assert await leases.board(NAME, b"b", 5) == b"a"
    left = await store.client.execute(b"PTTL", leases._lease(NAME))
    assert 40_000 < left <= 60_000, "from its last renewal on, whoever has asked since"
    await leases.renew(NAME, b"a", 0.1, 60)
    await asyncio.sleep(0.2)
    assert await leases.board(NAME, b"b", 5) == b"b"
    assert await leases.renew(NAME, b"a", 5, 5) == -1, "the old leader learns that it leads no more"


async def test_a_lease_is_not_given_up_under_those_who_wait_unless_it_must_be(leases: Leases) -> None:
    await leases.board(NAME, b"a", 5)
    await leases.board(NAME, b"b", 5)
    assert await leases.end(NAME, b"a", anyway=False, stored=0) == 1
    assert await leases.end(NAME, b"a", anyway=True, stored=0) == 0
    assert await leases.board(NAME, b"c", 5) == b"c"


async def test_nobody_can_give_up_anothers_lease(leases: Leases) -> None:
    await leases.board(NAME, b"a", 5)
    assert await leases.end(NAME, b"b", anyway=True, stored=0) == -1
    await leases.leave(NAME, b"b")
    assert await leases.renew(NAME, b"a", 5, 5) == 0


async def test_for_a_moment_newcomers_are_told_that_the_result_is_stored(leases: Leases) -> None:
    await leases.board(NAME, b"a", 5)
    await leases.end(NAME, b"a", anyway=False, stored=30)
    assert await leases.board(NAME, b"b", 5) == b""
    await leases.board(b"other", b"a", 5)
    await leases.end(b"other", b"a", anyway=False, stored=0.1)
    await asyncio.sleep(0.2)
    assert await leases.board(b"other", b"b", 5) == b"b"


async def test_who_wants_it_anew_does_not_wait_for_that_moment_to_pass(leases: Leases) -> None:
    await leases.board(NAME, b"a", 5)
    await leases.end(NAME, b"a", anyway=False, stored=5)
    assert await leases.board(NAME, b"b", 5, anew=True) == b"b"
    assert await leases.board(NAME, b"c", 5, anew=True) == b"b", "a leader is not pushed aside"


async def test_what_is_told_is_heard_in_order_and_from_where_one_was(leases: Leases) -> None:
    await leases.board(NAME, b"a", 5)
    for number in range(1, 151):
        await leases.tell(NAME, b"a", Told(number, b"p", b"%d\r\n\x00" % number), 5)
    first = await leases.hear(NAME, b"a", 0)
    assert first.led
    assert first.told == [Told(number, b"p", b"%d\r\n\x00" % number) for number in range(1, 101)]
    rest = await leases.hear(NAME, b"a", 100)
    assert [told.number for told in rest.told] == list(range(101, 151))
    assert (await leases.hear(NAME, b"a", 150)).told == []
    await leases.end(NAME, b"a", anyway=True, stored=0)
    assert not (await leases.hear(NAME, b"a", 150)).led


async def test_nothing_is_told_twice(leases: Leases) -> None:
    await leases.tell(NAME, b"a", Told(1, b"p", b"x"), 5)
    with pytest.raises(StoreError):
        await leases.tell(NAME, b"a", Told(1, b"p", b"y"), 5)


async def test_everything_expires(store: RedisStore, leases: Leases) -> None:
    await leases.board(NAME, b"a", 0.2)
    await leases.tell(NAME, b"a", Told(1, b"p", b"x"), 0.2)
    await leases.board(NAME, b"b", 0.2)
    await asyncio.sleep(0.3)
    assert await store.client.execute(b"KEYS", leases._prefix + b"*") == []


async def test_a_redis_that_is_gone_is_said_by_every_command_and_when_it_is_back_nobody_leads() -> None:
    with redis_server() as server:
        store = RedisStore(server.url, "gone", timeout=0.5)
        await store.open()
        leases = store.leases
        try:
            assert await leases.board(NAME, b"a", 60) == b"a"
            server.kill()
            commands: list[Callable[[], Awaitable[object]]] = [
                lambda: leases.board(NAME, b"b", 60),
                lambda: leases.renew(NAME, b"a", 60, 60),
                lambda: leases.tell(NAME, b"a", Told(1, b"p", b"x"), 60),
                lambda: leases.hear(NAME, b"a", 0),
                lambda: leases.leave(NAME, b"a"),
                lambda: leases.end(NAME, b"a", anyway=True, stored=0),
            ]
            for command in commands:
                with pytest.raises(StoreError):
                    await command()
            server.restart()
            await until_it_answers(store)
            assert await leases.renew(NAME, b"a", 60, 60) == -1, "what it held is lost"
            assert await leases.board(NAME, b"b", 60) == b"b"
        finally:
            await store.close()


async def until_it_answers(store: RedisStore) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await store.get(b"x")
                return
            except StoreError:
                await asyncio.sleep(0.05)
