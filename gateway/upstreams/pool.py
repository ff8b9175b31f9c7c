"""The upstreams of this gateway: which of them serve a model, how loaded and how healthy each is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

import orjson

from gateway.clock import Clock
from gateway.config import Config, SecretError, Upstream
from gateway.http import Headers, Request
from gateway.upstreams.client import Origin, Timeouts, UpstreamClient, UpstreamError, UpstreamResponse
from gateway.upstreams.connection import Answered, Connection
from gateway.upstreams.headers import credentials
from policies.health import Health
from policies.routing import Engine

log = logging.getLogger(__name__)

LIST_FOR = 60.0
"""Seconds that an upstream's own list of models is believed."""
ASK_AGAIN_AFTER = 5.0
"""Seconds after which the list is asked for again because of a model that is not on it."""
_MAX_LIST = 4 * 1024 * 1024


class Member:
    """One upstream: its address, its load, its health, and the models it serves.

    ``in_flight``: requests from the decision to the end of the answer. ``elsewhere``: those it reports beyond these.
    ``kv_use``: the share of its KV memory that it reports as held. ``known_models``: those it is known to serve; None
    when it could not be asked, which may mean any.
    """

    def __init__(self, config: Upstream, client: UpstreamClient, *, open_gateway: bool) -> None:
        url = urlsplit(config.url)
        host, secure = url.hostname or "", url.scheme == "https"
        self.config = config
        self.name = config.name
        self.slot, self.bit = -1, 0  # in the prefix index; the router gives it
        self.in_flight = 0
        self.elsewhere = 0
        self.kv_use = 0.0
        self.engine = Engine(config.name, config.weight)
        self.health = Health()
        self.origin = Origin(url.scheme, host, url.port or (443 if secure else 80))
        self._base = url.path.rstrip("/").removesuffix("/v1").encode()
        self._client = client
        self.open_gateway = open_gateway
        self._timeouts = Timeouts(**config.timeouts.model_dump())
        self.known_models = frozenset(config.models) if config.models is not None else None
        self._listed_at = -1e9
        self._asking = asyncio.Lock()

    def proof(self, request: Request) -> Headers:
        """The credentials for a request to it; raises `UpstreamError` when its key cannot be read."""
        try:
            key = self.config.api_key.resolve() if self.config.api_key is not None else None
        except SecretError as error:
            raise UpstreamError("connect", f"upstreams.{self.name}.api_key: {error}", sent=False) from None
        return credentials(self.config.api, key, request, open_gateway=self.open_gateway)

    async def send(
        self, method: str, path: str, query: bytes, headers: Headers, body: bytes, *, once: bool = False
    ) -> UpstreamResponse:
        """Sends a request to ``path`` (``/v1/…``) under this upstream's base address, surely not twice if ``once``."""
        target = self._base + path.encode() + (b"?" + query if query else b"")
        return await self._client.send(self.origin, method, target, headers, body, self._timeouts, once=once)

    def begin(self, path: str, query: bytes, headers: Headers, body: bytes, answered: Answered) -> Connection | None:
        """Sends a ``POST`` as `send` does, over a kept connection; None if there is none (`UpstreamClient.begin`)."""
        target = self._base + path.encode() + (b"?" + query if query else b"")
        return self._client.begin(self.origin, "POST", target, headers, body, self._timeouts, answered)

    def reports(self, requests: int) -> None:
        """It says how many requests it has, those of others included."""
        others = max(0, requests - self.in_flight)
        self.engine.running += others - self.elsewhere
        self.elsewhere = others

    def is_stale(self, now: float, max_age: float) -> bool:
        """Whether its own list of models is older than ``max_age`` seconds."""
        return self.config.models is None and now - self._listed_at >= max_age

    def doubt_models(self) -> bool:
        """It does not know a model that it listed: it will be asked for its list again before the next request. False
        where the list is the operator's.
        """
        self._listed_at = -1e9
        return self.config.models is None

    async def learn_models(self, now: float, max_age: float, asker: Request) -> None:
        """Asks ``/v1/models`` if the list is stale; a failure leaves what was known."""
        async with self._asking:
            if not self.is_stale(now, max_age):
                return
            try:
                headers = [(b"accept", b"application/json"), *self.proof(asker)]
                response = await self.send("GET", "/v1/models", b"", headers, b"")
                body = orjson.loads(await response.read(_MAX_LIST))
                models = frozenset(str(model["id"]) for model in body["data"]) if response.status == 200 else None
                self.known_models, self._listed_at = models, now
            except (UpstreamError, orjson.JSONDecodeError, KeyError, TypeError) as error:
                log.warning("upstream %s did not tell its models: %s", self.name, error or type(error).__name__)


def for_whole(members: Sequence[Member]) -> Sequence[Member]:
    """Those that take whole requests: prefill upstreams only where there is nobody else."""
    return [member for member in members if member.config.role != "prefill"] or members


class Pool:
    """All upstreams. Models are those configured, or those each upstream lists itself."""

    def __init__(self, config: Config, client: UpstreamClient, clock: Clock) -> None:
        self.members: list[Member] = []
        self._client = client
        self._clock = clock
        self.apply(config, config.upstreams)

    def apply(self, config: Config, upstreams: Sequence[Upstream]) -> None:
        """Takes upstreams into use. One that is unchanged stays as it is, with its load and all that is known of it;
        one that is gone finishes its answers.
        """
        old = [member for member in self.members if member.open_gateway == config.open]
        self.members = [
            next((member for member in old if member.config == one), None)
            or Member(one, self._client, open_gateway=config.open)
            for one in upstreams
        ]

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        """Host and port of each upstream, by name."""
        return {member.name: (member.origin.host, member.origin.port) for member in self.members}

    async def serving(self, model: str, asker: Request) -> list[Member]:
        """The upstreams that serve ``model``, or may, since they could not be asked. Empty: nobody does."""
        await self._learn(LIST_FOR, asker)
        if not any(model in (member.known_models or ()) for member in self.members):
            await self._learn(ASK_AGAIN_AFTER, asker)
        return [member for member in self.members if member.known_models is None or model in member.known_models]

    def serving_now(self, model: str) -> list[Member] | None:
        """The same, where nobody has to be asked first; else None."""
        now, found, known = self._clock.monotonic(), [], False
        for member in self.members:
            if member.is_stale(now, LIST_FOR):
                return None
            models = member.known_models
            if models is None or model in models:
                found.append(member)
                known = known or models is not None
        return found if known else None

    async def models(self, asker: Request) -> dict[str, str]:
        """Every model known to be served, with the name of an upstream that serves it."""
        await self._learn(LIST_FOR, asker)
        return {model: member.name for member in reversed(self.members) for model in sorted(member.known_models or ())}

    async def _learn(self, max_age: float, asker: Request) -> None:
        now = self._clock.monotonic()
        stale = [member for member in self.members if member.is_stale(now, max_age)]
        if stale:
            await asyncio.gather(*(member.learn_models(now, max_age, asker) for member in stale))
