"""Upstreams that tell what they hold: what was only believed of them ends when they speak."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from gateway.upstreams.exact import Told
from gateway.upstreams.router import Asked
from loadtest.stub_upstream import StubUpstream
from tests.field.embedded import tokenizer_folder
from tests.gateway.upstreams.test_kv_blocks import stored
from tests.gateway.upstreams.test_kv_events import Publisher
from tests.gateway.upstreams.test_many import CHAIN, fleet, holds
from tests.harness import Running, running_gateway, upstream
from tests.services import free_port
from tests.waiting import until

LONG = "All of them begin with the same long text. " * 40


def test_who_tells_is_judged_by_what_it_tells_and_others_by_what_they_were_sent() -> None:
    router, (tells, silent), _ = fleet(2)
    prompt, names = 1600, tuple(range(100))
    holds(router, tells, 90)
    holds(router, silent, 40)
    asked = Asked("m1", 256 * len(CHAIN), CHAIN, tokens=prompt, blocks=[Told(names, 16, tells.bit)])
    assert router.uncached(asked, tells) == prompt
    assert router.uncached(asked, silent) == 0.6 * prompt
    router.index.add(tells.slot, names[:70])
    assert router.uncached(asked, tells) == 0.3 * prompt
    with router.route(asked, [tells, silent]) as route:
        assert (route.member, route.decision.cached) == (tells, 0.7 * prompt)


@pytest.mark.parametrize("cleared", [False, True])
async def test_what_was_believed_of_one_ends_when_it_tells(tmp_path: Path, cleared: bool) -> None:
    folder = str(tokenizer_folder(tmp_path))
    async with StubUpstream() as u, StubUpstream() as v:
        live = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("u", "v")}
        upstreams = [
            upstream(stub.url, name, models=["m1"], kv_events={"bind": live[name]}, tokenizer=folder)
            for name, stub in (("u", u), ("v", v))
        ]
        config = {"upstreams": upstreams, "routing": {"probe": 0}, "cache": {"memory": "off"}}
        async with running_gateway(config) as gateway:
            where, route = await asked_about(gateway, 1)
            assert "cached=" not in route
            assert "cached=" in (await asked_about(gateway, 2))[1]  # nobody tells anything: it was sent there
            publisher = Publisher(live[where], epoch=time.time())
            try:
                await asyncio.sleep(0.1)  # ZMQ tells nobody when a subscriber has arrived
                publisher.send(0, stored(0, 1))  # not of this prompt
                await blocks_of(gateway, where, 1)
                if cleared:
                    publisher.send(1, {"type": "AllBlocksCleared"})
                    await blocks_of(gateway, where, 0)
                assert "cached=" not in (await asked_about(gateway, 3))[1]
            finally:
                publisher.close()


async def blocks_of(gateway: Running, name: str, count: int) -> None:
    """Waits until so many blocks of an upstream are known."""
    exact = gateway.app.runtime.router.exact
    await until(lambda: exact.counts()[name]["blocks"] == count, f"{count} blocks of {name} are known")


async def asked_about(gateway: Running, number: int) -> tuple[str, str]:
    """Where a long prompt goes that begins like all others, and why."""
    turns = [{"role": "user", "content": f"{LONG} {number}"}]
    response = await gateway.chat({"model": "m1", "messages": turns, "temperature": 0, "max_tokens": 9})
    return response.headers["x-warmgate-upstream"], response.headers["x-warmgate-route"]
