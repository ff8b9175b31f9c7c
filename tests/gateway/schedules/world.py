"""One random schedule: callers, purges and time against real gateways in front of a simulated upstream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import count
from random import Random
from typing import Any
from unittest import mock

import orjson

from cache.stores.breaker import Breaker, GuardedStore
from gateway.config import Config
from gateway.http import Request, Stream
from gateway.pipeline import Pipeline
from gateway.runtime import Runtime
from gateway.shortcut import Shortcut
from tests.field.reading import json_events, text_of, text_of_stream
from tests.gateway.schedules.model import Asked, Model, Moment, Purge, Times, Words
from tests.gateway.schedules.shared_store import SimulatedRedis, SimulatedStore
from tests.gateway.schedules.simulated_loop import SimulatedClock, SimulatedLoop
from tests.gateway.schedules.upstream import SimulatedUpstream

PATH = "/v1/chat/completions"
LASTS = 20.0
"""Seconds in which things happen."""
REST = 20.0
"""Seconds in which then everything comes to its end."""
QUESTIONS = ("a", "b")
LIFETIMES = [Times(ttl, revalidate, error) for ttl in (3.0, 10.0) for revalidate in (0.0, 8.0) for error in (0.0, 8.0)]


def configured(times: Times) -> Config:
    cache = {
        "disk": "off",
        "holdout": 0,
        "ttl": times.ttl,
        "stale_while_revalidate": times.while_revalidate,
        "stale_if_error": times.if_error,
    }
    upstream = {"name": "u", "url": "http://127.0.0.1:9", "models": ["m1"]}
    return Config.model_validate({"upstreams": [upstream], "ledger": "off", "cache": cache})


CONFIGS = [configured(times) for times in LIFETIMES]


class Gateway:
    """A gateway process, on its own or with a store that it shares with others."""

    def __init__(
        self, config: Config, upstream: SimulatedUpstream, loop: SimulatedLoop, store: SimulatedStore | None
    ) -> None:
        guarded = GuardedStore(store, Breaker(clock=loop.time)) if store is not None else None
        with mock.patch("gateway.runtime._shared_store", lambda _: guarded):
            self.runtime = Runtime(config, SimulatedClock(loop))
        self.runtime.pool.members[0].send = upstream.send  # type: ignore[method-assign]
        self.pipeline = Pipeline(self.runtime, Shortcut(self.runtime))
        self.store = store
        self.callers: list[asyncio.Task[None]] = []
        learn = self.runtime.generations.learn
        self._watching = [loop.create_task(guarded.watch(learn))] if guarded is not None else []

    @property
    def dead(self) -> bool:
        return self.store is not None and self.store.dead

    def die(self) -> None:
        """At once: it says nothing to anybody any more."""
        assert self.store is not None
        self.store.dead = True
        flights = [flight._task for flight in self.runtime.flights.values() if flight._task is not None]
        for task in [*self.callers, *flights, *self.runtime._tasks, *self._watching]:
            task.cancel()

    def close(self) -> None:
        for task in self._watching:
            task.cancel()


class World:
    """What happens in it comes from ``seed`` alone. Of several ``gateways``, which share a store, one may die."""

    def __init__(self, seed: int, loop: SimulatedLoop, gateways: int = 1) -> None:
        self._random = random = Random(seed)
        self._loop = loop
        self._places = count()
        which = random.randrange(len(LIFETIMES))
        self.model = Model(LIFETIMES[which])
        self.upstream = SimulatedUpstream(self.model, random, self._tick)
        stores: list[SimulatedStore | None] = [None]
        if gateways > 1:
            redis, failing = SimulatedRedis(loop.time), random.choice([0.0, 0.0, 0.03])
            stores = [SimulatedStore(redis, random, failing, self._trouble) for _ in range(gateways)]
            self.model.lag = 3.0
        self.gateways = [Gateway(CONFIGS[which], self.upstream, loop, store) for store in stores]
        for gateway in self.gateways:
            self._watch_refreshes(gateway.runtime)
        self.faults: list[str] = []

    async def run(self) -> Counter[str]:
        """Lives through it, and tells how often each kind of thing happened; faults are in ``faults``."""
        random = self._random
        events = [self._at(self._some_time(), self._purge) for _ in range(random.choice([0, 1, 1, 2, 4]))]
        for number in range(random.randint(6, 16)):
            gateway = random.randrange(len(self.gateways))
            call = self._at(self._some_time(), self._caller(number, gateway))
            self.gateways[gateway].callers.append(call)
            events.append(call)
        if len(self.gateways) > 1 and random.random() < 0.4:
            events.append(self._at(self._some_time(), self._death))
        await asyncio.wait(events, timeout=20 * LASTS)
        await asyncio.sleep(REST)
        self._judge(events)
        return Counter(_kind(request) for request in self.model.requests)

    # What happens

    def _caller(self, number: int, gateway: int) -> Callable[[], Coroutine[Any, Any, None]]:
        random = self._random
        asked = Asked(number, random.choice(QUESTIONS), self._words(), random.random() < 0.5, gateway)
        self.model.requests.append(asked)
        leaves_after = random.choice([0.0, 0.5, 1.0, 3.0]) if random.random() < 0.25 else None
        slow = random.choice([0.0, 0.0, 0.0, 0.5])

        async def ask() -> None:
            try:
                async with asyncio.timeout(leaves_after):
                    await self._ask(asked, slow)
            except TimeoutError:
                asked.left = True

        return ask

    def _words(self) -> Words:
        random = self._random
        word, seconds = random.random(), random.choice([0.0, 1.0, 4.0, 12.0])
        if word < 0.5:
            return Words()
        if word < 0.58:
            return Words(no_cache=True)
        if word < 0.62:
            return Words(no_store=True)
        if word < 0.75:
            return Words(max_age=seconds)
        if word < 0.82:
            return Words(max_stale=seconds)
        if word < 0.9:
            return Words(only_if_cached=True, max_stale=random.choice([None, seconds]))
        return Words(stale_if_error=seconds, max_age=random.choice([None, 2.0]))

    async def _ask(self, asked: Asked, slow: float) -> None:
        body: dict[str, Any] = {
            "model": "m1",
            "temperature": 0,
            "messages": [{"role": "user", "content": asked.question}],
        }
        if asked.streams:
            body["stream"] = True
        headers = [
            (b"x-request-id", b"%d" % asked.number),
            (b"x-warmgate-tags", asked.question.encode()),
            (b"cache-control", asked.words.header.encode()),
        ]
        request = Request("POST", PATH, b"", headers, orjson.dumps(body))
        asked.asked = self._tick()
        response = await self.gateways[asked.gateway].pipeline.answer(request)
        asked.status = response.status
        asked.cache_status = dict(response.headers).get(b"cache-status", b"").decode()
        told = response.body if isinstance(response.body, bytes) else await _taken(response.body, slow)
        asked.done = self._tick()
        _read(asked, told, streamed=asked.streams and response.status == 200)

    async def _purge(self) -> None:
        random = self._random
        question = random.choice([None, *QUESTIONS])
        soft = random.random() < 0.4
        scope = random.choice(["all", "model:m1", "tenant:default"]) if question is None else f"tag:{question}"
        gateway = random.choice([n for n, gateway in enumerate(self.gateways) if not gateway.dead])
        everywhere = await self.gateways[gateway].runtime.purge("~" + scope if soft else scope)
        self.model.purges.append(Purge(question, soft, self._tick(), gateway, everywhere))

    async def _death(self) -> None:
        self._trouble()
        self.gateways[-1].die()

    def _trouble(self) -> None:
        self.model.trouble.append(self._loop.time())

    def _some_time(self) -> float:
        """Often the same as something else's."""
        return self._random.randrange(int(2 * LASTS)) / 2

    def _at(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        async def later() -> None:
            await asyncio.sleep(seconds)
            for _ in range(turns):
                await asyncio.sleep(0)
            await work()

        turns = self._random.randrange(4)
        return self._loop.create_task(later())

    def _tick(self) -> Moment:
        return Moment(self._loop.time(), next(self._places))

    def _watch_refreshes(self, runtime: Runtime) -> None:
        """Holds that an entry is renewed by one call at a time, unless a purge came between."""
        fly, under_way = runtime.relay.fly, dict[str, float]()

        async def watched(*arguments: Any, **more: Any) -> Any:
            plan, _, request_id, _, _, cause = arguments
            if cause != "stale":
                return await fly(*arguments, **more)
            question, now = plan.question, self._loop.time()
            purges = [purge.done.at for purge in self.model.purges if purge.question in (None, question)]
            if question in under_way and not any(under_way[question] <= at for at in purges):
                self.faults.append(f"two refreshes of {question!r} at a time")
            under_way[question] = now
            self.upstream.refreshing.add(request_id)
            try:
                return await fly(*arguments, **more)
            finally:
                if under_way.get(question) == now:
                    del under_way[question]

        runtime.relay.fly = watched  # type: ignore[method-assign]

    # What is held against it

    def _judge(self, events: list[asyncio.Task[None]]) -> None:
        self.faults += [f"it never ends: {event}" for event in events if not event.done()]
        self.faults += [f"{event.exception()!r}" for event in events if not event.cancelled() and event.exception()]
        for request in self.model.requests:
            lost = request.left or self.gateways[request.gateway].dead
            fault = None if lost else self.model.fault(request)
            if fault is not None:
                self.faults.append(f"{fault}: {request}")
        if self.upstream.under_way:
            self.faults.append("an upstream call that nobody waits for goes on")
        for gateway in self.gateways:
            gateway.close()
            runtime = gateway.runtime
            if gateway.dead:
                continue
            if runtime.flights or any(member.in_flight for member in runtime.pool.members):
                self.faults.append("a flight that never lands")
            if runtime.usages.of("default").concurrent:
                self.faults.append("a caller who never leaves")
            if runtime._tasks or runtime.keeper._writes:
                self.faults.append("a task behind the callers that never ends")


async def _taken(body: Stream, slow: float) -> bytes:
    """All of a body that comes in pieces; who leaves closes it."""
    more, failure, taken = asyncio.Event(), None, bytearray()
    body.wake = more.set
    try:
        while not body.ended:
            more.clear()
            if data := body.take():
                taken += data
                await asyncio.sleep(slow)
            elif not body.ended:
                await more.wait()
    except Exception as error:
        failure = error
        raise
    finally:
        body.close(failure)
    return bytes(taken)


def _read(asked: Asked, told: bytes, *, streamed: bool) -> None:
    """What an answer says, whole, or the error."""
    if asked.status != 200:
        asked.error = orjson.loads(told)["error"]["message"]
    elif not streamed:
        asked.text = text_of(orjson.loads(told))
    else:
        errors = [event["error"]["message"] for event in json_events(told) if "error" in event]
        if errors and (len(errors) > 1 or b"[DONE]" in told):
            errors = []  # no honest end
        asked.error = "".join(errors)
        asked.text = text_of_stream(told) if not errors else None


def _kind(request: Asked) -> str:
    """In a word, what became of it."""
    status = request.cache_status
    if request.left:
        return "left"
    if request.text is None:
        return "refused" if request.words.only_if_cached else "failed"
    if "hit" in status:
        return "stale" if "stale" in status else "hit"
    return "joined" if "collapsed" in status else "computed"
