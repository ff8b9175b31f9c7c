"""Looks at each upstream from time to time: whether it answers, and how loaded it says it is.

Health is asked at `/health`, and where there is no such page at `/v1/models`. Load is read from `/metrics` under
vLLM's names. An upstream that fails is ejected and comes back by degrees (`policies.health`).
"""

from __future__ import annotations

import asyncio
import logging
import re

from gateway.clock import Clock
from gateway.http import Request
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.pool import Member, Pool
from gateway.upstreams.router import Router

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that an answer may take."""
NO_METRICS_FOR = 60.0
"""Seconds for which an upstream without such a page is not asked for it again."""
_MAX_PAGE = 4 * 1024 * 1024
_LINE = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|vllm:gpu_cache_usage_perc"
    rb"|process_start_time_seconds)(?:\{[^\n]*\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)
_NOT_THERE = (404, 405, 501)


class Watch:
    """The watch over a pool's members; alone, a member is left in peace, since there is nothing to choose."""

    def __init__(self, pool: Pool, router: Router, clock: Clock) -> None:
        self._pool, self._router, self._clock = pool, router, clock
        self.every = 5.0
        self._no_metrics: dict[str, float] = {}
        self._started: dict[str, float] = {}  # when each upstream's process began, as it says

    async def run(self) -> None:
        """Looks again and again."""
        while True:
            if self.every > 0 and len(self._pool.members) > 1:
                await self.look()
            await asyncio.sleep(self.every or 1.0)

    async def look(self) -> None:
        """One look at every member."""
        await asyncio.gather(*(self._at(member) for member in list(self._pool.members)))

    async def _at(self, member: Member) -> None:
        now = self._clock.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                alive = await self._is_alive(member)
                if alive and now >= self._no_metrics.get(member.name, 0.0):
                    await self._read_load(member, now)
        except (UpstreamError, TimeoutError):
            alive = False
        was_ejected = member.health.ejected
        if alive:
            member.health.succeeded(now)
            if was_ejected and not member.health.ejected:
                log.info("upstream %s is back", member.name)
        else:
            member.reports(0)
            if member.health.failed(now):
                log.warning("upstream %s does not answer; it is left alone for a while", member.name)
                self._router.forget(member)

    async def _is_alive(self, member: Member) -> bool:
        status = (await _get(member, "/health"))[0]
        if status in _NOT_THERE or status in (401, 403):
            status = (await _get(member, "/v1/models"))[0]
        return status < 500

    async def _read_load(self, member: Member, now: float) -> None:
        status, page = await _get(member, "/metrics")
        found: dict[bytes, float] = {}
        for name, value in _LINE.findall(page if status == 200 else b""):
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
        running, waiting = found.get(b"vllm:num_requests_running"), found.get(b"vllm:num_requests_waiting", 0.0)
        if running is None or not 0 <= running + waiting < 1e9:
            self._no_metrics[member.name] = now + NO_METRICS_FOR
            member.reports(0)
            return
        member.reports(int(running + waiting))
        use = found.get(b"vllm:kv_cache_usage_perc", found.get(b"vllm:gpu_cache_usage_perc", 0.0))
        member.kv_use = min(1.0, max(0.0, use))
        started = found.get(b"process_start_time_seconds")
        if started is not None and self._started.setdefault(member.name, started) != started:
            self._started[member.name] = started
            log.info("upstream %s was restarted", member.name)
            self._router.forget(member)


async def _get(member: Member, path: str) -> tuple[int, bytes]:
    nobody = Request("GET", path, b"", [], b"")
    response: UpstreamResponse = await member.send("GET", path, b"", member.proof(nobody), b"")
    try:
        return response.status, await response.read(_MAX_PAGE)
    finally:
        response.close()
