"""Leases and streams in Redis: who leads a piece of work, who waits for it, and what the leader tells them.

A lease is a hash at `{prefix}:f:{name}`: `t` is the leader's token, empty once the work is done and its result is in
the store; `n` is how many wait. What the leader tells is a stream beside it, numbered from 1 without a gap, so that a
reader notices if Redis has lost (evicted) a part. Everything expires by itself.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from cache.stores.resp import Client, Reply

T = TypeVar("T")

_BOARD = """
local token = redis.call('HGET', KEYS[1], 't')
if not token or (token == '' and ARGV[3] == '1') then
  redis.call('HSET', KEYS[1], 't', ARGV[1], 'n', 0)
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return ARGV[1]
end
if token ~= '' then redis.call('HINCRBY', KEYS[1], 'n', 1) end
return token
"""
_RENEW = """
if redis.call('HGET', KEYS[1], 't') ~= ARGV[1] then return -1 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return tonumber(redis.call('HGET', KEYS[1], 'n'))
"""
_END = """
if redis.call('HGET', KEYS[1], 't') ~= ARGV[1] then return -1 end
local waiting = tonumber(redis.call('HGET', KEYS[1], 'n'))
if waiting > 0 and ARGV[2] == '0' then return waiting end
if ARGV[3] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('HSET', KEYS[1], 't', '')
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 0
"""
_LEAVE = """
if redis.call('HGET', KEYS[1], 't') == ARGV[1] then redis.call('HINCRBY', KEYS[1], 'n', -1) end
"""
_TELL = """
redis.call('XADD', KEYS[1], '1-' .. ARGV[1], ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
"""
_HEAR = """
local token = redis.call('HGET', KEYS[1], 't')
local told = redis.call('XRANGE', KEYS[2], '1-' .. (ARGV[2] + 1), '+', 'COUNT', 100)
return {token == ARGV[1] and 1 or 0, told}
"""


class Told(NamedTuple):
    """One thing a leader said, with its number."""

    number: int
    kind: bytes
    data: bytes


class Heard(NamedTuple):
    """``led``: whether the leader still holds its lease."""

    led: bool
    told: list[Told]


class Leases:
    """The commands. Times in seconds; each call fails with StoreError only."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = f"{prefix}:f:".encode()

    def board(self, name: bytes, token: bytes, ttl: float, *, anew: bool = False) -> Future[bytes]:
        """Takes the lease if nobody has it. Returns the token of whoever leads (who counts us as waiting, if it is
        another), or b"" when the result is in the store already, unless it is wanted ``anew``.
        """
        return self._eval(_BOARD, [self._lease(name)], token, _ms(ttl), int(anew), parse=bytes)

    def renew(self, name: bytes, token: bytes, ttl: float, stream_ttl: float) -> Future[int]:
        """How many wait; -1 when the lease is lost."""
        keys = [self._lease(name), self._stream(name, token)]
        return self._eval(_RENEW, keys, token, _ms(ttl), _ms(stream_ttl), parse=int)

    def end(self, name: bytes, token: bytes, *, anyway: bool, stored: float) -> Future[int]:
        """Gives the lease up, unless somebody waits, or ``anyway``. ``stored`` > 0: for so long newcomers are told that
        the result is in the store. Returns how many wait; 0: given up; -1: it was lost.
        """
        return self._eval(_END, [self._lease(name)], token, int(anyway), _ms(stored), parse=int)

    def leave(self, name: bytes, token: bytes) -> Future[None]:
        """Waits no more."""
        return self._eval(_LEAVE, [self._lease(name)], token, parse=lambda _: None)

    def tell(self, name: bytes, token: bytes, told: Told, ttl: float) -> Future[bool]:
        """Adds to the leader's stream; True."""
        arguments = (told.number, told.kind, told.data, _ms(ttl))
        return self._eval(_TELL, [self._stream(name, token)], *arguments, parse=lambda _: True)

    def hear(self, name: bytes, token: bytes, after: int) -> Future[Heard]:
        """What the leader told after number ``after``, at most 100 things."""
        return self._eval(_HEAR, [self._lease(name), self._stream(name, token)], token, after, parse=_heard)

    def _eval(self, script: str, keys: list[bytes], *arguments: bytes | int, parse: Callable[[Reply], T]) -> Future[T]:
        return self._client.execute(b"EVAL", script, len(keys), *keys, *arguments, parse=parse)

    def _lease(self, name: bytes) -> bytes:
        return self._prefix + name

    def _stream(self, name: bytes, token: bytes) -> bytes:
        return self._prefix + name + b":" + token


def _heard(reply: Reply) -> Heard:
    led, entries = reply
    return Heard(led == 1, [Told(int(number.partition(b"-")[2]), *fields) for number, fields in entries])


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
