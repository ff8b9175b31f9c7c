"""Upstreams that come and go: by a file that is watched, by DNS, by the endpoints of a Kubernetes service.

A configured upstream with ``dns`` or ``kubernetes`` is a pattern: each address that is found becomes an upstream like
it. What cannot be asked now leaves what was known; who is gone is sent nothing more, and finishes what it has.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from gateway.config import Config, ConfigError, Upstream, load_config
from gateway.upstreams.kubernetes import SERVICE_ACCOUNT, Endpoints

log = logging.getLogger(__name__)

DNS_EVERY = 10.0
"""Seconds between two lookups."""
FILE_EVERY = 1.0
"""Seconds between two looks at the file."""
FIRST = 5.0
"""Seconds that the start waits for first answers."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, which is asked for with the port; raises OSError."""


class Discovery:
    """Keeps `upstreams` true between `open` and `close`, and calls ``changed`` when they change."""

    def __init__(
        self, changed: Callable[[], None], resolve: Resolve | None = None, account: Path = SERVICE_ACCOUNT
    ) -> None:
        """``account``: the folder with the token and the authority for Kubernetes."""
        self._changed = changed
        self._resolve = resolve or _resolve
        self._account = account
        self._config = Config()
        self._found: dict[str, tuple[Upstream, tuple[Upstream, ...]]] = {}  # by name: the pattern, and who is like it
        self._in_file: tuple[Upstream, ...] = ()
        self._file_seen: tuple[Path | None, int] = (None, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._open = False
        self._news = asyncio.Event()  # of a pattern of which nothing was known

    def apply(self, config: Config) -> None:
        """Takes a configuration into use; what is known of unchanged patterns stays."""
        self._config = config
        self._read_file()
        patterns = {one.name: one for one in self._configured() if _is_pattern(one)}
        self._found = {name: known for name, known in self._found.items() if patterns.get(name) == known[0]}
        if self._open:
            self._start()

    def upstreams(self) -> tuple[Upstream, ...]:
        """All that are known now."""
        found: list[Upstream] = []
        for one in self._configured():
            found += self._found.get(one.name, (one, ()))[1] if _is_pattern(one) else (one,)
        return tuple(found)

    async def open(self) -> None:
        """Begins to look; returns when the first answers are there, or after `FIRST` seconds."""
        self._open = True
        self._start()
        waiting = {one.name for one in self._configured() if _is_pattern(one)}
        try:
            async with asyncio.timeout(FIRST):
                while waiting - self._found.keys():
                    await self._news.wait()
                    self._news.clear()
        except TimeoutError:
            log.warning("nothing is known yet of upstreams %s", ", ".join(sorted(waiting - self._found.keys())))

    async def close(self) -> None:
        """Stops looking."""
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _configured(self) -> tuple[Upstream, ...]:
        return (*self._config.upstreams, *self._in_file)

    def _start(self) -> None:
        for task in self._tasks:
            task.cancel()
        looks: list[Coroutine[Any, Any, None]] = [self._watch_dns(one) for one in self._configured() if one.dns]
        for one in self._configured():
            if one.kubernetes is not None:
                endpoints = Endpoints(one.kubernetes, self._account)
                looks.append(endpoints.follow(lambda places, one=one: self._take(one, places)))
        if self._config.upstreams_file is not None:
            looks.append(self._watch_file())
        self._tasks = [asyncio.get_running_loop().create_task(look) for look in looks]

    def _take(self, pattern: Upstream, places: Sequence[tuple[str, int]]) -> None:
        """An answer: hosts and ports."""
        found = tuple(_placed(pattern, host, port) for host, port in sorted(set(places)))
        if self._found.get(pattern.name) != (pattern, found):
            self._found[pattern.name] = pattern, found
            log.info("upstream %s: %s", pattern.name, ", ".join(one.url for one in found) or "nobody is there")
            self._news.set()
            self._changed()

    async def _watch_dns(self, pattern: Upstream) -> None:
        url, failing = urlsplit(pattern.url), False
        host, port = url.hostname or "", url.port or 80
        while True:
            try:
                self._take(pattern, [(address, port) for address in await self._resolve(host, port)])
                failing = False
            except OSError as error:
                if not failing:
                    log.warning("upstream %s: %s was not found: %s", pattern.name, host, error)
                failing = True
            await asyncio.sleep(DNS_EVERY)

    async def _watch_file(self) -> None:
        while True:
            await asyncio.sleep(FILE_EVERY)
            if self._read_file():
                self.apply(self._config)  # it may hold patterns
                self._changed()

    def _read_file(self) -> bool:
        """Whether the file held something new; faults are reported, and what was read before stays."""
        path = self._config.upstreams_file
        if (path, _modified(path)) == self._file_seen:
            return False
        self._file_seen = path, _modified(path)
        try:
            found = load_config(path, {}, {"engine": "off"}).upstreams if path is not None else ()
        except ConfigError as error:
            for message in error.messages:
                log.error("upstreams_file: %s", message)
            return False
        if taken := {one.name for one in self._config.upstreams} & {one.name for one in found}:
            log.error("upstreams_file: the names %s are used twice", ", ".join(sorted(taken)))
            return False
        found, self._in_file = self._in_file, found
        return found != self._in_file


def _is_pattern(upstream: Upstream) -> bool:
    return upstream.dns or upstream.kubernetes is not None


def _placed(pattern: Upstream, host: str, port: int) -> Upstream:
    """The upstream at one address; ``{host}`` in its event endpoints stands for it."""
    shown = f"[{host}]" if ":" in host else host
    url = urlunsplit(urlsplit(pattern.url)._replace(netloc=f"{shown}:{port}"))
    name = f"{pattern.name}-{host.replace(':', '-')}-{port}"
    changes: dict[str, Any] = {"name": name, "url": url, "dns": False, "kubernetes": None}
    if (told := pattern.kv_events) is not None:
        ends = {part: end.replace("{host}", shown) for part in ("connect", "replay") if (end := getattr(told, part))}
        changes["kv_events"] = told.model_copy(update=ends)
    return pattern.model_copy(update=changes)


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _modified(path: Path | None) -> int:
    try:
        return path.stat().st_mtime_ns if path is not None else 0
    except OSError:
        return -1
