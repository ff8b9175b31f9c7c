"""The gateway as canaries go through it: its own pipeline, stores, purges, salts and connections, but with callers that
nobody else can be, and with ledger, limits, hold-out and counters apart, so that no canary is in any figure.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from cache.response.flights import Flights
from cache.response.keep import Keeper
from cache.response.recall import Recall
from cache.response.shared_flights import SharedFlights
from cache.stores.breaker import GuardedStore
from gateway.attempts import Attempt, Attempts
from gateway.config import Secret, Tenant, TenantKey, Upstream
from gateway.dialects import DIALECTS
from gateway.holdout import HoldOut
from gateway.http import JSON, Headers, Request
from gateway.ledger import Ledger
from gateway.ledger import Outcome as RowOutcome
from gateway.limits import Usages
from gateway.pipeline import Pipeline
from gateway.plan import Plan
from gateway.prefix_health import PrefixHealth
from gateway.reading import CallFlight, Head, Landed
from gateway.relay import Relay
from gateway.runtime import Runtime
from gateway.shortcut import Shortcut
from gateway.split import Splits
from gateway.tenants import Tenants
from gateway.upstreams.pool import Member, Pool
from gateway.upstreams.router import Router
from policies.misses import Misses
from policies.retry import Retries

PATH = "/v1/chat/completions"
ONE, OTHER = "~sentinel-1", "~sentinel-2"
"""The tenants that canaries belong to, no configuration can name one so; and the models that the stand-in serves."""
_STANDIN = Upstream(name="sentinel", url="http://sentinel.invalid", models=(ONE, OTHER))


@dataclass(frozen=True, slots=True)
class Told:
    """What came back. ``said``: the text of the answer, or of the error; ``usage`` as the upstream gave it."""

    status: int
    cache_status: str
    said: str
    usage: dict[str, Any]

    @property
    def hit(self) -> bool:
        """Whether it came from the response cache."""
        return self.cache_status.startswith("warmgate; hit")


class Standin(Relay):
    """Answers in an upstream's place, with another text each time. ``calls``: how often; ``go``: answers wait until it
    is set, as it is at first.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.calls = 0
        self.go = asyncio.Event()
        self.go.set()

    async def fly(
        self,
        plan: Plan,
        request: Request,
        request_id: str,
        members: Sequence[Member],
        flight: CallFlight,
        cause: RowOutcome,
        *,
        wanted: bool,
        first: Attempt | None = None,
    ) -> Landed:
        self.calls += 1
        born, stamped = self._clock.time(), self._generations.stamp(plan.scopes)
        await self.go.wait()
        message = {"role": "assistant", "content": secrets.token_hex(8)}
        answer = {
            "object": "chat.completion",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        head = Head(200, [JSON], "sentinel", stream=False, whole=True)
        reading = self.reading(plan, head, flight, partial(self._keep, plan, born, stamped, False), wanted=wanted)
        reading.feed(orjson.dumps(answer))
        reading.end()
        return flight.outcome


class Aside:
    """One way for canaries: over memory or a store to a stand-in, or to ``upstream``. For one round, since a reload
    replaces parts of what it borrows.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        memory: bool = False,
        store: GuardedStore | None = None,
        flights: SharedFlights | None = None,
        upstream: Upstream | None = None,
    ) -> None:
        self.runtime = mine = copy(runtime)
        mine.misses = Misses()
        mine.prefix_health = PrefixHealth(runtime.clock.monotonic)
        mine.ledger = Ledger(None, runtime.clock)
        mine.otlp = None
        mine.not_stored = Counter()
        mine.stores_prompts = False
        mine.holdout = HoldOut(0.0)
        mine.memory = runtime.memory if memory else None
        mine.shared = store
        mine.shared_flights = flights
        mine.flights = Flights(runtime.generations)
        mine.recall = Recall(mine.memory, store, runtime.generations)
        mine.keeper = Keeper(mine.memory, store)
        self._keys = {tenant: secrets.token_hex(16) for tenant in (ONE, OTHER)}
        reserved = {"tenants": tuple(map(_tenant, self._keys.items())), "upstreams": (upstream or _STANDIN,)}
        config = runtime.config.model_copy(update=reserved)
        mine.tenants = Tenants(config, Usages(runtime.clock, None))
        mine.pool = Pool(config, runtime.client, runtime.clock)
        mine.router = Router(runtime.clock)
        mine.router.apply(config.routing, mine.pool.members)
        mine.splits = Splits(mine.router, runtime.clock)
        once = Retries(0, 0.0, 0.0)
        mine.relay = (Standin if upstream is None else Relay)(
            runtime.planner,
            mine.keeper,
            runtime.generations,
            runtime.clock,
            runtime.config.cache,
            mine.not_stored,
            lambda call: None,
            partial(
                Attempts,
                planner=runtime.planner,
                pool=mine.pool,
                router=mine.router,
                splits=mine.splits,
                retries=once,
            ),
        )
        self.shortcut = Shortcut(mine)
        self._pipeline = Pipeline(mine, self.shortcut)

    @property
    def standin(self) -> Standin:
        """Who answers in an upstream's place."""
        assert isinstance(self.runtime.relay, Standin)
        return self.runtime.relay

    def request(self, tenant: str, body: dict[str, Any], headers: Headers | None = None) -> Request:
        """A canary as it would come over the wire."""
        key = (b"authorization", b"Bearer " + self._keys[tenant].encode())
        return Request("POST", PATH, b"", [key, JSON, *(headers or [])], orjson.dumps(body))

    def plan(self, tenant: str, body: dict[str, Any]) -> Plan:
        """What the gateway makes of a canary."""
        request = self.request(tenant, body)
        return self.runtime.planner.plan(request, DIALECTS[PATH], self.runtime.tenants.identify(request), body)

    async def ask(self, tenant: str, body: dict[str, Any], headers: Headers | None = None) -> Told:
        """Sends a canary through the pipeline."""
        response = await self._pipeline.answer(self.request(tenant, body, headers))
        if not isinstance(response.body, bytes):
            response.body.close()
            return Told(response.status, "", "", {})
        status = next((value for name, value in response.headers if name == b"cache-status"), b"")
        try:
            answer = orjson.loads(response.body)
            if response.status != 200:
                return Told(response.status, status.decode("latin-1"), str(answer["error"]["message"]), {})
            said = str(answer["choices"][0]["message"].get("content"))
            usage = answer.get("usage")
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
            said, usage = "", None
        return Told(response.status, status.decode("latin-1"), said, usage if isinstance(usage, dict) else {})


def _tenant(named: tuple[str, str]) -> Tenant:
    """A tenant with one key, under a name that a configuration would not be allowed."""
    name, key = named
    digest = hashlib.sha256(key.encode()).hexdigest()
    return Tenant.model_construct(name=name, keys=(TenantKey(key=Secret(f"sha256:{digest}")),))
