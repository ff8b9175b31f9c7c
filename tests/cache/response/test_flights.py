"""Flights: one producer, any number of followers, none of them cut short or held up by another."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cache.response.flights import FellBehind, Flight, Follower

Bytes = Flight[str, bytes, str]


def flight(window: int = 1000, bound: int = 10_000) -> Bytes:
    return Flight(len, window=window, bound=bound)


def producer(
    flight: Bytes, pieces: list[bytes], pushed: list[bytes] | None = None, pause: float = 0
) -> Coroutine[Any, Any, str]:
    async def produce() -> str:
        flight.open("head")
        for piece in pieces:
            await asyncio.sleep(pause)
            await flight.push(piece)
            if pushed is not None:
                pushed.append(piece)
        return "result"

    return produce()


async def read(flight: Bytes, token: Follower[bytes]) -> list[bytes]:
    return [piece async for piece in flight.pieces(token)]


def noted(ends: list[bool]) -> Callable[[], None]:
    return lambda: ends.append(True)


async def test_everyone_gets_everything_however_late_they_join() -> None:
    one, pieces, ends = flight(), [b"%d" % n for n in range(50)], []
    first = one.join()
    one.start(producer(one, pieces), noted(ends))
    reading = asyncio.create_task(read(one, first))
    while one.joinable and len(one._pieces) < 20:
        await asyncio.sleep(0)
    late = one.join()
    assert await read(one, late) == pieces
    assert await reading == pieces
    assert await one.result() == "result"
    assert ends == [True]


async def test_the_producer_waits_for_the_fastest_follower_not_for_a_slow_one() -> None:
    one, pushed = flight(window=30), []
    fast, slow = one.join(), one.join()
    one.start(producer(one, [b"x" * 10] * 100, pushed), lambda: None)
    for _ in range(20):
        await asyncio.sleep(0)
    assert 3 <= len(pushed) <= 5, "nobody reads: it stops after the window"
    assert len(await read(one, fast)) == 100, "the slow one has read nothing yet"
    assert len(await read(one, slow)) == 100


async def test_a_follower_beyond_the_bound_is_told_and_memory_stays_within() -> None:
    one = flight(window=30, bound=100)
    fast, slow = one.join(), one.join()
    one.start(producer(one, [b"x" * 10] * 100), lambda: None)
    reading = asyncio.create_task(read(one, fast))
    while not one.landed:
        assert one._held <= 100 + 30
        await asyncio.sleep(0)
    assert len(await reading) == 100
    with pytest.raises(FellBehind):
        await read(one, slow)
    assert not one.joinable


async def test_the_leader_leaves_and_the_others_go_on() -> None:
    one, pieces = flight(), [b"a", b"b", b"c"]
    leader, follower = one.join(), one.join()
    one.start(producer(one, pieces, pause=0.001), lambda: None)
    one.leave(leader)
    one.leave(leader)
    assert await read(one, follower) == pieces


async def test_the_last_to_leave_ends_it() -> None:
    one, ends = flight(), []
    stopped = asyncio.Event()

    async def endless() -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()
        return ""

    tokens = [one.join(), one.join()]
    one.start(endless(), noted(ends))
    await asyncio.sleep(0)
    for token in tokens:
        one.leave(token)
    await asyncio.wait_for(stopped.wait(), 1)
    await asyncio.sleep(0)
    assert ends == [True]
    assert one.landed


async def test_a_flight_told_to_keep_going_needs_nobody() -> None:
    one, ends = flight(window=1), []
    one.start(producer(one, [b"x" * 10] * 5), noted(ends))
    one.keep_going()
    assert await one.result() == "result"
    token = one.join()
    one.leave(token)


async def test_a_failed_producer_fails_every_follower_and_leaves_no_trace() -> None:
    one, ends = flight(), []

    async def fail() -> str:
        one.open("head")
        await one.push(b"a")
        raise ValueError("boom")

    tokens = [one.join(), one.join()]
    one.start(fail(), noted(ends))
    for token in tokens:
        with pytest.raises(ValueError, match="boom"):
            await read(one, token)
    assert ends == [True]


async def test_when_the_fastest_leaves_the_next_one_sets_the_pace() -> None:
    one, pushed = flight(window=30), []
    fast, slow = one.join(), one.join()
    one.start(producer(one, [b"x" * 10] * 100, pushed), lambda: None)
    pieces = one.pieces(fast)
    for _ in range(50):
        await anext(pieces)
    await pieces.aclose()
    one.leave(fast)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(pushed) < 60, "the slow one is now the fastest: the producer waits for it"
    assert len(await read(one, slow)) == 100


async def test_who_gives_up_waiting_disturbs_no_one_else() -> None:
    one = flight()
    impatient, patient = one.join(), one.join()
    one.start(producer(one, [b"a"], pause=0.01), lambda: None)
    waits = [asyncio.create_task(one.head()), asyncio.create_task(one.result())]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    one.leave(impatient)
    assert await one.head() == "head"
    assert await read(one, patient) == [b"a"]
    assert await one.result() == "result"


async def test_nobody_joins_a_flight_that_is_being_ended() -> None:
    one = flight()
    only = one.join()
    one.start(producer(one, [b"a"], pause=1), lambda: None)
    await asyncio.sleep(0)
    one.leave(only)
    assert not one.joinable


async def test_a_flight_without_followers_holds_no_more_than_its_bound() -> None:
    one = flight(window=30, bound=100)
    one.start(producer(one, [b"x" * 10] * 100), lambda: None)
    one.keep_going()
    while not one.landed:
        assert one._held <= 100
        await asyncio.sleep(0)
    assert await one.result() == "result"
