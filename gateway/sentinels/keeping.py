"""The layers that keep answers: what goes into memory, to disk or into Redis must come back, to whom it belongs and to
nobody else.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

from cache.stores.breaker import GuardedStore
from gateway.runtime import Runtime
from gateway.sentinels.aside import ONE, OTHER, Aside, Told
from gateway.sentinels.lights import Light, green, grey, red
from gateway.shortcut import Lookup

_NOT_STORED = re.compile(r'detail="not stored: (.*)"')
_SETTINGS = {"too large to keep": "cache.max_entry", "finish": "cache.store_finish"}


class Keeping:
    """The canaries of one worker. Each is asked twice, then by another tenant, then for another model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept = (b"", 0.0)  # by the round before, in the store: its key, and until when
        self._litter: list[bytes] = []  # keys in the store that the next round deletes
        self._leaks: dict[str, list[str]] = {}

    async def look(self, store: GuardedStore | None) -> list[Light]:
        """One round. ``store``: the shared store with counters of its own."""
        self._leaks = {}
        lights = [await self._memory(), await self._store(store)]
        for name, what in (("other tenant", "tenant"), ("other model", "model")):
            leaks = [tier for tier, found in self._leaks.items() if name in found]
            if leaks:
                cause = (
                    f"{' and '.join(leaks)} gave an answer to a request of another {what}: stop serving from the cache"
                )
                lights.append(red(name, cause, "cache"))
            elif self._leaks:
                lights.append(green(name))
            else:
                lights.append(grey(name, "no layer kept an answer that could have been given"))
        return lights

    async def _memory(self) -> Light:
        name = "memory"
        if self._runtime.memory is None:
            return grey(name, "off", "cache.memory")
        aside, body = Aside(self._runtime, memory=True), question()
        try:
            first = await aside.ask(ONE, body)
            if (fault := _not_kept(aside, name, body, first)) is not None:
                return fault
            again = await aside.ask(ONE, body)
            if not again.hit or again.said != first.said:
                return red(
                    name, "what was kept is gone at once: too little memory for one answer", "cache.memory.max_bytes"
                )
            await self._ask_others(aside, "memory", body, first)
            return green(name)
        finally:
            for key in _keys(aside, body):
                self._runtime.memory.delete(key)

    async def _store(self, store: GuardedStore | None) -> Light:
        if store is None:
            return grey("disk", "neither disk nor Redis is configured", "cache.disk")
        name = store.name
        aside, body = Aside(self._runtime, store=store), question()
        plan = aside.plan(ONE, body)
        first = await aside.ask(ONE, body)
        if (fault := _not_kept(aside, name, body, first)) is not None:
            return fault
        await aside.runtime.keeper.written(plan.identity.key)
        before = await self._tidy(store)
        again = await aside.ask(ONE, body)
        if not again.hit or again.said != first.said:
            self._kept = (b"", 0.0)  # that it is gone, too, is told by this very light
            return red(name, *_trouble(store))
        gone = before is not None and await store.get(before) is None
        await self._ask_others(aside, name, body, first)
        self._litter = [key for key in (before, *_keys(aside, body)) if key not in (None, plan.identity.key)]
        self._kept = (plan.identity.key, self._runtime.clock.time() + plan.lifetime.kept)
        if gone:
            cause = "what was kept a round ago is gone: evicted for want of memory, or flushed"
            return red(name, cause, "cache.disk.max_bytes" if name == "disk" else "Redis: maxmemory, maxmemory-policy")
        return green(name)

    async def _tidy(self, store: GuardedStore) -> bytes | None:
        """Deletes what earlier rounds have left, but for the answer that the last of them has kept; returns its key if
        it should still be there. Where a store writes behind, this waits until it has written.
        """
        await asyncio.gather(*(store.delete(key) for key in self._litter or [secrets.token_bytes(16)]))
        self._litter = []
        key, until = self._kept
        return key if until > self._runtime.clock.time() else None

    async def _ask_others(self, aside: Aside, tier: str, body: dict[str, Any], first: Told) -> None:
        """Notes who else is given the answer, by the short path or the full one."""
        found = self._leaks[tier] = []
        for name, tenant, model in (("other tenant", OTHER, ONE), ("other model", ONE, OTHER)):
            asked = {**body, "model": model}
            request = aside.request(tenant, asked)
            caught = aside.shortcut.understand(request)
            short = aside.shortcut.answer(caught, request.body) if caught is not None else None
            if caught is not None and isinstance(short, Lookup):
                await asyncio.wait([short.call])
                short = aside.shortcut.conclude(caught, short)
            if short is not None or (await aside.ask(tenant, asked)).said == first.said:
                found.append(name)


def _keys(aside: Aside, body: dict[str, Any]) -> list[bytes]:
    """Of a canary, and of those that look for its answer under another tenant and another model."""
    asked = ((ONE, body), (OTHER, body), (ONE, {**body, "model": OTHER}))
    return [aside.plan(tenant, each).identity.key for tenant, each in asked]


def question() -> dict[str, Any]:
    """A question that nobody has asked before, and whose answer may be kept."""
    text = f"Sentinel {secrets.token_hex(16)}"
    return {"model": ONE, "temperature": 0, "messages": [{"role": "user", "content": text}]}


def _not_kept(aside: Aside, name: str, body: dict[str, Any], first: Told) -> Light | None:
    """What is wrong, if a first answer is not given or not kept."""
    if first.status != 200:
        return red(name, f"the canary was refused with status {first.status}")
    if not aside.plan(ONE, body).may_keep:
        return grey(name, "nothing is kept unless a caller asks for it", "cache.ttl, cache.rules")
    if "; stored" in first.cache_status:
        return None
    reason = found[1] if (found := _NOT_STORED.search(first.cache_status)) else "unknown"
    setting = next((setting for begin, setting in _SETTINGS.items() if reason.startswith(begin)), "cache")
    return red(name, f"answers are not stored: {reason}", setting)


def _trouble(store: GuardedStore) -> tuple[str, str]:
    """The likely cause and the setting for a store that did not give back what it was given."""
    where = "cache.redis.url" if store.name == "redis" else "cache.disk.path"
    for call in ("set", "delete", "get"):
        for result in store.counters[call]:
            if result == "timeout":
                return f"it did not answer in time ({call})", where.replace("url", "timeout")
            if result == "skipped":
                return "it failed so often that it is left alone for a while", where
            if result == "error:full":
                return "it is full", "cache.disk.max_bytes" if store.name == "disk" else "Redis: maxmemory-policy"
            if result == "error:readonly":
                return "it cannot be written: read-only", where
            if result.startswith("error:"):
                return f"it fails ({call}: {result.removeprefix('error:')})", where
    return "it took the answer and does not have it: evicted at once, or another store than it was written to", where
