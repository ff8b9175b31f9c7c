"""Silent failures, planted one by one: each turns its own light red within one round, and no other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cache.response.canonical import Identity, Scope
from cache.stores.base import StoreError
from cache.stores.environment import Environment
from engine.model.chat import ChatTemplate
from gateway import plan
from gateway.plan import Planner
from gateway.sentinels.patience import comes_true
from gateway.sentinels.telling import WITHIN
from loadtest.stub_upstream import StubUpstream
from tests.engine import tiny
from tests.gateway.sentinels.conftest import Engine, Watched, running_engine, watched
from tests.harness import upstream
from tests.services import redis_server

LAYERS = {"memory", "redis", "coalescing", "shared coalescing", "purges", "salt", "other tenant", "other model"}
OF_ENGINE = {"prefix e", "events e", "template e", "tier e device", "prefix of another tenant e"}
BODY = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}


def change_template(engine: Engine, template: str) -> None:
    """Another chat template from now on, as after a new version of the model's files."""
    tokenizer = tiny.tokenizer()
    tokenizer.template = template
    engine.worker.template = ChatTemplate(tokenizer)


NOT_COMPARED = {"agreement": "grey"}  # nothing is held out here


async def test_all_is_green_where_all_is_well(engine: Engine, in_redis: dict[str, Any]) -> None:
    async with watched(upstreams=[engine.upstream()], cache=in_redis) as gateway:
        for _ in range(3):
            assert await gateway.round() == dict.fromkeys(LAYERS | OF_ENGINE, "green") | NOT_COMPARED


async def test_all_is_green_on_disk_as_well(engine: Engine, tmp_path: Path) -> None:
    async with watched(upstreams=[engine.upstream()], cache={"disk": {"path": str(tmp_path / "cache")}}) as gateway:
        for _ in range(3):
            found = await gateway.round()
            assert found.pop("shared coalescing") == found.pop("agreement") == "grey"
            assert found == dict.fromkeys((LAYERS | OF_ENGINE | {"disk"}) - {"redis", "shared coalescing"}, "green")


@pytest.mark.parametrize("flushed", [True, False], ids=["and flushed", "alone"])
async def test_a_redis_that_cannot_be_written(engine: Engine, flushed: bool) -> None:
    with redis_server() as server:
        cache = {"redis": {"url": server.url, "timeout": "1s"}}
        async with watched(upstreams=[engine.upstream()], cache=cache) as gateway:
            assert await gateway.reds() == {}
            if flushed:
                server.client().flushall()
            server.client().config_set("min-replicas-to-write", 1)
            assert await gateway.reds() == {"redis": "cache.redis.url"}
            server.client().config_set("min-replicas-to-write", 0)
            assert await gateway.reds() == {}


async def test_a_redis_that_forgets_what_it_was_given_a_round_ago(u: StubUpstream) -> None:
    with redis_server() as server:
        cache = {"redis": {"url": server.url, "timeout": "1s"}}
        async with watched(upstreams=[upstream(u.url)], cache=cache) as gateway:
            assert await gateway.reds() == {}
            server.client().flushall()
            assert await gateway.reds() == {"redis": "Redis: maxmemory, maxmemory-policy"}
            assert await gateway.reds() == {}


async def test_a_gateway_with_another_secret(
    engine: Engine, in_redis: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONE", "one secret")
    monkeypatch.setenv("TWO", "another secret")
    async with watched(upstreams=[engine.upstream()], cache=in_redis, secret="env:ONE") as gateway:
        assert await gateway.reds() == {}
    async with watched(upstreams=[engine.upstream()], cache=in_redis, secret="env:ONE") as gateway:
        assert await gateway.reds() == {}
    async with watched(upstreams=[engine.upstream()], cache=in_redis, secret="env:TWO") as gateway:
        assert await gateway.reds() == {"salt": "secret (the same for all)"}


async def test_an_engine_with_another_block_size(engine: Engine) -> None:
    async with watched(upstreams=[engine.upstream(kv_events={"block_size": 32})]) as gateway:
        assert await gateway.reds() == {"events": "upstreams[].kv_events.block_size"}


async def test_events_that_are_cut_off(engine: Engine) -> None:
    async with watched(upstreams=[engine.upstream()]) as gateway:
        assert await gateway.reds() == {}
        events = engine.worker._events  # pyright: ignore[reportPrivateUsage]
        assert events is not None
        publisher = events._publisher  # pyright: ignore[reportPrivateUsage]
        await engine.worker.ask(lambda: publisher.disconnect(engine.events))
        assert await gateway.reds() == {"events": "upstreams[].kv_events"}


class Late:
    """A publisher of whose messages the first is lost, and the others come later than the first canary is waited for.
    In the end all are sent at once.
    """

    def __init__(self, publisher: Any) -> None:
        self._publisher, self._timers, self._sent = publisher, list[threading.Timer](), 0

    def send_multipart(self, parts: list[bytes], flags: int = 0) -> None:
        self._sent += 1
        if self._sent > 1:
            self._timers.append(threading.Timer(2 * WITHIN, self._publisher.send_multipart, [parts, flags]))
            self._timers[-1].start()

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        self._publisher.close()


async def test_events_that_are_lost_once_and_late_then(engine: Engine) -> None:
    async with watched(upstreams=[engine.upstream()]) as gateway:
        assert await gateway.reds() == {}
        events = engine.worker._events  # pyright: ignore[reportPrivateUsage]
        assert events is not None
        late = Late(events._publisher)  # pyright: ignore[reportPrivateUsage]
        events._publisher = late  # type: ignore[assignment]
        assert await gateway.reds() == {}


def test_a_machine_that_stands_still_is_not_waiting() -> None:
    looks = iter([False, False, False, True])

    async def look() -> bool:
        time.sleep(0.25)  # noqa: ASYNC251 - all that runs here stands still
        return next(looks)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(comes_true(look, 0.5))


@pytest.mark.parametrize("template", [tiny.TEMPLATE.replace("\n", "\t"), "Be brief. " + tiny.TEMPLATE])
async def test_a_template_that_is_changed_upstream(engine: Engine, template: str) -> None:
    """One that makes as many tokens as before, and one that makes more."""
    async with watched(upstreams=[engine.upstream()]) as gateway:
        assert await gateway.reds() == {}
        change_template(engine, template)
        assert (await gateway.reds()).keys() == {"template"}


async def test_a_template_that_is_changed_where_no_tokenizer_is_known_here(engine: Engine) -> None:
    own = {"name": "e", "url": engine.url, "cache_salt": True, "sentinel": "on"}
    async with watched(upstreams=[own]) as gateway:
        assert await gateway.reds() == {}
        change_template(engine, "Be brief. " + tiny.TEMPLATE)
        assert await gateway.reds() == {"template": "models.*.revision"}


async def test_a_disk_that_is_read_only(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refuse(_: Environment) -> Any:
        raise StoreError("readonly", "Read-only file system")
        yield

    async with watched(upstreams=[engine.upstream()], cache={"disk": {"path": str(tmp_path / "cache")}}) as gateway:
        assert await gateway.reds() == {}
        monkeypatch.setattr(Environment, "writer", refuse)
        assert await gateway.reds() == {"disk": "cache.disk.path"}


async def test_a_worker_that_no_longer_hears_of_purges(u: StubUpstream, in_redis: dict[str, Any]) -> None:
    config = {"upstreams": [upstream(u.url)], "cache": in_redis}
    async with watched(**config) as one, watched(**config) as two:
        assert [await one.reds(), await two.reds()] == [{}, {}]
        for gateway in (one, two):
            assert (await gateway.running.chat(BODY)).status_code == 200
        deafen(two)
        await one.running.client.post("/admin/purge", json={"model": "m1"})
        assert "hit" in (await two.running.chat(BODY)).headers["cache-status"]  # what it must not do
        assert [await one.reds(), await two.reds()] == [{}, {"purges": "cache.redis"}]
        (light,) = [light for light in two.runtime.board.lights if light.state == "red"]
        assert "still serves what 1 of them ended" in light.cause


def deafen(gateway: Watched) -> None:
    """Its watch over purges ends, unseen."""
    for task in gateway.runtime._tasks:  # pyright: ignore[reportPrivateUsage]
        if "GuardedStore.watch" in repr(task):
            task.cancel()


@pytest.mark.parametrize(("unchecked", "light"), [("tenant", "other tenant"), ("model", "other model")])
async def test_a_check_that_is_switched_off(
    engine: Engine, in_redis: dict[str, Any], monkeypatch: pytest.MonkeyPatch, unchecked: str, light: str
) -> None:
    """As in a build in which somebody left something out of the key."""
    identify: Callable[..., Identity] = plan.identify

    def careless(scope: Scope, body: dict[str, Any], excluded: Any) -> Identity:
        body = {**body, "model": ""} if unchecked == "model" else body
        return identify(replace(scope, **{unchecked: ""}), body, excluded)

    async with watched(upstreams=[engine.upstream()], cache=in_redis) as gateway:
        assert await gateway.reds() == {}
        monkeypatch.setattr(plan, "identify", careless)
        assert await gateway.reds() == {light: "cache"}


async def test_a_proxy_that_drops_the_salt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(upstreams=[engine.upstream()]) as gateway:
        assert await gateway.reds() == {}
        monkeypatch.setattr(Planner, "salted", lambda _, plan: plan.outgoing)
        assert await gateway.reds() == {"prefix of another tenant": "upstreams[].cache_salt"}


async def test_an_engine_that_keeps_no_prefixes(engine: Engine) -> None:
    async with watched(upstreams=[engine.upstream()]) as gateway:
        assert await gateway.reds() == {}
        scheduler = engine.worker.core.scheduler
        scheduler._reuse = False  # pyright: ignore[reportPrivateUsage]
        assert (await gateway.reds()).keys() == {"prefix"}


async def test_a_lower_tier_that_loses_what_it_was_given(tmp_path: Path) -> None:
    """The device has room for one canary and a half, so that earlier ones are below."""
    async with (
        running_engine(tmp_path, blocks=66, kv_host_bytes=64 << 20) as engine,
        watched(upstreams=[engine.upstream()]) as gateway,
    ):
        found = [await gateway.round() for _ in range(3)]
        assert found[-1]["tier e host"] == "green"
        engine.worker.core.scheduler._lower = None  # pyright: ignore[reportPrivateUsage]
        assert await gateway.reds() == {"tier": "engine.kv_cache"}


async def test_an_upstream_that_is_gone() -> None:
    gone = upstream("http://127.0.0.1:9", models=["m1"], sentinel="on")
    async with watched(upstreams=[gone]) as gateway:
        found = [await gateway.reds() for _ in range(3)]
        assert found == [{}, {}, {"prefix": "upstreams[].url"}]  # it may only be loading


async def test_a_sentinel_that_fails_is_red_itself(u: StubUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> NoReturn:
        await asyncio.sleep(0)
        raise RuntimeError

    async with watched(upstreams=[upstream(u.url)]) as gateway:
        monkeypatch.setattr("gateway.sentinels.rounds.coalescing", fail)
        assert (await gateway.reds()).keys() == {"coalescing"}
