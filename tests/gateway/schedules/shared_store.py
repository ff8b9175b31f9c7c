"""A Redis in the process itself: what `RedisStore` and `Leases` do there, on simulated time; slow, failing at times."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from cache.stores.base import StoreError
from cache.stores.leases import Heard, Leases, Told
from cache.stores.redis import RedisStore
from tests.gateway.schedules.simulated_loop import SimulatedLoop

T = TypeVar("T")
Clock = Callable[[], float]


class SimulatedRedis:
    """What all gateways share. Everything but the generations expires."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.generations: dict[str, int] = {}
        self._kept: dict[Any, tuple[Any, float]] = {}

    def get(self, key: Any) -> Any:
        value, expires = self._kept.get(key, (None, 0.0))
        return value if expires > self.clock() else None

    def put(self, key: Any, value: Any, seconds: float) -> None:
        self._kept[key] = (value, self.clock() + seconds)

    def drop(self, key: Any) -> None:
        self._kept.pop(key, None)


class SimulatedStore(RedisStore, Leases):
    """One gateway's way to it, for entries, purges and leases. ``failing``: the share of commands that fail, which
    ``on_failure`` hears of; ``dead``: its process is.
    """

    def __init__(self, redis: SimulatedRedis, random: Random, failing: float, on_failure: Callable[[], None]) -> None:
        self._redis = redis
        self._random = random
        self._failing = failing
        self._on_failure = on_failure
        self.dead = False
        self.timeout = math.inf
        self.leases = self
        self.quotas: Any = None

    async def _do(self, command: Callable[[], T]) -> T:
        """Runs a command some time after it was given, and tells its result some time later."""
        if self.dead:
            await asyncio.Event().wait()
        await asyncio.sleep(self._random.choice([0.0, 0.0, 0.001, 0.02]))
        fails = self._random.random() < self._failing
        if fails:
            self._on_failure()
            if self._random.random() < 0.5:  # else its answer is lost
                raise StoreError("unavailable", "it failed")
        result = command()
        if fails:
            raise StoreError("unavailable", "it failed")
        await asyncio.sleep(self._random.choice([0.0, 0.0, 0.001, 0.02]))
        return result

    # Entries and purges

    async def get(self, key: bytes) -> bytes | None:  # type: ignore[override]
        return await self._do(lambda: self._redis.get(key))

    async def set(self, key: bytes, value: bytes, ttl: float) -> None:  # type: ignore[override]
        await self._do(lambda: self._redis.put(key, value, ttl))

    async def bump(self, scope: str) -> int:  # type: ignore[override]
        return await self._do(lambda: self._bumped(scope))

    def _bumped(self, scope: str) -> int:
        known = self._redis.generations
        known[scope] = max(max(known.values(), default=0) + 1, int((SimulatedLoop.EPOCH + self._redis.clock()) * 1000))
        return known[scope]

    async def watch(self, on_bump: Callable[[str, int], None]) -> None:
        heard: dict[str, int] = {}
        while True:
            for scope, generation in self._redis.generations.items():
                if heard.get(scope) != generation:
                    on_bump(scope, generation)
                    heard[scope] = generation
            await asyncio.sleep(0.5)

    # Leases

    async def board(self, name: bytes, token: bytes, ttl: float, *, anew: bool = False) -> bytes:  # type: ignore[override]
        def command() -> bytes:
            lease = self._redis.get(("lease", name))
            if lease is None or (lease[0] == b"" and anew):
                self._redis.put(("lease", name), [token, 0], ttl)
                return token
            lease[1] += lease[0] != b""
            return lease[0]

        return await self._do(command)

    async def renew(self, name: bytes, token: bytes, ttl: float, stream_ttl: float) -> int:  # type: ignore[override]
        def command() -> int:
            lease = self._redis.get(("lease", name))
            if lease is None or lease[0] != token:
                return -1
            self._redis.put(("lease", name), lease, ttl)
            self._redis.put(("told", name, token), self._told(name, token), stream_ttl)
            return lease[1]

        return await self._do(command)

    async def end(self, name: bytes, token: bytes, *, anyway: bool, stored: float) -> int:  # type: ignore[override]
        def command() -> int:
            lease = self._redis.get(("lease", name))
            if lease is None or lease[0] != token:
                return -1
            if lease[1] > 0 and not anyway:
                return lease[1]
            self._redis.drop(("lease", name))
            if stored:
                self._redis.put(("lease", name), [b"", 0], stored)
            return 0

        return await self._do(command)

    async def leave(self, name: bytes, token: bytes) -> None:  # type: ignore[override]
        def command() -> None:
            lease = self._redis.get(("lease", name))
            if lease is not None and lease[0] == token:
                lease[1] -= 1

        await self._do(command)

    async def tell(self, name: bytes, token: bytes, told: Told, ttl: float) -> bool:  # type: ignore[override]
        def command() -> bool:
            before = self._told(name, token)
            if before and told.number <= before[-1].number:
                raise StoreError("data", "told twice")
            self._redis.put(("told", name, token), [*before, told], ttl)
            return True

        return await self._do(command)

    async def hear(self, name: bytes, token: bytes, after: int) -> Heard:  # type: ignore[override]
        def command() -> Heard:
            lease = self._redis.get(("lease", name))
            told = [one for one in self._told(name, token) if one.number > after]
            return Heard(lease is not None and lease[0] == token, told[:100])

        return await self._do(command)

    def _told(self, name: bytes, token: bytes) -> list[Told]:
        return self._redis.get(("told", name, token)) or []
