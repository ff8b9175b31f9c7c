"""Keeps a bad store from harming a request: a deadline per call, a circuit that opens, and no exceptions.

The circuit breaker is the pattern of M. Nygard, "Release It!": closed (calls pass), open (calls are skipped at once),
half-open (after the cooldown, one call probes; it closes or reopens the circuit).
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cache.stores.base import SharedStore, StoreError
from cache.stores.deadlines import Deadlines

log = logging.getLogger(__name__)
T = TypeVar("T")

MAKE_UP_EVERY = 0.5  # seconds between attempts at bumps that failed
LOG_EVERY = 10.0  # seconds between two log lines of one error class
# Answers of a store that is alive and quick: skipping it would gain nothing and lose the hits it still serves.
HARMLESS = frozenset({"full", "readonly", "data", "behind", "ValueError"})


class Breaker:
    """When to call a store: the circuit's state, and how long a call may take.

    `deadline`: seconds a `get` or `set` may take. `slow_deadline`: the same for the rest, which must be durable or is
    large, and is not part of a request. `failures`: how many in a row open the circuit.
    `cooldown`: seconds until one probe is let through. Time comes from `clock`.
    """

    def __init__(
        self,
        deadline: float = 0.05,
        failures: int = 5,
        cooldown: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        slow_deadline: float = 2.0,
    ) -> None:
        self.deadline = deadline
        self.slow_deadline = slow_deadline
        self.clock = clock
        self._failures = failures
        self._cooldown = cooldown
        self._in_a_row = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def state(self) -> str:
        """ "closed", "open" or "half-open" (the cooldown is over, the next call or the one running is the probe)."""
        if self._opened is None:
            return "closed"
        return "open" if self.clock() - self._opened < self._cooldown else "half-open"

    def allow(self) -> bool:
        """Whether to make a call now; if so, `success`, `failure` or `abandon` must follow."""
        if self._opened is None:
            return True
        if self._probing or self.clock() - self._opened < self._cooldown:
            return False
        self._probing = True
        return True

    def success(self) -> None:
        self._in_a_row = 0
        self._opened = None
        self._probing = False

    def failure(self) -> None:
        self._in_a_row += 1
        if self._probing or (self._opened is None and self._in_a_row >= self._failures):
            self._opened = self.clock()
            self._probing = False

    def abandon(self) -> None:
        """The caller left before the call ended: nothing was learnt."""
        self._probing = False


class GuardedStore:
    """A shared store that never raises and never takes long: `get` gives None, `set` and `delete` False instead.

    `counters[op]` counts `ok`, `miss` (get only), `timeout`, `error:<kind>`, `skipped` (the circuit was open) and
    `abandoned` (the caller left).
    """

    def __init__(self, store: SharedStore, breaker: Breaker | None = None) -> None:
        self.store = store
        self.breaker = breaker or Breaker()
        self.counters: defaultdict[str, Counter[str]] = defaultdict(
            Counter, {op: Counter() for op in ("get", "set", "delete", "bump", "generations")}
        )
        self._deadlines = Deadlines(self.breaker.deadline)
        self._slow_deadlines = Deadlines(self.breaker.slow_deadline)
        self._owed: set[str] = set()  # scopes whose bump has not succeeded yet
        self._logged: dict[str, tuple[float, int]] = {}  # class -> when last logged, how often held back since

    @property
    def name(self) -> str:
        return self.store.name

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.store.close()

    async def get(self, key: bytes) -> bytes | None:
        return (await self.ask(key))[0]

    async def ask(self, key: bytes) -> tuple[bytes | None, bool]:
        """The value, and whether the store has answered at all."""
        call = self.begin_get(key)
        return await self._finished("get", call), _succeeded(call)

    async def set(self, key: bytes, value: bytes, ttl: float) -> bool:
        """Whether the store took it."""
        call = self._begin("set", lambda: self.store.set(key, value, ttl), self._deadlines)
        await self._finished("set", call)
        return _succeeded(call)

    async def delete(self, key: bytes) -> bool:
        call = self._begin("delete", lambda: self.store.delete(key), self._slow_deadlines)
        await self._finished("delete", call)
        return _succeeded(call)

    async def bump(self, scope: str) -> int | None:
        """The new generation, or None: other processes will hear of this purge only once the store works again."""
        call = self._begin("bump", lambda: self.store.bump(scope), self._slow_deadlines)
        self._owed.add(scope)
        generation = await self._finished("bump", call)
        if generation is not None or (call is not None and isinstance(call.exception(), ValueError)):
            self._owed.discard(scope)
        return generation

    async def generations(self) -> dict[str, int] | None:
        """All generations, or None if they could not be read."""
        return await self._finished(
            "generations", self._begin("generations", self.store.generations, self._slow_deadlines)
        )

    async def call(self, op: str, start: Callable[[], Awaitable[T]]) -> T | None:
        """Anything else that this kind of store can do, counted as ``op``; None for any failure."""
        return await self._finished(op, self._begin(op, start, self._deadlines))

    async def watch(self, on_bump: Callable[[str, int], None]) -> None:
        """Tell of every generation (see `SharedStore.watch`), and make up for bumps that failed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.store.watch(on_bump))
            group.create_task(self._make_up())

    async def _make_up(self) -> None:
        while True:
            await asyncio.sleep(MAKE_UP_EVERY)
            for scope in list(self._owed):
                if await self.bump(scope) is None:
                    break

    def begin_get(self, key: bytes) -> Future[bytes | None] | None:
        """Start a lookup without a task: the future gets a result or an exception before long; None: circuit open.

        Give it to `end_get` when it is done (say, in its callback), whatever became of it.
        """
        deadlines = self._deadlines if self.store.timeout > self.breaker.deadline else None
        return self._begin("get", lambda: self.store.get(key), deadlines)

    def end_get(self, call: Future[bytes | None]) -> tuple[bytes | None, bool]:
        """What a done lookup found, counted, and whether the store has answered at all."""
        return self._end("get", call), _succeeded(call)

    def _begin(self, op: str, start: Callable[[], Awaitable[T]], deadlines: Deadlines | None) -> Future[T] | None:
        if not self.breaker.allow():
            self.counters[op]["skipped"] += 1
            return None
        try:
            call = _as_future(start())
        except Exception as error:
            call = asyncio.get_running_loop().create_future()
            call.set_exception(error)
            return call
        if deadlines is not None:
            deadlines.watch(call)
        return call

    async def _finished(self, op: str, call: Future[T] | None) -> T | None:
        if call is None:
            return None
        try:
            await call
        except asyncio.CancelledError:
            self._end(op, call)
            raise
        except Exception:
            pass  # counted below
        return self._end(op, call)

    def _end(self, op: str, call: Future[T]) -> T | None:
        counter = self.counters[op]
        if not call.done() or call.cancelled():
            counter["abandoned"] += 1
            self.breaker.abandon()
            return None
        error = call.exception()
        if error is None:
            value = call.result()
            counter["miss" if op == "get" and value is None else "ok"] += 1
            self.breaker.success()
            return value
        kind = error.kind if isinstance(error, StoreError) else type(error).__name__
        counter["timeout" if kind == "timeout" else f"error:{kind}"] += 1
        if kind in HARMLESS:
            self.breaker.success()
        else:
            self.breaker.failure()
        if kind != "behind":  # the store itself says since when
            self._log(kind, op, error)
        return None

    def _log(self, kind: str, op: str, error: BaseException) -> None:
        now = self.breaker.clock()
        last, held_back = self._logged.get(kind, (float("-inf"), 0))
        if now - last < LOG_EVERY:
            self._logged[kind] = (last, held_back + 1)
            return
        self._logged[kind] = (now, 0)
        more = f" ({held_back} more since the last such line)" if held_back else ""
        log.warning("%s store, %s: %s: %s; circuit %s%s", self.name, op, kind, error, self.breaker.state, more)


def _as_future(call: Awaitable[T]) -> Future[T]:
    """A plain future, which a deadline can fail; a coroutine behind it is cancelled when that happens."""
    if asyncio.isfuture(call) and not isinstance(call, asyncio.Task):
        return call
    task = asyncio.ensure_future(call)
    future: Future[T] = task.get_loop().create_future()

    def pass_on(task: Future[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if future.done():
            return
        if task.cancelled():
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    task.add_done_callback(pass_on)
    future.add_done_callback(lambda _: task.cancel())
    return future


def _succeeded(call: Future[Any] | None) -> bool:
    return call is not None and call.done() and not call.cancelled() and call.exception() is None
