"""What a tenant may still spend, counted in this process or, with Redis, for all gateways together.

The rule: every admitted request counts once, whether it turns out a hit or a miss; one that is refused does not. Tokens
count when they are known, as they were served to the caller, so a bucket may go below zero and later requests wait.
Money is what upstream calls cost, by the price table, since midnight UTC: hits cost nothing, a shared call costs
whoever made it, and a call of unknown cost adds nothing.

With Redis a process takes small shares of the requests in advance, so that the short path can let callers in without
asking; near a limit, and once a second, it asks. Redis in trouble is a limit for each process by itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from cache.stores.breaker import GuardedStore
from cache.stores.quotas import Quotas, Settled
from gateway.clock import Clock
from gateway.config import TenantLimits
from policies.limits import Bucket
from policies.pricing import PICO

SHARE = 0.5
"""Seconds' worth of a tenant's requests that a process takes at once."""
TRUSTED_FOR = 1.0
"""Seconds for which a share, and what Redis said of tokens and money, may be relied on."""
NEAR = 0.05
"""Share of a limit below which every request is asked for."""
REPORT_EVERY = 0.5
"""Seconds between two reports to Redis of what was spent."""
LEARN_EVERY = 2.0
"""Seconds between two looks into the ledger, where there is no Redis."""
DAY = 86_400


class Refusal(NamedTuple):
    """Why not now, in a sentence, with OpenAI's error code and the seconds until it may be tried again."""

    message: str
    code: str
    wait: float


class SharedQuotas(NamedTuple):
    """The quotas in Redis, and the store whose circuit guards them."""

    store: GuardedStore
    quotas: Quotas


class Usage:
    """What one tenant has under way and has spent; all its keys share it, and a reload keeps it."""

    def __init__(self, tenant: str, clock: Clock, shared: SharedQuotas | None = None) -> None:
        self.concurrent = 0
        self._tenant = tenant
        self._clock = clock
        self._shared = shared
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._day, self._spent = 0, 0  # pico-dollars spent today, as far as known here
        self._share, self._asked_at, self._level = 0, -math.inf, 0.0  # of Redis: requests in hand, and when it said
        self._unsent_tokens, self._unsent_cost = 0, 0
        self.apply(TenantLimits())

    def apply(self, limits: TenantLimits) -> None:
        """Goes on under these limits."""
        now = self._clock.monotonic()
        self._limits = limits
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)
        self._budget = None if limits.usd_per_day is None else int(limits.usd_per_day * PICO)
        self._counts = self._requests is not None or self._tokens is not None or self._budget is not None

    @property
    def has_budget(self) -> bool:
        """Whether money counts."""
        return self._budget is not None

    def admit_at_once(self) -> bool:
        """Lets a request in, if that can be decided here and now. Who was let in must be released."""
        if self._limits.concurrent is not None and self.concurrent >= self._limits.concurrent:
            return False
        if self._counts and (self._take_here() is not None if self._shared is None else not self._take_share()):
            return False
        self.concurrent += 1
        return True

    async def admit(self) -> Refusal | None:
        """Lets a request in, or says why not. Who was let in must be released."""
        most = self._limits.concurrent
        if most is not None and self.concurrent >= most:
            return Refusal(f"More than {most} requests of this tenant are under way.", "too_many_concurrent", 1)
        self.concurrent += 1
        refusal = None
        try:
            if self._counts and (self._shared is None or not self._take_share()):
                refusal = await self._ask()
        except BaseException:
            self.concurrent -= 1
            raise
        if refusal is not None:
            self.concurrent -= 1
        return refusal

    def release(self, served: dict[str, int] | None) -> None:
        """The request is over; ``served`` are its tokens, as far as known."""
        self.concurrent -= 1
        if self._tokens is not None and served:
            tokens = served.get("prompt", 0) + served.get("output", 0)
            self._tokens.spend(tokens, self._clock.monotonic())
            if self._shared is not None:
                self._unsent_tokens += tokens

    def spend(self, cost: int) -> None:
        """An upstream call has cost so many pico-dollars."""
        self._today()
        self._spent += cost
        if self._shared is not None:
            self._unsent_cost += cost

    def learn(self, spent: int) -> None:
        """What all processes of this machine have spent today, from the ledger."""
        self._today()
        self._spent = max(self._spent, spent)

    async def report(self) -> None:
        """Tells Redis what was spent, if anything; other processes wait to hear of it."""
        if self._counts and self._shared is not None and (self._unsent_tokens or self._unsent_cost):
            await self._settle(0)

    def _take_here(self) -> Refusal | None:
        """One request from this process's own buckets."""
        now = self._clock.monotonic()
        if self._budget is not None:
            self._today()
            if self._spent >= self._budget:
                return self._over_budget()
        if self._tokens is not None and (wait := self._tokens.take(0, now)) > 0:
            return _spent_up("tokens", wait)
        if self._requests is not None and (wait := self._requests.take(1, now)) > 0:
            return _spent_up("requests", wait)
        return None

    def _take_share(self) -> bool:
        """One request of those taken in advance, where tokens and money are known to be far from their limits."""
        limits = self._limits
        if self._clock.monotonic() - self._asked_at > TRUSTED_FOR:
            return False
        if limits.tokens_per_minute is not None and (
            self._level - self._unsent_tokens < NEAR * limits.tokens_per_minute
        ):
            return False
        if self._budget is not None and self._spent >= (1 - NEAR) * self._budget:
            return False
        if self._requests is not None:
            if self._share < 1:
                return False
            self._share -= 1
        return True

    async def _ask(self) -> Refusal | None:
        per_minute = self._limits.requests_per_minute
        settled = await self._settle(1 if per_minute is None else max(1, int(per_minute / 60 * SHARE)))
        if settled is None:
            return self._take_here()
        if settled.granted:
            self._share += settled.granted - 1
            return None
        if self._budget is not None and settled.spent >= self._budget:
            return self._over_budget()
        if self._limits.tokens_per_minute is not None and settled.tokens < 0:
            return _spent_up("tokens", -settled.tokens * 60 / self._limits.tokens_per_minute)
        assert per_minute is not None
        return _spent_up("requests", (1 - settled.requests) * 60 / per_minute)

    async def _settle(self, want: int) -> Settled | None:
        """Asks Redis for requests and tells it what was spent; None: it is in trouble."""
        shared, limits = self._shared, self._limits
        if shared is None:
            return None
        tokens, cost = self._unsent_tokens, self._unsent_cost
        self._unsent_tokens = self._unsent_cost = 0
        settled = await shared.store.call(
            "settle",
            lambda: shared.quotas.settle(
                self._tenant,
                per_minute=(limits.requests_per_minute, limits.tokens_per_minute),
                per_day=self._budget,
                want=want,
                tokens=tokens,
                cost=cost,
            ),
        )
        if settled is None:
            self._unsent_tokens += tokens
            self._unsent_cost += cost
            return None
        now = self._clock.monotonic()
        if now - self._asked_at > TRUSTED_FOR:
            self._share = 0
        self._asked_at, self._level = now, settled.tokens
        self._today()
        self._spent = settled.spent + self._unsent_cost
        return settled

    def _today(self) -> None:
        day = int(self._clock.time() // DAY)
        if day != self._day:
            self._day, self._spent = day, 0

    def _over_budget(self) -> Refusal:
        wait = DAY - self._clock.time() % DAY
        return Refusal("The tenant's budget for today is spent.", "budget_exceeded", wait)


class Usages:
    """The usage of every tenant. ``shared``: the quotas in Redis, where there is one."""

    def __init__(self, clock: Clock, shared: SharedQuotas | None) -> None:
        self._clock = clock
        self._shared = shared
        self._of: dict[str, Usage] = {}

    def of(self, tenant: str) -> Usage:
        """The usage of a tenant, the same object for as long as the process lives."""
        if tenant not in self._of:
            self._of[tenant] = Usage(tenant, self._clock, self._shared)
        return self._of[tenant]

    async def keep_up(self, ledger: Callable[[float], Awaitable[dict[str, int]]]) -> None:
        """Tells other processes what was spent here, and learns what they spent, until cancelled. ``ledger``: what each
        tenant has spent since a moment (unix seconds), in pico-dollars, as all processes of this machine know.
        """
        while True:
            if self._shared is not None:
                for usage in list(self._of.values()):
                    await usage.report()
            elif any(usage.has_budget for usage in self._of.values()):
                now = self._clock.time()
                for tenant, spent in (await ledger(now - now % DAY)).items():
                    self.of(tenant).learn(spent)
            await asyncio.sleep(REPORT_EVERY if self._shared is not None else LEARN_EVERY)


def _bucket(old: Bucket | None, rate: int | None, now: float) -> Bucket | None:
    if rate is None or old is None:
        return None if rate is None else Bucket(rate, now)
    old.at_rate(rate, now)
    return old


def _spent_up(what: str, wait: float) -> Refusal:
    return Refusal(f"The tenant's {what} for this minute are spent.", "rate_limit_exceeded", wait)
