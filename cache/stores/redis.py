"""The store of many machines: entries under `{prefix}:r:{hex}`, generations in one hash, bumps told by pub/sub."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections.abc import Callable

from cache.stores.base import GENERATIONS_KEPT, StoreError, check_key, check_scope, check_ttl
from cache.stores.leases import Leases
from cache.stores.quotas import Quotas
from cache.stores.resp import Client, Connection, Reply, pack

log = logging.getLogger(__name__)

HEARTBEAT = 1.0  # seconds between two looks whether a bump was missed or lost

# All in one hash, generations by scope. The field '', which no scope can have, holds the greatest given out, so that
# each is greater than all before it.
_BUMP = """
local latest = tonumber(redis.call('HGET', KEYS[1], '') or '0')
local generation = string.format('%d', math.max(latest + 1, tonumber(ARGV[2])))
redis.call('HSET', KEYS[1], '', generation, ARGV[1], generation)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PUBLISH', KEYS[1], generation .. ' ' .. ARGV[1])
return generation
"""
# Raises scopes to the generations a process remembers, and drops those too old to matter.
_MEND = """
for i = 3, #ARGV, 2 do
  local current = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
  local generation = math.max(current, tonumber(ARGV[i + 1]))
  if generation < tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[1], ARGV[i])
  elseif generation > current then
    redis.call('HSET', KEYS[1], ARGV[i], string.format('%d', generation))
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""


class RedisStore:
    """See `base.SharedStore`. `url` as in `resp.Address`; `timeout`: seconds a command may take."""

    name = "redis"

    def __init__(
        self, url: str, prefix: str = "wg", timeout: float = 0.05, clock: Callable[[], float] = time.time
    ) -> None:
        self.client = Client(url, timeout)
        self.timeout = timeout
        self.leases = Leases(self.client, prefix)
        self.quotas = Quotas(self.client, prefix)
        self._entry = f"{prefix}:r:".encode()
        self._generations = f"{prefix}:gen".encode()
        self._clock = clock
        self._behind = False

    async def open(self) -> None:
        await self.client.open()

    async def close(self) -> None:
        await self.client.close()

    def get(self, key: bytes) -> Future[bytes | None]:
        if self._behind:
            raise StoreError("behind", "purges may have been missed")
        name = self._entry + check_key(key).hex().encode()
        command = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
        return self.client.execute_packed(command, _bytes_or_none)

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

    def generations(self) -> Future[dict[str, int]]:
        reading = self.client.execute(b"HGETALL", self._generations, parse=self._young)
        reading.add_done_callback(self._read)
        return reading

    def _read(self, reading: Future[dict[str, int]]) -> None:
        if not reading.cancelled():
            self._behind = reading.exception() is not None

    def _young(self, reply: Reply) -> dict[str, int]:
        oldest = self._oldest()
        return {scope: value for scope, value in _parse_hash(reply).items() if scope and value >= oldest}

    def _oldest(self) -> int:
        return int(self._clock() * 1000) - GENERATIONS_KEPT

    async def watch(self, on_bump: Callable[[str, int], None]) -> None:
        known: dict[str, int] = {}

        def tell(scope: str, generation: int) -> None:
            if generation > known.get(scope, 0):
                known[scope] = generation
                on_bump(scope, generation)

        while True:
            try:
                await self._listen(tell, known)
            except StoreError as error:
                if not self._behind:
                    log.warning("not hearing of purges from Redis at %s: %s", self.client.address, error)
                self._behind = True
            await asyncio.sleep(0.2)

    async def _listen(self, tell: Callable[[str, int], None], known: dict[str, int]) -> None:
        """Tell of bumps from one connection until it is lost. A bump that comes by no message is found by reading."""
        subscribed = asyncio.Event()

        def on_push(reply: Reply) -> None:
            bump = _parse_message(reply)
            if bump is not None:
                tell(*bump)
            elif isinstance(reply, list) and reply[:1] == [b"subscribe"]:
                subscribed.set()

        connection = await Connection.connect(self.client.address, self.client.connect_timeout, on_push)
        try:
            connection.write(pack((b"SUBSCRIBE", self._generations)))
            async with asyncio.timeout(self.client.connect_timeout):
                await subscribed.wait()  # what is bumped before is read below, what comes after is told
            await self._reconcile(tell, known, read_all=True)
            while not connection.closed.done():
                await asyncio.wait([connection.closed], timeout=HEARTBEAT)
                await self._reconcile(tell, known)
                connection.write(pack((b"PING",)))
                connection.stalled()  # unless a byte comes
            raise connection.closed.result().copy()
        except TimeoutError:
            raise StoreError("timeout", "no answer to SUBSCRIBE") from None
        finally:
            connection.abort("watching ended")

    async def _reconcile(self, tell: Callable[[str, int], None], known: dict[str, int], read_all: bool = False) -> None:
        """Learn what was missed; put back what Redis forgot (flushed, evicted, failed over), drop what is too old."""
        newest = max(known.values(), default=0)
        latest = await self.client.execute(b"HGET", self._generations, b"", parse=lambda reply: int(reply or 0))
        if latest == newest and not read_all:
            return
        found = await self.client.execute(b"HGETALL", self._generations, parse=_parse_hash)
        for scope, generation in found.items():
            if scope and generation >= self._oldest():
                tell(scope, generation)
        self._behind = False
        mend = {scope: value for scope, value in found.items() if value < self._oldest()}
        mend |= {scope: value for scope, value in known.items() if value > found.get(scope, 0)}
        if newest > found.get("", 0):
            mend[""] = newest
        pairs = list(mend.items())
        for start in range(0, len(pairs), 1000):
            arguments = [part for pair in pairs[start : start + 1000] for part in pair]
            await self.client.execute(
                b"EVAL", _MEND, 1, self._generations, GENERATIONS_KEPT, self._oldest(), *arguments
            )


def _parse_hash(reply: Reply) -> dict[str, int]:
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {scope.decode(): int(value) for scope, value in pairs}


def _parse_message(reply: Reply) -> tuple[str, int] | None:
    """The bump that a message tells of, None for any other reply (a confirmation, a PONG, a stranger's message)."""
    if isinstance(reply, list) and len(reply) == 3 and reply[0] == b"message":
        generation, _, scope = reply[2].partition(b" ")
        if generation.isdigit() and scope:
            return scope.decode(errors="replace"), int(generation)
    return None


def _bytes_or_none(reply: Reply) -> bytes | None:
    if reply is None or type(reply) is bytes:
        return reply
    raise StoreError("data", f"expected a string, got {type(reply).__name__}")


def _none(reply: Reply) -> None:
    return None
