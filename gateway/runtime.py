"""Everything one gateway process holds, built from its configuration; a reload replaces what depends on it, and keeps
the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.response.entry import Entry
from cache.response.faq import Faq, FaqError, load_faq
from cache.response.flights import Flights
from cache.response.keep import Keeper
from cache.response.recall import Recall
from cache.response.shared_flights import SharedFlights
from cache.response.tags import Generations, arming
from cache.stores.base import SharedStore
from cache.stores.breaker import Breaker, GuardedStore
from cache.stores.disk import DiskStore
from cache.stores.memory import MemoryStore
from cache.stores.redis import RedisStore
from gateway.attempts import Attempts
from gateway.clock import Clock, SystemClock
from gateway.config import Config
from gateway.holdout import HoldOut
from gateway.ledger import Call, Ledger
from gateway.ledger.settings import load_prices, service_levels
from gateway.limits import SharedQuotas, Usages
from gateway.plan import Plan, Planner
from gateway.power import Power
from gateway.prefix_health import PrefixHealth
from gateway.reading import CallFlight
from gateway.relay import Relay
from gateway.sentinels import Board
from gateway.split import Splits
from gateway.telemetry.access_log import AccessLog
from gateway.tenants import Tenants
from gateway.trust import Trust
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.discovery import Discovery
from gateway.upstreams.pool import Pool
from gateway.upstreams.router import Router
from gateway.upstreams.watch import Watch
from policies.misses import Misses
from policies.pricing import PriceError, PriceTable
from policies.retry import Retries

if TYPE_CHECKING:
    from gateway.telemetry.otlp import Otlp

log = logging.getLogger(__name__)

FAQ_CHECK_EVERY = 1.0
"""Seconds between looks at ``faq.yaml``."""
EXPORT_EVERY = 1.0
"""Seconds between two exports of traces."""
DISK_DEADLINE = 0.25
"""Seconds a lookup on disk may take."""


class Runtime:
    """The parts of a gateway process. `open` before use, `close` at the end."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.client = UpstreamClient()
        self.router = Router(self.clock)
        self.splits = Splits(self.router, self.clock)
        self.pool = Pool(config, self.client, self.clock)
        self.watch = Watch(self.pool, self.router, self.clock)
        self.discovery = Discovery(self._meet_upstreams)
        self.ledger = Ledger(config.ledger, self.clock)
        self.access_log = AccessLog(self.clock)
        self.power = Power(self.clock)
        self.otlp: Otlp | None = None
        self.board = Board()
        self.generations = Generations()
        self.trust = Trust(self.generations)
        self.flights: Flights[CallFlight] = Flights(self.generations)
        self.not_stored: Counter[str] = Counter()
        self.closing = asyncio.Event()  # set when the server begins to drain: streams without an end must end
        self.secret = _secret(config)
        memory = config.cache.memory
        self.memory: MemoryStore[Entry] | None = (
            MemoryStore(memory.max_bytes, memory.eviction, clock=self.clock.time) if memory is not None else None
        )
        self.shared = _shared_store(config)
        self.shared_flights: SharedFlights | None = None
        quotas: SharedQuotas | None = None
        if self.shared is not None and isinstance(self.shared.store, RedisStore):
            self.shared_flights = SharedFlights(self.shared, self.shared.store.leases)
            quotas = SharedQuotas(self.shared, self.shared.store.quotas)
        self.recall = Recall(self.memory, self.shared, self.generations)
        self.misses, self.misses_since = Misses(), self.clock.time()
        self.keeper = Keeper(self.memory, self.shared, self.misses)
        self.usages = Usages(self.clock, quotas)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._faq_seen: tuple[Path | None, float] = (None, 0.0)
        self.faq = Faq()
        self.prefix_health = PrefixHealth(self.clock.monotonic)
        self.on_change: list[Callable[[], None]] = []
        self.apply(config)

    def apply(self, config: Config) -> None:
        """Takes a configuration into use; requests under way go on by the one they began with."""
        self.config = config
        self.prices = self._prices()
        self.tenants = Tenants(config, self.usages)
        self.discovery.apply(config)
        self._meet_upstreams()
        self.splits.settings = config.disaggregation
        self.watch.every = config.routing.probe
        self.planner = Planner(config, self.secret)
        self.keeper.min_uses = config.cache.min_uses
        retries = Retries(config.retry.rounds, config.retry.base, config.retry.longest)
        self.relay = Relay(
            self.planner,
            self.keeper,
            self.generations,
            self.clock,
            config.cache,
            self.not_stored,
            self.spent,
            partial(
                Attempts,
                planner=self.planner,
                pool=self.pool,
                router=self.router,
                splits=self.splits,
                retries=retries,
            ),
        )
        self.ledger.apply(self.prices, service_levels(config))
        self.power.apply(config.engine.device if config.engine is not None else None)
        self.access_log.target = config.telemetry.access_log
        self.ledger.follow(self.access_log if config.telemetry.access_log is not None else None)
        self._export_to(config.telemetry.otlp)
        self.holdout = HoldOut(config.cache.holdout)
        self.trust.most, self.trust.disarms = config.cache.max_disagreement, config.cache.disarm
        self.stores_prompts = config.ledger is not None and config.ledger.store_prompts
        self.read_faq()
        self._changed()

    def _meet_upstreams(self) -> None:
        """Some may have come, some may be gone."""
        self.pool.apply(self.config, self.discovery.upstreams())
        self.router.apply(self.config.routing, self.pool.members)

    async def open(self) -> None:
        """Opens the stores, learns of past purges, and starts watching for new ones."""
        if self.shared is not None:
            await self.shared.open()
            for scope, generation in (await self.shared.generations() or {}).items():
                self.generations.learn(scope, generation)
            self.background(self.shared.watch(self.generations.learn))
        self.router.exact.open()
        await self.discovery.open()
        self.background(self.watch.run())
        self.background(self._watch_faq())
        self.background(self.ledger.run())
        self.background(self.access_log.run())
        self.background(self.power.run())
        self.background(self._export())
        self.background(self.usages.keep_up(self.ledger.spent_since))

    async def close(self) -> None:
        """Ends what runs behind requests, writes what is pending, and closes stores and connections."""
        for task in self._tasks:
            task.cancel()
        await self.discovery.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.keeper.drain()
        if self.shared is not None:
            await self.shared.close()
        await self.router.exact.close()
        await self.client.close()
        await self.ledger.close()
        await self.access_log.flush()
        if self.otlp is not None:
            await self.otlp.close()

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something that no request waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def curated(self, plan: Plan) -> bytes | None:
        """The curated answer to a request, in its dialect's plain form."""
        if not self.faq.entries:
            return None
        turns = plan.dialect.ask(plan.body).turns
        if len(turns) != 1 or turns[0].role != "user" or turns[0].text is None:
            return None
        found = self.faq.find(turns[0].text, (plan.model.name, plan.model.target), self.clock.time())
        return plan.dialect.curated(plan.body, plan.model.target, found.answer) if found is not None else None

    async def purge(self, scope: str) -> bool:
        """Raises the generation of a scope; False when other processes may not hear of it."""
        generation = await self.shared.bump(scope) if self.shared is not None else None
        if generation is None:
            self.generations.purge(scope, self.clock.time())
            return self.shared is None and self.config.listen.workers == 1
        self.generations.learn(scope, generation)
        return True

    async def arm(self, place: str, *, armed: bool) -> bool:
        """What is kept of a place (`gateway.trust`) may answer from now on, or may not; see `purge`."""
        return await self.purge(arming(place, armed=armed))

    def _export_to(self, url: str | None) -> None:
        """Another collector, or none, gets what is counted from now on."""
        before = self.otlp
        if url == (before.url if before is not None else None):
            return
        if url is None:
            self.otlp = None
        else:
            from gateway.telemetry.otlp import Otlp  # the extra "telemetry"

            self.otlp = Otlp(url, self.clock, self.ledger.worker, lambda: self.pool.places)
        self.ledger.report_to(self.otlp)
        if before is not None:
            self.background(before.close())

    async def _export(self) -> None:
        while True:
            await asyncio.sleep(EXPORT_EVERY)
            if self.otlp is not None:
                await asyncio.shield(self.otlp.flush())  # what is under way goes on to its end

    def spent(self, call: Call) -> None:
        """An upstream call has ended."""
        cost = self.ledger.spent(call)
        if cost:
            self.usages.of(call.tenant).spend(cost)

    def _prices(self) -> PriceTable:
        """The price table; a faulty file leaves all costs unknown."""
        try:
            return load_prices(self.config.prices)
        except PriceError as error:
            for problem in error.problems:
                log.error("prices: %s", problem)
            return PriceTable()

    def read_faq(self) -> None:
        """Reads ``faq.yaml`` if it has changed; faults are reported, and what was read before stays."""
        path = self.config.faq.path
        stamp = _modified(path)
        if (path, stamp) == self._faq_seen:
            return
        self._faq_seen = (path, stamp)
        if path is None:
            self.faq = Faq()
            return
        try:
            self.faq = load_faq(path)
        except FaqError as error:
            log.error("faq: %s", error)
        for collision in self.faq.collisions():
            log.warning("faq: %s", collision)
        self._changed()

    def _changed(self) -> None:
        """Tells those who remember what was decided under the old configuration or the old curated answers."""
        for tell in self.on_change:
            tell()

    async def _watch_faq(self) -> None:
        while True:
            await asyncio.sleep(FAQ_CHECK_EVERY)
            self.read_faq()


def _shared_store(config: Config) -> GuardedStore | None:
    cache = config.cache
    store: SharedStore
    if cache.redis is not None:
        store = RedisStore(cache.redis.address(), cache.redis.prefix, cache.redis.timeout)
        return GuardedStore(store, Breaker(deadline=cache.redis.timeout))
    if cache.disk is not None:
        store = DiskStore(cache.disk.path, cache.disk.max_bytes)
        return GuardedStore(store, Breaker(deadline=DISK_DEADLINE))
    return None


def _secret(config: Config) -> bytes:
    """The deployment's secret: configured, or made once and kept beside the disk cache, or for this process only."""
    if config.secret is not None:
        return config.secret.resolve().encode()
    if config.cache.disk is None:
        return secrets.token_bytes(32)
    path = config.cache.disk.path / "secret"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(32).encode())
    except OSError as error:
        if not path.is_file():
            log.warning("the secret for tenant salts cannot be kept in %s: %s", path, error.strerror)
            return secrets.token_bytes(32)
    return path.read_bytes()


def _modified(path: Path | None) -> float:
    try:
        return path.stat().st_mtime if path is not None else 0.0
    except OSError:
        return -1.0
