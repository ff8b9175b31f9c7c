"""The store of many machines: entries under `{prefix}:r:{hex}`, generations in one hash, bumps told by pub/sub."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections.abc import Awaitable, Callable

from cache.stores.base import GENERATIONS_KEPT, StoreError, check_key, check_scope, check_ttl
from cache.stores.resp import Client, Connection, Reply, pack

log = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two proofs that the watching connection lives

# The field that no scope can have holds the greatest generation given out, so that each is greater than all before it.
_BUMP = """
local latest = tonumber(redis.call('HGET', KEYS[1], '') or '0')
local generation = string.format('%d', math.max(latest + 1, tonumber(ARGV[2])))
redis.call('HSET', KEYS[1], '', generation, ARGV[1], generation)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PUBLISH', KEYS[1], generation .. ' ' .. ARGV[1])
return generation
"""


class RedisStore:
    """See `base.SharedStore`. `url` as in `resp.Address`; `timeout`: seconds a command may take."""

    name = "redis"

    def __init__(
        self, url: str, prefix: str = "wg", timeout: float = 0.05, clock: Callable[[], float] = time.time
    ) -> None:
        self.client = Client(url, timeout)
        self._entry = f"{prefix}:r:".encode()
        self._generations = f"{prefix}:gen".encode()
        self._clock = clock

    async def open(self) -> None:
        await self.client.open()

    async def close(self) -> None:
        await self.client.close()

    def get(self, key: bytes) -> Future[bytes | None]:
        return self.client.execute(b"GET", self._entry + check_key(key).hex().encode(), parse=_bytes_or_none)

    def set(self, key: bytes, value: bytes, ttl: float) -> Future[None]:
        name = self._entry + check_key(key).hex().encode()
        return self.client.execute(b"SET", name, value, b"PX", check_ttl(ttl), parse=_none)

    def delete(self, key: bytes) -> Future[None]:
        return self.client.execute(b"DEL", self._entry + check_key(key).hex().encode(), parse=_none)

    def bump(self, scope: str) -> Future[int]:
        now = int(self._clock() * 1000)
        return self.client.execute(
            b"EVAL", _BUMP, 1, self._generations, check_scope(scope), now, GENERATIONS_KEPT, parse=int
        )

    def generations(self) -> Awaitable[dict[str, int]]:
        return self.client.execute(b"HGETALL", self._generations, parse=self._parse_generations)

    def _parse_generations(self, reply: Reply) -> dict[str, int]:
        pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
        oldest = self._clock() * 1000 - GENERATIONS_KEPT
        return {scope.decode(): int(value) for scope, value in pairs if scope and int(value) >= oldest}

    async def watch(self, on_bump: Callable[[str, int], None]) -> None:
        seen: dict[str, int] = {}

        def tell(scope: str, generation: int) -> None:
            if generation > seen.get(scope, 0):
                seen[scope] = generation
                on_bump(scope, generation)

        while True:
            try:
                await self._watch_once(tell)
            except StoreError as error:
                log.info("not hearing of purges from Redis at %s: %s", self.client.address, error)
            await asyncio.sleep(0.2)

    async def _watch_once(self, tell: Callable[[str, int], None]) -> None:
        loop = asyncio.get_running_loop()
        subscribed: Future[None] = loop.create_future()
        heard = loop.time()

        def on_push(reply: Reply) -> None:
            nonlocal heard
            heard = loop.time()
            if not isinstance(reply, list) or not reply:
                return
            if reply[0] == b"subscribe" and not subscribed.done():
                subscribed.set_result(None)
            elif reply[0] == b"message":
                generation, _, scope = reply[2].partition(b" ")
                tell(scope.decode(), int(generation))

        connection = await Connection.connect(self.client.address, self.client.connect_timeout, on_push)
        try:
            connection.write(pack((b"SUBSCRIBE", self._generations)))
            await asyncio.wait([subscribed, connection.closed], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            if not subscribed.done():
                raise StoreError("timeout", "no answer to SUBSCRIBE")
            for scope, generation in (await self.generations()).items():
                tell(scope, generation)
            while loop.time() - heard < 2 * HEARTBEAT:
                connection.write(pack((b"PING",)))
                await asyncio.wait([connection.closed], timeout=HEARTBEAT)
                if connection.closed.done():
                    raise connection.closed.result()
            raise StoreError("timeout", f"no byte in {2 * HEARTBEAT:g} s")
        finally:
            connection.abort("watching ended")


def _bytes_or_none(reply: Reply) -> bytes | None:
    if reply is None or type(reply) is bytes:
        return reply
    raise StoreError("data", f"expected a string, got {type(reply).__name__}")


def _none(reply: Reply) -> None:
    return None
