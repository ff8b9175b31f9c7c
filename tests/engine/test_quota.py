"""Byte quotas by tenant on the tiers below the device: one tenant's prompts never crowd another's out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core import EngineCore
from engine.errors import ModelError
from engine.kv.pool import KVPool
from tests.cache.prefix.helpers import RedisServer
from tests.engine import tiny
from tests.engine.test_lower import drive, settle
from tests.engine.test_prefix import job, prompt, reference

BLOCK = KVPool.block_bytes(tiny.SPEC, 4, torch.float32)


def blind(core: EngineCore) -> EngineCore:
    """Always tries to load: a tiny model computes faster than any tier."""
    assert core.lower is not None
    core.lower.stack.observe_prefill = lambda tokens, seconds: None  # type: ignore[method-assign]
    return core


def test_a_greedy_tenant_keeps_to_its_share_of_host_memory() -> None:
    core = blind(tiny.core(16, kv_host_bytes=40 * BLOCK, kv_host_quota=12 * BLOCK))
    assert core.lower is not None
    host = core.lower.stack.host
    assert host is not None
    modest = prompt(41)
    drive(core, job("modest", modest, salt=b"modest"))
    for seed in range(1, 12):
        ids = prompt(41, seed)
        assert drive(core, job(f"greedy {seed}", ids, salt=b"greedy")).tokens == reference(ids)
        assert host.tenant_bytes(b"greedy") <= 12 * BLOCK
        host.check_integrity()
    assert host.tenant_bytes(b"greedy") == 12 * BLOCK
    again = drive(core, job("modest again", modest, salt=b"modest"))
    assert again.cached == 40
    assert again.tokens == reference(modest)
    core.close()


def test_a_greedy_tenant_keeps_to_its_share_of_redis(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        core = blind(tiny.core(64, kv_remote=redis.url, kv_remote_quota=12 * BLOCK, write_through_uses=1))
        for seed in range(4):
            drive(core, job(f"greedy {seed}", prompt(33, seed), salt=b"greedy"))
            settle(core)
        assert len(redis.block_keys()) == 12
        drive(core, job("modest", prompt(33), salt=b"modest"))
        settle(core)
        assert len(redis.block_keys()) == 12 + 8
        core.close()
    finally:
        redis.kill()


def test_a_quota_that_cannot_be_kept_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="quotas"):
        tiny.core(kv_remote="lmcache://127.0.0.1:5555", kv_remote_quota=1 << 20)
    with pytest.raises(ModelError, match="negative"):
        tiny.config(kv_host_quota=-1)
