"""A bad store costs a miss and next to no time: deadlines, the circuit, counters, few log lines."""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import Future
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cache.stores.base import StoreError
from cache.stores.breaker import Breaker, GuardedStore
from tests.cache.stores.conftest import FakeClock

KEY = b"k" * 16
DOWN = StoreError("unavailable", "no connection")


class FakeStore:
    """A store whose every call does what `act` says: raises, returns, or waits for ever."""

    name = "fake"
    timeout = math.inf

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act
        self.calls = 0
        self.cancelled = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def get(self, key: bytes) -> Awaitable[Any]:
        return self._call()

    def set(self, key: bytes, value: bytes, ttl: float) -> Awaitable[Any]:
        return self._call()

    def delete(self, key: bytes) -> Awaitable[Any]:
        return self._call()

    def bump(self, scope: str) -> Awaitable[Any]:
        return self._call()

    def generations(self) -> Awaitable[Any]:
        return self._call()

    async def _call(self) -> Any:
        self.calls += 1
        result = self.act()
        if result is not FREEZE:
            return result
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def watch(self, on_bump: Callable[[str, int], None]) -> None: ...


FREEZE = object()


def raising(error: Exception) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def guarded(act: Callable[[], Any], clock: FakeClock, **limits: Any) -> tuple[FakeStore, GuardedStore]:
    store = FakeStore(act)
    return store, GuardedStore(store, Breaker(**{"deadline": 0.02, "slow_deadline": 0.02, "clock": clock} | limits))


async def test_results_pass_through_and_are_counted(clock: FakeClock) -> None:
    store, guard = guarded(lambda: b"v", clock)
    assert await guard.get(KEY) == b"v"
    store.act = lambda: None
    assert await guard.get(KEY) is None
    assert await guard.set(KEY, b"v", 60) is True
    assert await guard.delete(KEY) is True
    store.act = lambda: 7
    assert await guard.bump("all") == 7
    store.act = lambda: {"all": 7}
    assert await guard.generations() == {"all": 7}
    assert guard.counters["get"] == {"ok": 1, "miss": 1}
    assert all(guard.counters[op] == {"ok": 1} for op in ("set", "delete", "bump", "generations"))


@pytest.mark.parametrize("error", [DOWN, RuntimeError("a bug"), StoreError("denied", "-NOAUTH")], ids=lambda e: str(e))
async def test_any_error_is_a_miss(clock: FakeClock, error: Exception) -> None:
    _, guard = guarded(raising(error), clock)
    assert await guard.get(KEY) is None
    assert await guard.set(KEY, b"v", 60) is False
    assert await guard.delete(KEY) is False
    assert await guard.bump("all") is None
    assert await guard.generations() is None


async def test_a_silent_store_takes_the_deadline_and_no_longer(clock: FakeClock) -> None:
    store, guard = guarded(lambda: FREEZE, clock)
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(1):
        assert await guard.get(KEY) is None
        assert await guard.set(KEY, b"v", 60) is False
    assert asyncio.get_running_loop().time() - started >= 0.04
    assert guard.counters["get"] == guard.counters["set"] == {"timeout": 1}
    await asyncio.sleep(0)
    assert store.cancelled == 2, "nothing may run on for nobody"


@pytest.mark.parametrize("act", [raising(DOWN), lambda: FREEZE], ids=["errors", "timeouts"])
async def test_failures_in_a_row_open_the_circuit_and_then_nothing_is_asked(clock: FakeClock, act: Callable) -> None:
    store, guard = guarded(act, clock)
    for _ in range(4):
        await guard.get(KEY)
    assert guard.breaker.state == "closed"
    await guard.set(KEY, b"v", 60)
    assert guard.breaker.state == "open"
    assert (await guard.get(KEY), await guard.set(KEY, b"v", 60), await guard.bump("all")) == (None, False, None)
    assert store.calls == 5
    assert guard.counters["get"]["skipped"] == guard.counters["set"]["skipped"] == 1


async def test_a_success_between_failures_keeps_it_closed(clock: FakeClock) -> None:
    store, guard = guarded(raising(DOWN), clock)
    for _ in range(10):
        store.act = raising(DOWN)
        for _ in range(4):
            await guard.get(KEY)
        store.act = lambda: b"v"
        assert await guard.get(KEY) == b"v"
    assert guard.breaker.state == "closed"


@pytest.mark.parametrize("kind", ["full", "readonly", "data"])
async def test_a_store_that_refuses_writes_still_serves_hits(clock: FakeClock, kind: Any) -> None:
    store, guard = guarded(raising(StoreError(kind, "no")), clock)
    for _ in range(20):
        assert await guard.set(KEY, b"v", 60) is False
    store.act = lambda: b"v"
    assert await guard.get(KEY) == b"v"
    assert guard.counters["set"] == {f"error:{kind}": 20}


async def test_after_the_cooldown_one_probe_decides(clock: FakeClock) -> None:
    store, guard = guarded(raising(DOWN), clock, failures=1, cooldown=5.0)
    await guard.get(KEY)
    clock.advance(4.9)
    await guard.get(KEY)
    assert (guard.breaker.state, store.calls) == ("open", 1)
    clock.advance(0.2)
    assert guard.breaker.state == "half-open"
    await guard.get(KEY)  # the probe fails: another cooldown
    assert (guard.breaker.state, store.calls) == ("open", 2)
    clock.advance(5.1)
    store.act = lambda: b"v"
    assert await guard.get(KEY) == b"v"
    assert guard.breaker.state == "closed"


async def test_half_open_lets_only_one_call_through_at_a_time(clock: FakeClock) -> None:
    store, guard = guarded(raising(DOWN), clock, failures=1)
    await guard.get(KEY)
    clock.advance(6)
    store.act = lambda: FREEZE
    await asyncio.gather(*[guard.get(KEY) for _ in range(50)])
    assert store.calls == 2
    assert guard.counters["get"]["skipped"] == 49


async def test_a_probe_whose_caller_leaves_does_not_block_the_next(clock: FakeClock) -> None:
    store, guard = guarded(raising(DOWN), clock, failures=1)
    await guard.get(KEY)
    clock.advance(6)
    store.act = lambda: FREEZE
    probe = asyncio.create_task(guard.get(KEY))
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    store.act = lambda: b"v"
    assert await guard.get(KEY) == b"v"
    assert guard.counters["get"]["abandoned"] == 1


async def test_fifty_lookups_of_a_frozen_store_end_together(clock: FakeClock) -> None:
    _, guard = guarded(lambda: FREEZE, clock)
    async with asyncio.timeout(0.5):
        assert await asyncio.gather(*[guard.get(KEY) for _ in range(50)]) == [None] * 50
    assert guard.breaker.state == "open"


async def test_a_lookup_by_callback_needs_no_task(clock: FakeClock) -> None:
    class Instant(FakeStore):
        future: Future[Any]

        def get(self, key: bytes) -> Future[Any]:
            return self.future

    store = Instant(lambda: None)
    guard = GuardedStore(store, Breaker(deadline=0.02, failures=1, clock=clock))
    found: list[bytes | None] = []
    before = len(asyncio.all_tasks())
    for outcome in (b"v", DOWN, None):
        store.future = asyncio.get_running_loop().create_future()
        call = guard.begin_get(KEY)
        if call is None:
            found.append(b"skipped")
            continue
        call.add_done_callback(lambda call: found.append(guard.end_get(call)[0]))
        assert len(asyncio.all_tasks()) == before
        if isinstance(outcome, Exception):
            store.future.set_exception(outcome)
        else:
            store.future.set_result(outcome)
        await asyncio.sleep(0)
    assert found == [b"v", None, b"skipped"]


async def test_one_log_line_per_ten_seconds_and_class(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store, guard = guarded(raising(DOWN), clock, failures=1000)
    for _ in range(500):
        await guard.get(KEY)
    store.act = raising(StoreError("full", "-OOM"))
    await guard.set(KEY, b"v", 60)
    assert [record.message.count("unavailable") for record in caplog.records] == [1, 0]
    clock.advance(10)
    store.act = raising(DOWN)
    await guard.get(KEY)
    assert "499 more" in caplog.records[-1].message
    assert len(caplog.records) == 3
