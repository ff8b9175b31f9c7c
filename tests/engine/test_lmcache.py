"""The engine over a real LMCache server: who shares its blocks, who does not, and what its end costs (O-59, O-60)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cache.prefix.tiers import Limits
from engine.core import EngineCore
from engine.model.spec import RopeScaling
from tests.cache.prefix.lmcache_server import LMCacheServer, installed, lmcache_server
from tests.engine import tiny
from tests.engine.drive import Result
from tests.engine.test_lower import drive
from tests.engine.test_prefix import job, prompt, reference
from tests.waiting import wait_until

pytestmark = [installed, pytest.mark.slow, pytest.mark.timeout(300)]
Make = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with lmcache_server(tmp_path_factory.mktemp("lmcache"), block_size=4) as running:
        yield running


@pytest.fixture
def make(server: LMCacheServer) -> Iterator[Make]:
    """Builds tiny engines over the server, patient ones that always try to load."""
    cores: list[EngineCore] = []

    def build(*, seed: int = 0, spec: dict[str, Any] | None = None, **options: Any) -> EngineCore:
        model = tiny.files(replace(tiny.SPEC, **(spec or {})), seed)
        core = tiny.core(64, model=model, kv_remote=server.url, write_through_uses=1, **options)
        assert core.lower is not None and core.lower.stack.remote is not None
        core.lower.stack.observe_prefill = lambda tokens, seconds: None  # type: ignore[method-assign]
        core.lower.stack.remote._limits = Limits(10, 10, 10)
        cores.append(core)
        return core

    yield build
    for core in cores:
        core.close()


def serve(core: EngineCore, ids: list[int], salt: bytes = b"") -> Result:
    """Answers a prompt that is not stored yet, and waits until its whole chunks are."""
    assert core.lower is not None
    result, stack = drive(core, job("a", ids, salt=salt)), core.lower.stack
    blocks = (len(ids) - len(ids) % core.config.prefill_chunk) // core.config.block_size
    wait_until(lambda: stack.stats()["lmcache"]["stored"] >= blocks, patience=30)
    return result


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"prefill_chunk": 16},
        {"spec": {"layers": 3}},
        {"spec": {"kv_heads": 4}},
        {"spec": {"rope_theta": 5000.0}},
        {"spec": {"rope_scaling": RopeScaling("linear", 2.0)}},
        {"seed": 1},
    ],
    ids=str,
)
def test_o59_o60_another_layout_never_finds_the_blocks(make: Make, change: dict[str, Any]) -> None:
    ids = prompt(60, seed=sum(map(ord, str(change))))  # what other cases stored is no answer here
    plain = serve(make(), ids)
    assert plain.cached == 0
    other = serve(make(**change), ids)
    assert other.cached == 0
    back = drive(make(), job("a", ids))
    assert (back.sequence.cached_by, back.tokens) == ({"lmcache": 56}, plain.tokens)
    again = drive(make(**change), job("a", ids))
    assert again.cached > 0
    assert again.tokens == other.tokens


def test_another_block_size_is_refused_and_computed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(60, seed=7)
    serve(make(), ids)
    core = make(block_size=8)
    assert (result := drive(core, job("a", ids))).cached == 0
    assert result.tokens == reference(ids)
    assert "--chunk-size" in caplog.text


def test_tenants_are_apart(make: Make) -> None:
    ids = prompt(60, seed=8)
    serve(make(), ids, salt=b"T1")
    assert drive(make(), job("b", ids, salt=b"T2")).cached == 0
    assert drive(make(), job("c", ids)).cached == 0
    back = drive(make(), job("d", ids, salt=b"T1"))
    assert (back.cached, back.tokens) == (56, reference(ids))


def test_a_vanished_server_costs_a_recompute(make: Make, server: LMCacheServer) -> None:
    ids = prompt(60, seed=9)
    core = make()
    serve(core, ids)
    core.reset_prefix_cache()
    assert drive(core, job("b", ids)).sequence.cached_by == {"lmcache": 56}
    server.kill()
    try:
        assert core.lower is not None and core.lower.stack.remote is not None
        core.lower.stack.remote._limits = Limits(0.2, 0.2, 0.2)
        core.reset_prefix_cache()
        result = drive(core, job("c", ids))
        assert (result.cached, result.tokens) == (0, reference(ids))
        core.check_integrity()
        assert core.manager.free == 64
    finally:
        server.start()
