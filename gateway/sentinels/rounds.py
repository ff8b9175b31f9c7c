"""The sentinels' rounds. Each worker looks at its own layers; of several workers one looks at the upstreams, too."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable

from cache.stores.breaker import GuardedStore
from gateway.judging import agreement
from gateway.runtime import Runtime
from gateway.sentinels.agreeing import purges, salt
from gateway.sentinels.computing import Computing, is_watched
from gateway.sentinels.joining import across, coalescing
from gateway.sentinels.keeping import Keeping
from gateway.sentinels.lights import Light, grey, red

log = logging.getLogger(__name__)

FIRST = 5.0
"""Seconds after the start until the first round."""
TICK = 1.0
"""Seconds between two looks at the clock."""


class Sentinels:
    """Makes rounds and shows on ``runtime.board`` what they find."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._keeping = Keeping(runtime)
        self._computing: dict[str, Computing] = {}
        self._seat: socket.socket | None = None

    async def run(self) -> None:
        """Round after round, until cancelled."""
        clock = self._runtime.clock
        due = clock.monotonic() + FIRST
        try:
            while True:
                settings = self._runtime.config.sentinels
                self._runtime.board.be_due_every(settings.every if settings is not None else None)
                if settings is not None and clock.monotonic() >= due:
                    due = clock.monotonic() + settings.every
                    await self.round()
                await asyncio.sleep(TICK)
        finally:
            if self._seat is not None:
                self._seat.close()

    async def round(self) -> None:
        """One round, however it goes."""
        runtime, spent = self._runtime, Counter[str]()
        settings = runtime.config.sentinels
        if settings is None:
            return
        shared = runtime.shared
        store = GuardedStore(shared.store, shared.breaker) if shared is not None else None
        lights = await _lit(self._keeping.look(store), "memory")
        lights += await _lit(coalescing(runtime), "coalescing")
        if store is not None and any(light.name == store.name and light.state == "red" for light in lights):
            lights.append(grey("shared coalescing", f"needs {store.name}, which is in trouble"))
        else:
            lights += await _lit(across(runtime, store), "shared coalescing")
        lights += await _lit(purges(runtime, store), "purges")
        lights += await _lit(salt(runtime, store, settings.every), "salt")
        lights += await _lit(agreement(runtime), "agreement")
        if self._leads():
            watched = [member for member in runtime.pool.members if is_watched(member.config, runtime.config)]
            names = {member.name for member in watched}
            self._computing = {name: self._computing.get(name) or Computing(name) for name in names}
            looks = (_lit(self._computing[m.name].look(runtime, m, spent), "prefix", m.name) for m in watched)
            lights += [light for found in await asyncio.gather(*looks) for light in found]
        for light in runtime.board.show(lights, spent, runtime.clock.time()):
            where = " ".join(filter(None, light.place))
            if light.state == "red":
                log.warning("sentinel: %s: %s; look at: %s", where, light.cause, light.setting or "the log")
            elif light.state == "green":
                log.info("sentinel: %s is well", where)

    def _leads(self) -> bool:
        """Whether this worker looks at the upstreams: whoever holds an address that the kernel frees when it dies."""
        listen = self._runtime.config.listen
        if listen.workers == 1 or self._seat is not None:
            return True
        seat = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            seat.bind(f"\0warmgate-sentinels-{os.getppid()}-{listen.port}")
        except OSError as error:
            seat.close()
            return error.errno != errno.EADDRINUSE  # no such addresses here: better twice than never
        self._seat = seat
        return True


async def _lit(look: Awaitable[Light | list[Light]], name: str, upstream: str = "") -> list[Light]:
    """What was found; a look that fails is itself a red light."""
    try:
        found = await look
    except Exception as error:
        log.exception("a sentinel failed")
        return [red(name, f"the sentinel failed: {type(error).__name__}", upstream=upstream)]
    return found if isinstance(found, list) else [found]
