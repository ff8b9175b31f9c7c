"""Requests, tokens, money and concurrency: counted once, by the rule in `gateway.limits`, in one process or in many."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config
from loadtest.stub_upstream import StubUpstream, answer
from tests.field.conftest import B, Bench, Reply
from tests.gateway.conftest import Start
from tests.harness import FakeClock, running_gateway, upstream
from tests.services import RedisServer, redis_server
from tests.waiting import until

PRICES = "models: {m1: {input: 1000, output: 2000}}"
"""A call of the stub (10 tokens in, 5 out) costs 0.02 dollars."""


def tenant(name: str = "t1", key: str = "K1", **limits: Any) -> dict[str, Any]:
    return {"name": name, "keys": ["sha256:" + hashlib.sha256(key.encode()).hexdigest()], "limits": limits}


def ask(number: int) -> dict[str, Any]:
    return B | {"seed": number}


async def tell(*benches: Bench) -> None:
    """What was spent is told to the others, and what was known before is too old to be relied on."""
    for bench in benches:
        for usage in bench.gateway.app.runtime.usages._of.values():
            await usage.report()
    benches[0].clock.advance(2)


def refused(reply: Reply, code: str = "rate_limit_exceeded") -> bool:
    told = reply.status == 429 and reply.response.json()["error"]["code"] == code
    return told and int(reply.response.headers["retry-after"]) > 0


class TestOneProcess:
    async def test_every_admitted_request_counts_once_hit_or_miss(self, start: Start, clock: FakeClock) -> None:
        async with start(tenants=[tenant(requests_per_minute=3)]) as bench:
            await bench.miss(B, key="K1")
            await bench.hit(B, key="K1")
            await bench.miss(ask(1), key="K1")
            over = await bench.send(B, key="K1")
            assert refused(over)
            assert over.response.headers["retry-after"] == "20"
            clock.advance(20)
            await bench.hit(B, key="K1")
            assert refused(await bench.send(B, key="K1")), "what was refused did not count"

    async def test_requests_that_are_refused_for_something_else_count_as_well(self, start: Start) -> None:
        async with start(tenants=[tenant(requests_per_minute=2)]) as bench:
            assert (await bench.send(b"{", key="K1")).status == 400
            assert (await bench.send(B | {"model": "none"}, key="K1")).status == 404
            assert refused(await bench.send(B, key="K1"))

    async def test_tokens_count_as_served_and_later_requests_wait(self, start: Start, clock: FakeClock) -> None:
        async with start(tenants=[tenant(tokens_per_minute=30)]) as bench:
            await bench.miss(B, key="K1")
            await bench.hit(B, key="K1")
            await bench.hit(B, key="K1")
            over = await bench.send(B, key="K1")
            assert refused(over)
            assert over.response.headers["retry-after"] == "30"
            clock.advance(30)
            await bench.hit(B, key="K1")

    async def test_concurrent_requests(self, start: Start, u: StubUpstream, gate: asyncio.Event) -> None:
        u.always(answer().held(gate))
        async with start(tenants=[tenant(concurrent=2)]) as bench:
            running = [asyncio.create_task(bench.send(ask(number), key="K1")) for number in range(2)]
            await u.wait_calls(2)
            assert refused(await bench.send(B, key="K1"), "too_many_concurrent")
            gate.set()
            await asyncio.gather(*running)
            await bench.miss(B, key="K1")

    async def test_tenants_do_not_spend_each_others(self, start: Start) -> None:
        tenants = [tenant(requests_per_minute=1), tenant("t2", "K2", requests_per_minute=1)]
        async with start(tenants=tenants) as bench:
            await bench.miss(B, key="K1")
            assert refused(await bench.send(B, key="K1"))
            await bench.miss(B, key="K2")

    async def test_what_was_spent_outlives_a_reload(
        self, u: StubUpstream, clock: FakeClock, gate: asyncio.Event
    ) -> None:
        limits: dict[str, Any] = {"requests_per_minute": 2, "tokens_per_minute": 1000}

        def read() -> Any:
            return Config.model_validate(whole | {"tenants": [tenant(**limits)]})

        whole: dict[str, Any] = {
            "upstreams": [upstream(u.url)],
            "cache": {"disk": "off", "holdout": 0},
            "ledger": "off",
        }
        async with running_gateway(whole | {"tenants": [tenant(**limits)]}, clock, read) as gateway:
            bench = Bench(gateway, u, clock, whole)
            u.always(answer().held(gate))
            running = asyncio.create_task(bench.send(B, key="K1"))
            await u.wait_calls(1)
            limits |= {"tokens_per_minute": 2000, "concurrent": 1}
            await gateway.client.post("/admin/reload")
            assert refused(await bench.send(B, key="K1"), "too_many_concurrent"), "the one under way is still counted"
            gate.set()
            await running
            await bench.hit(B, key="K1")
            assert refused(await bench.send(B, key="K1"))


class TestMoney:
    @pytest.fixture
    def prices(self, tmp_path: Path) -> str:
        path = tmp_path / "prices.yaml"
        path.write_text(PRICES)
        return str(path)

    async def test_a_budget_is_spent_by_upstream_calls_alone(self, start: Start, clock: FakeClock, prices: str) -> None:
        async with start(tenants=[tenant(usd_per_day=0.03)], prices=prices) as bench:
            await bench.miss(B, key="K1")
            for _ in range(5):
                await bench.hit(B, key="K1")
            await bench.miss(ask(1), key="K1")
            over = await bench.send(B, key="K1")
            assert refused(over, "budget_exceeded"), "also for what is remembered"
            until_midnight = 86_400 - clock.time() % 86_400
            assert abs(int(over.response.headers["retry-after"]) - until_midnight) <= 1
            clock.advance(until_midnight)
            await bench.miss(B, key="K1")

    async def test_a_model_without_a_price_spends_nothing(self, start: Start, prices: str) -> None:
        async with start(tenants=[tenant(usd_per_day=0.01)], prices=prices) as bench:
            for number in range(3):
                await bench.miss(ask(number) | {"model": "m2"}, key="K1")

    async def test_a_restart_does_not_refill_it(self, start: Start, prices: str, tmp_path: Path) -> None:
        config = {
            "tenants": [tenant(usd_per_day=0.03)],
            "prices": prices,
            "ledger": {"path": str(tmp_path / "ledger.db")},
        }
        async with start(**config) as bench:
            await bench.miss(ask(1), key="K1")
            await bench.miss(ask(2), key="K1")
        async with start(**config) as bench:
            usage = bench.gateway.app.runtime.usages.of("t1")
            await until(lambda: usage._spent, "what was spent is read from the ledger")
            assert refused(await bench.send(B, key="K1"), "budget_exceeded")

    async def test_gateways_over_one_redis_spend_one_budget(
        self, start: Start, prices: str, redis_cache: dict[str, Any]
    ) -> None:
        config = {"tenants": [tenant(usd_per_day=0.03)], "prices": prices, "cache": {"redis": redis_cache}}
        async with start(**config) as one, start(**config) as two:
            await one.miss(ask(1), key="K1")
            await two.miss(ask(2), key="K1")
            await tell(one, two)
            assert refused(await one.send(B, key="K1"), "budget_exceeded")
            assert refused(await two.send(B, key="K1"), "budget_exceeded")


class TestManyProcesses:
    async def test_requests_are_counted_together(self, start: Start, redis_cache: dict[str, Any]) -> None:
        config = {"tenants": [tenant(requests_per_minute=10)], "cache": {"redis": redis_cache}}
        async with start(**config) as one, start(**config) as two:
            began = time.monotonic()
            replies = [await bench.send(B, key="K1") for _ in range(10) for bench in (one, two)]
            flowed_in = (time.monotonic() - began) * 10 / 60
            assert 10 <= [reply.status for reply in replies].count(200) <= 10 + flowed_in
            assert all(refused(reply) for reply in replies if reply.status != 200)

    async def test_many_at_once_are_counted_exactly_too(self, start: Start, redis_cache: dict[str, Any]) -> None:
        config = {"tenants": [tenant(requests_per_minute=30)], "cache": {"redis": redis_cache}}
        async with start(**config) as one, start(**config) as two:
            began = time.monotonic()
            await one.miss(B, key="K1")
            replies = await asyncio.gather(*(bench.send(B, key="K1") for _ in range(30) for bench in (one, two)))
            flowed_in = (time.monotonic() - began) * 30 / 60
            assert 29 <= [reply.status for reply in replies].count(200) <= 29 + flowed_in

    async def test_a_fast_tenant_takes_shares_so_that_the_short_path_need_not_ask(
        self, start: Start, redis_cache: dict[str, Any]
    ) -> None:
        config = {"tenants": [tenant(requests_per_minute=6000)], "cache": {"redis": redis_cache}}
        async with start(**config) as bench:
            await bench.miss(B, key="K1")
            shared = bench.gateway.app.runtime.shared
            assert shared is not None
            asked = shared.counters["settle"]["ok"]
            for _ in range(20):
                await bench.hit(B, key="K1")
            assert shared.counters["settle"]["ok"] - asked <= 2

    async def test_shares_never_add_up_to_more_than_the_limit(self, start: Start, redis_cache: dict[str, Any]) -> None:
        config = {"tenants": [tenant(requests_per_minute=240)], "cache": {"redis": redis_cache}}
        async with start(**config) as one, start(**config) as two:
            await one.miss(B, key="K1")
            admitted, began = 1, time.monotonic()
            for _ in range(20):
                replies = await asyncio.gather(*(bench.send(B, key="K1") for _ in range(10) for bench in (one, two)))
                admitted += [reply.status for reply in replies].count(200)
            passed = time.monotonic() - began
            assert 240 - 4 <= admitted <= 240 + 4 * passed + 1

    async def test_tokens_are_counted_together(self, start: Start, redis_cache: dict[str, Any]) -> None:
        config = {"tenants": [tenant(tokens_per_minute=30)], "cache": {"redis": redis_cache}}
        async with start(**config) as one, start(**config) as two:
            await one.miss(B, key="K1")
            await two.hit(B, key="K1")
            await two.hit(B, key="K1")
            await tell(one, two)
            assert refused(await one.send(B, key="K1"))
            assert refused(await two.send(B, key="K1"))

    async def test_what_a_process_has_spent_is_told_by_itself(self, start: Start, redis_cache: dict[str, Any]) -> None:
        config = {"tenants": [tenant(tokens_per_minute=14)], "cache": {"redis": redis_cache}}
        async with start(**config) as one, start(**config) as two:
            await one.miss(B, key="K1")
            shared = one.gateway.app.runtime.shared
            assert shared is not None
            settled = shared.counters["settle"]
            await until(lambda: settled["ok"] == 2, "it was told, after the asking")
            assert refused(await two.send(B, key="K1"))

    @pytest.fixture
    def own_redis(self) -> Iterator[RedisServer]:
        with redis_server() as server:
            yield server

    @pytest.mark.parametrize("trouble", ["pause", "kill"])
    async def test_without_redis_each_process_counts_for_itself(
        self, start: Start, own_redis: RedisServer, trouble: str
    ) -> None:
        redis = {"url": own_redis.url, "timeout": "300ms"}
        config = {"tenants": [tenant(requests_per_minute=3)], "cache": {"redis": redis}}
        async with start(**config) as one, start(**config) as two:
            await one.miss(B, key="K1")
            getattr(own_redis, trouble)()
            for bench in (one, two):
                statuses = [(await bench.send(B, key="K1")).status for _ in range(5)]
                assert statuses == [200, 200, 200, 429, 429]
            if trouble == "pause":
                own_redis.resume()
