"""The tiers below the device: what comes back is what was there; what fails there costs time, never an answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.prefix.codec import Codec
from cache.prefix.host import HostTier
from cache.prefix.stack import TierStack
from cache.prefix.tiers import GuardedTier, Limits
from engine.core import EngineCore
from engine.model.spec import RopeScaling
from tests.cache.prefix.helpers import FaultyTier, RedisServer
from tests.engine import tiny
from tests.engine.drive import Result, advance, submit
from tests.engine.test_prefix import job, prompt, reference
from tests.waiting import wait_until


class Blind(TierStack):
    """Never learns how fast prefill is, so that it always tries to load: a tiny model computes faster than any tier."""

    def observe_prefill(self, tokens: int, seconds: float) -> None: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineCore]]:
    """Builds cores over tiers of one's own: `make(blocks, host=blocks, remote=tier)`; `patience`: s for a load."""
    cores: list[EngineCore] = []

    def build(
        blocks: int = 16,
        *,
        host: int = 0,
        remote: FaultyTier | None = None,
        uses: int = 1,
        patience: float = 10.0,
        **more: Any,
    ) -> EngineCore:
        def stack(config: Any, layout: Any, size: int) -> TierStack:
            if remote is not None:
                remote.codec = Codec(layout.digest, size)
            guarded = GuardedTier(remote, size) if remote is not None else None  # type: ignore[arg-type]
            tier = HostTier(host * size, size) if host else None
            return Blind(
                block_bytes=size,
                block_tokens=4,
                host=tier,
                remote=guarded,
                step=2,
                write_through_uses=uses,
                load_timeout=patience,
            )

        monkeypatch.setattr("engine.core.build_stack", stack)
        cores.append(tiny.core(blocks, write_through_uses=uses, **more))
        return cores[-1]

    yield build
    for core in cores:
        core.close()


def drive(core: EngineCore, ask: Any) -> Result:
    """Runs a job whose blocks may have to be loaded first, resting when done as the worker does."""
    result = submit(core, ask)
    while core.busy:
        advance(core, {ask.id: result})
        if core.stalled:
            time.sleep(0.001)
    while core.rest():
        pass
    return result


def settle(core: EngineCore) -> None:
    """Waits until what is on its way to the remote tier has arrived."""
    assert core.lower is not None
    mover = core.lower.stack._mover
    wait_until(lambda: not mover._queued and not mover._waiting_bytes, "all blocks are stored or dropped")


def test_blocks_evicted_from_the_device_come_back_from_the_host(make: Callable[..., EngineCore]) -> None:
    core = make(16, host=64, uses=2)
    ids = prompt(41)
    drive(core, job("a", ids))
    for seed in range(4):
        drive(core, job(f"f{seed}", prompt(41, seed + 1)))
    again = drive(core, job("b", ids))
    assert again.tokens == reference(ids)
    assert again.cached == 40
    assert again.sequence.cached_by.get("host", 0) >= 8
    assert core.manager.free == 16


def test_a_new_process_starts_warm_from_the_remote_tier(make: Callable[..., EngineCore]) -> None:
    records: dict[bytes, bytes] = {}
    ids = prompt(60)
    first = make(64, remote=FaultyTier(records))
    drive(first, job("a", ids))
    settle(first)
    second = make(64, remote=FaultyTier(records))
    result = drive(second, job("b", ids))
    assert result.tokens == reference(ids)
    assert result.sequence.cached_by == {"remote": 56}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"prefill_chunk": 16},
        {"spec": {"layers": 3}},
        {"spec": {"kv_heads": 4}},
        {"spec": {"rope_theta": 5000.0}},
        {"spec": {"rope_scaling": RopeScaling("linear", 2.0)}},
        {"seed": 1},
    ],
    ids=str,
)
def test_o59_o60_another_layout_never_finds_the_blocks(tmp_path: Path, change: dict[str, Any]) -> None:
    redis = RedisServer(tmp_path)
    try:
        ids = prompt(60)

        def engine(change: dict[str, Any]) -> EngineCore:
            spec, seed = replace(tiny.SPEC, **change.get("spec", {})), change.get("seed", 0)
            options = {key: value for key, value in change.items() if key not in ("spec", "seed")}
            return tiny.core(64, model=tiny.files(spec, seed), kv_remote=redis.url, write_through_uses=1, **options)

        def serve(change: dict[str, Any]) -> Result:
            core = engine(change)
            core.lower.stack.observe_prefill = lambda tokens, seconds: None  # type: ignore[union-attr, method-assign]
            result = drive(core, job("a", ids))
            core.close()
            return result

        plain = serve({})
        other = serve(change)
        assert other.cached == 0
        back = serve({})
        assert (back.cached, back.tokens) == (56, plain.tokens)
        again = serve(change)
        assert again.cached > 0
        assert again.tokens == other.tokens
    finally:
        redis.kill()


def flip(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


@pytest.mark.parametrize(
    "spoil", [flip, lambda record: record[: len(record) // 2], lambda record: None], ids=["flipped", "half", "dropped"]
)
def test_o62_a_bad_store_is_recomputed(make: Callable[..., EngineCore], spoil: Callable[[bytes], bytes | None]) -> None:
    tier = FaultyTier()
    ids = prompt(60)
    stored = 0

    def kth(record: bytes) -> bytes | None:
        nonlocal stored
        stored += 1
        return spoil(record) if stored == 6 else record

    tier.on_record = kth
    first = make(64, remote=tier)
    drive(first, job("a", ids))
    settle(first)
    result = drive(make(64, remote=tier), job("b", ids))
    assert result.tokens == reference(ids)
    assert result.cached == 16  # five good blocks, cut to whole chunks


def test_o62_a_failing_store_is_not_found(make: Callable[..., EngineCore]) -> None:
    async def fail(call: int) -> None:
        raise OSError("no room")

    tier = FaultyTier()
    tier.on_store = fail
    ids = prompt(60)
    first = make(64, remote=tier)
    drive(first, job("a", ids))
    settle(first)
    result = drive(make(64, remote=tier), job("b", ids))
    assert (result.cached, result.tokens) == (0, reference(ids))


@pytest.mark.parametrize("fault", ["raises", "hangs", "evicted", "hole"])
def test_o63_a_failed_load_is_recomputed_and_disturbs_nobody(make: Callable[..., EngineCore], fault: str) -> None:
    tier = FaultyTier()
    ids = prompt(60)
    first = make(64, remote=tier)
    drive(first, job("a", ids))
    settle(first)

    async def on_load(call: int) -> None:
        if fault == "raises":
            raise OSError("gone")
        if fault == "hangs":
            await asyncio.sleep(60)
        if fault == "evicted":
            tier.records.clear()

    if fault == "hole":
        del tier.records[list(tier.records)[6]]
    else:
        tier.on_load = on_load
    core = make(64, remote=tier, patience=0.5 if fault == "hangs" else 10.0)
    results = {"b": submit(core, job("b", ids)), "other": submit(core, job("other", prompt(9, 3), tokens=20))}
    while core.busy:
        advance(core, results)
        core.check_integrity()
        time.sleep(0.001 if core.stalled else 0)
    assert results["b"].tokens == reference(ids)
    assert results["b"].cached == (24 if fault == "hole" else 0)
    assert results["other"].tokens == reference(prompt(9, 3), 20)


def test_o64_cancelling_at_any_moment_of_a_load_loses_no_block(make: Callable[..., EngineCore]) -> None:
    tier = FaultyTier()
    prompts = [prompt(60, seed) for seed in range(4)]
    first = make(64, remote=tier)
    for seed, ids in enumerate(prompts):
        drive(first, job(str(seed), ids))
    settle(first)
    rng = random.Random(5)

    async def late(call: int) -> None:
        await asyncio.sleep(rng.random() * 0.004)

    tier.on_load = tier.on_lookup = late
    core = make(24, remote=tier)
    for number in range(120):
        ask = job(str(number), rng.choice(prompts), tokens=2)
        results = {ask.id: submit(core, ask)}
        for _ in range(rng.randrange(12)):
            advance(core, results)
            time.sleep(0.0005)
        core.cancel(ask.id)
        core.check_integrity()
        assert core.manager.free == 24
        core.reset_prefix_cache()
    tier.on_load = tier.on_lookup = None
    for ids in prompts:
        assert drive(core, job("last", ids)).tokens == reference(ids)


def test_what_makes_room_for_a_load_is_saved_before_it_is_overwritten(make: Callable[..., EngineCore]) -> None:
    core = make(12, host=64, uses=2)
    prompts = [prompt(33, seed) for seed in range(5)]
    assert core.lower is not None
    real = core.lower.stack.load

    def at_once(*arguments: Any, **options: Any) -> Any:
        transfer = real(*arguments, **options)
        transfer.wait(5)
        return transfer

    core.lower.stack.load = at_once  # type: ignore[method-assign]
    for round_ in range(4):
        for seed, ids in enumerate(prompts):
            result = drive(core, job(f"{round_}-{seed}", ids))
            assert result.tokens == reference(ids)
            assert result.cached == (32 if round_ else 0)


def test_two_requests_bring_a_common_prefix_up_once(make: Callable[..., EngineCore]) -> None:
    tier = FaultyTier()
    head = prompt(41)
    first = make(64, remote=tier)
    drive(first, job("a", head))
    settle(first)
    core = make(64, remote=tier)
    asks = [job(str(i), head + prompt(3, i)) for i in range(3)]
    results = {ask.id: submit(core, ask) for ask in asks}
    while core.busy:
        advance(core, results)
        time.sleep(0.001 if core.stalled else 0)
    assert core.lower is not None
    assert core.lower.stack.stats()["remote"]["loaded"] == 10
    for ask in asks:
        assert results[ask.id].cached == 40
        assert results[ask.id].tokens == reference(list(ask.prompt))


def test_tenants_are_apart_on_every_tier(make: Callable[..., EngineCore]) -> None:
    tier = FaultyTier()
    ids = prompt(60)
    first = make(64, host=64, remote=tier)
    drive(first, job("a", ids, salt=b"T1"))
    settle(first)
    second = make(64, host=64, remote=tier)
    assert drive(second, job("b", ids, salt=b"T2")).cached == 0
    assert drive(second, job("c", ids)).cached == 0
    assert drive(second, job("d", ids, salt=b"T1")).cached == 56


def test_a_vanished_redis_costs_a_recompute(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    core = tiny.core(64, kv_remote=redis.url, write_through_uses=1)
    ids = prompt(60)
    drive(core, job("a", ids))
    redis.kill()
    core.reset_prefix_cache()
    result = drive(core, job("b", ids))
    assert (result.cached, result.tokens) == (0, reference(ids))
    core.close()


def test_random_lives_over_tiers_that_fail(make: Callable[..., EngineCore]) -> None:
    rng = random.Random(9)

    async def moody(call: int) -> None:
        if call % 7 == 0:
            raise OSError("moody")
        await asyncio.sleep(rng.random() * 0.003)

    tier = FaultyTier()
    tier.on_load = tier.on_lookup = tier.on_store = moody
    tier.on_record = lambda record: flip(record) if rng.random() < 0.1 else record
    tier.limits = Limits(lookup=0.05, load=0.05, store=0.05)
    core = make(18, host=30, remote=tier, uses=2)
    heads = [prompt(rng.randrange(8, 40), seed) for seed in range(6)]
    asks: dict[str, Any] = {}
    results: dict[str, Result] = {}
    for number in range(1500):
        if rng.random() < 0.15 and len(core.jobs()) < 8:
            ask = job(str(number), rng.choice(heads) + prompt(rng.randrange(1, 6), number), tokens=rng.randrange(1, 8))
            asks[ask.id], results[ask.id] = ask, submit(core, ask)
        elif rng.random() < 0.03 and core.jobs():
            gone = rng.choice(core.jobs())
            core.cancel(gone)
            del results[gone]
        advance(core, results)
        core.check_integrity()
        time.sleep(0.0003 if core.stalled else 0)
    while core.busy:
        advance(core, results)
        time.sleep(0.001 if core.stalled else 0)
    assert len(results) > 50
    for name, result in results.items():
        assert result.tokens == reference(list(asks[name].prompt), asks[name].max_tokens)
    assert core.manager.free == 18
