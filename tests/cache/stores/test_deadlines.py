"""One timer for many deadlines: each future fails at its time, done ones are let go, a busy loop is forgiven once."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from asyncio import Future

import pytest

from cache.stores.base import StoreError
from cache.stores.deadlines import Deadlines


async def test_each_future_fails_at_its_own_time_and_is_told_of_once() -> None:
    loop = asyncio.get_running_loop()
    expired: list[float] = []
    deadlines = Deadlines(0.05, lambda: expired.append(loop.time()))
    watched: list[tuple[float, Future[None]]] = []
    for i in range(4):
        future = loop.create_future()
        watched.append((loop.time() + 0.05, future))
        deadlines.watch(future)
        if i == 2:
            future.set_result(None)
        await asyncio.sleep(0.02)
    for _, future in watched:
        await asyncio.wait([future])
    kinds = [type(future.exception()) for _, future in watched]
    assert kinds == [StoreError, StoreError, type(None), StoreError]
    assert len(expired) == 3
    due = [when for when, future in watched if future.exception() is not None]
    assert all(at >= when - 0.002 for at, when in zip(expired, due, strict=True))


async def test_results_are_not_held_until_the_deadline() -> None:
    class Value: ...

    deadlines = Deadlines(60)
    loop = asyncio.get_running_loop()
    future: Future[Value] = loop.create_future()
    deadlines.watch(future)
    result = weakref.ref(value := Value())
    future.set_result(value)
    del value, future
    deadlines.watch(loop.create_future())
    gc.collect()
    assert result() is None


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_loop_that_is_always_late_keeps_deadlines_too() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(0.02)
    futures = [loop.create_future() for _ in range(100)]
    for future in futures:
        deadlines.watch(future)
    started = loop.time()
    while not all(future.done() for future in futures):
        compute(0.03)  # that is what makes the loop late
        await asyncio.sleep(0)
        assert loop.time() - started < 1
    with pytest.raises(StoreError, match="20 ms"):
        await futures[0]
    for future in futures:
        future.exception()
