"""What a tenant may still spend, in Redis, for all gateways together: token buckets by Redis's own clock, a day's sum.

One hash per tenant at `{prefix}:q:{tenant}`: `r` and `t` are the levels of the two buckets (requests, tokens) at the
time `at`, `u` is what was spent on the day `d` (UTC). It expires by itself.
"""

from __future__ import annotations

from asyncio import Future
from typing import NamedTuple

from cache.stores.resp import Client, Reply

# A limit of -1 is none. Levels below zero are debts: tokens are known only after the fact.
_SETTLE = """
local rpm, tpm, budget = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local want, tokens, cost = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local day = math.floor(now / 86400)
local kept = redis.call('HMGET', KEYS[1], 'r', 't', 'at', 'd', 'u')
local passed = math.max(0, now - (tonumber(kept[3]) or now))
local r = math.min(rpm, (tonumber(kept[1]) or rpm) + passed * rpm / 60)
local t = math.min(tpm, (tonumber(kept[2]) or tpm) + passed * tpm / 60) - tokens
local u = cost
if tonumber(kept[4]) == day then u = u + tonumber(kept[5]) end
local granted = want
if (tpm >= 0 and t < 0) or (budget >= 0 and u >= budget) then granted = 0 end
if rpm >= 0 then
  granted = math.min(granted, math.max(0, math.floor(r)))
  r = r - granted
end
redis.call('HSET', KEYS[1], 'r', string.format('%.6f', r), 't', string.format('%.6f', t),
  'at', string.format('%.6f', now), 'd', day, 'u', string.format('%.0f', u))
redis.call('PEXPIRE', KEYS[1], 172800000)
return {granted, string.format('%.6f', r), string.format('%.6f', t), string.format('%.0f', u)}
"""


class Settled(NamedTuple):
    """``granted`` requests may be let in. The levels left, in requests and tokens, and what was spent today."""

    granted: int
    requests: float
    tokens: float
    spent: int


class Quotas:
    """The one command; it fails with StoreError only."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = f"{prefix}:q:".encode()

    def settle(
        self,
        tenant: str,
        *,
        per_minute: tuple[int | None, int | None],
        per_day: int | None,
        want: int,
        tokens: int,
        cost: int,
    ) -> Future[Settled]:
        """Takes up to ``want`` requests and reports what was spent since the last time. ``per_minute``: requests and
        tokens; ``per_day`` and ``cost`` in any whole unit of money.
        """
        limits = [-1 if limit is None else limit for limit in (*per_minute, per_day)]
        key = self._prefix + tenant.encode()
        return self._client.execute(b"EVAL", _SETTLE, 1, key, *limits, want, tokens, cost, parse=_settled)


def _settled(reply: Reply) -> Settled:
    granted, requests, tokens, spent = reply
    return Settled(int(granted), float(requests), float(tokens), int(spent))
