"""The bench of the field cases: a gateway in front of a scripted upstream, in every world it may live in.

A world is where answers are kept (memory, disk, Redis; the lower tiers with the memory tier off, so that they answer)
and whether the short path is in front. The oracle is the upstream's call count and the text of the answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.config import Config
from gateway.ledger.counters import CACHE_WRITE, CACHED, CALLS, COMPUTED, OUTPUT
from gateway.ledger.query import Scope, rows, sums
from loadtest.stub_upstream import StubUpstream
from tests.field.reading import ASKS, json_events, text_of, text_of_stream
from tests.harness import FakeClock, Running, running_gateway, upstream
from tests.services import RedisServer, redis_server
from tests.waiting import until

CHAT, B = ASKS["chat"]
WORLDS = [f"{store}-{path}" for store in ("memory", "disk", "redis") for path in ("wire", "full")]
one_world = pytest.mark.parametrize("world", ["memory-wire"], indirect=True)
"""For cases in which neither the store nor the path can matter."""
each_store = pytest.mark.parametrize("world", ["memory-wire", "disk-wire", "redis-wire"], indirect=True)
both_paths = pytest.mark.parametrize("world", ["memory-wire", "memory-full"], indirect=True)


@dataclass(frozen=True)
class Reply:
    """A response, with what the oracle says of it: ``rose`` is by how much the upstream's call count rose."""

    response: httpx.Response
    rose: int

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def cache_status(self) -> str:
        return self.response.headers.get("cache-status", "")

    @property
    def is_hit(self) -> bool:
        return self.rose == 0 and "hit" in self.cache_status

    @property
    def streamed(self) -> bool:
        return self.response.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[Any]:
        """The JSON events of a stream, without the end mark."""
        return json_events(self.response.content)

    @property
    def text(self) -> str:
        """The answer's text (of its first choice), whichever form it came in."""
        return text_of_stream(self.response.content) if self.streamed else text_of(self.response.json())


class Bench:
    """A gateway and its upstream."""

    def __init__(self, gateway: Running, upstream: StubUpstream, clock: FakeClock, config: dict[str, Any]) -> None:
        self.gateway = gateway
        self.u = upstream
        self.clock = clock
        self._config = config

    async def send(
        self, body: dict[str, Any] | bytes, path: str = CHAT, key: str | None = None, **headers: str
    ) -> Reply:
        """Sends a body (header names with underscores) and waits until what is to be kept is kept."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["authorization"] = f"Bearer {key}"
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        before = self.u.n
        response = await self.gateway.client.post(
            path, content=content, headers={"content-type": "application/json", **named}
        )
        await self.gateway.app.runtime.keeper.drain()
        return Reply(response, self.u.n - before)

    @contextlib.asynccontextmanager
    async def streaming(
        self, body: dict[str, Any], path: str = CHAT, key: str | None = None, **headers: str
    ) -> AsyncIterator[httpx.Response]:
        """A response read as it comes; leaving the block early is a caller that leaves."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["authorization"] = f"Bearer {key}"
        async with self.gateway.client.stream("POST", path, json=body, headers=named) as response:
            yield response

    @property
    def not_stored(self) -> Counter[str]:
        """How many answers were not kept, by reason."""
        return self.gateway.app.runtime.not_stored

    @property
    def stored(self) -> int:
        """How many answers were kept, in whichever tier."""
        runtime = self.gateway.app.runtime
        if runtime.memory is not None:
            return len(runtime.memory)
        assert runtime.shared is not None
        return runtime.shared.counters["set"]["ok"]

    async def outcomes(self) -> Counter[str]:
        """Requests by the ledger's word for what became of them."""
        found = await self.gateway.app.runtime.ledger.read(lambda open_: sums(open_, Scope(), ("outcome",)))
        return Counter({line.key[0]: line.counts[0] for line in found if line.counts[0]})

    async def reload(self, **changes: Any) -> None:
        """Takes these parts of the configuration into use."""
        self._config |= changes
        response = await self.gateway.client.post("/admin/reload")
        assert response.status_code == 200, response.text

    async def key_of(self, body: dict[str, Any], path: str = CHAT, tenant: str = "default") -> bytes:
        """Under which key the answer to this body is kept."""
        told = await self.gateway.client.post("/admin/explain", params={"path": path, "tenant": tenant}, json=body)
        return bytes.fromhex(told.json()["key"])

    async def spent(self) -> dict[str, int]:
        """What upstream calls used, by kind."""
        (line,) = await self.gateway.app.runtime.ledger.read(lambda open_: sums(open_, Scope()))
        kinds = {"calls": CALLS, "computed": COMPUTED, "cached": CACHED, "cache_write": CACHE_WRITE, "output": OUTPUT}
        return {kind: line.counts[column] for kind, column in kinds.items()}

    async def rows(self, count: int = 100) -> list[dict[str, Any]]:
        """The ledger's newest rows, newest first."""
        return await self.gateway.app.runtime.ledger.read(lambda open_: rows(open_, Scope(), count))

    async def at_rest(self) -> None:
        """Waits until nothing is under way: no flight, no upstream call, no admitted caller."""
        runtime = self.gateway.app.runtime
        await until(
            lambda: not runtime.flights and not any(member.in_flight for member in runtime.pool.members),
            "nothing is under way",
        )
        await runtime.keeper.drain()

    async def miss(
        self, body: dict[str, Any] | bytes, path: str = CHAT, key: str | None = None, **headers: str
    ) -> Reply:
        """Sends, and holds that it went upstream."""
        reply = await self.send(body, path, key, **headers)
        assert reply.rose == 1, f"expected a miss: {reply.cache_status} {reply.response.text[:200]}"
        assert "hit" not in reply.cache_status
        return reply

    async def hit(
        self, body: dict[str, Any] | bytes, path: str = CHAT, key: str | None = None, **headers: str
    ) -> Reply:
        """Sends, and holds that it was answered from the cache."""
        reply = await self.send(body, path, key, **headers)
        assert reply.is_hit, f"expected a hit: rose {reply.rose}, {reply.cache_status} {reply.response.text[:200]}"
        return reply


@dataclass(frozen=True)
class World:
    """Where a bench lives; `bench` makes one, several share what lies below the memory tier."""

    store: str
    short_path: bool
    cache: dict[str, Any]
    folder: Path

    @contextlib.asynccontextmanager
    async def bench(
        self, u: StubUpstream | None = None, clock: FakeClock | None = None, **config: Any
    ) -> AsyncIterator[Bench]:
        """A gateway with this configuration over the world's store; without ``u`` it gets an upstream of its own."""
        clock = clock or FakeClock()
        async with contextlib.AsyncExitStack() as stack:
            if u is None:
                u = await stack.enter_async_context(StubUpstream(models=("m1", "m2")))
            cache = {**self.cache, **config.pop("cache", {})}
            whole = {"upstreams": [upstream(u.url)], "ledger": "off", **config, "cache": {"disk": "off", **cache}}
            gateway = await stack.enter_async_context(
                running_gateway(whole, clock, lambda: Config.model_validate(whole), short_path=self.short_path)
            )
            yield Bench(gateway, u, clock, whole)


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """Each world in turn, empty."""
    store, path = request.param.split("-")
    if store == "memory":
        cache: dict[str, Any] = {}
    elif store == "disk":
        cache = {"memory": "off", "disk": {"path": str(tmp_path / "cache"), "max_bytes": "64MiB"}}
    else:
        server: RedisServer = request.getfixturevalue("redis_process")
        cache = {"memory": "off", "redis": {"url": server.url, "prefix": uuid.uuid4().hex, "timeout": "1s"}}
    return World(store, path == "wire", cache, tmp_path)


@pytest.fixture
async def bench(world: World) -> AsyncIterator[Bench]:
    """A bench with one tenant and no keys."""
    async with world.bench() as made:
        yield made


def hashed(key: str) -> str:
    """An API key as a configuration names it."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def tools(*names: str, **schema: Any) -> list[dict[str, Any]]:
    """Function tools with these names."""
    parameters = {"type": "object", "properties": {"q": {"type": "string", **schema}}}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]
