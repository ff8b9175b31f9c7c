"""On a CUDA device the same code gives the same answers, with and without the tiers below. Skipped where there is none.

What this would prove: that the pool, the tables, the masks and the staging copies (pinned memory) are right on a device
of its own memory, and that bfloat16, the default there, runs. Speed on a GPU is not claimed anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from tests.engine import tiny
from tests.engine.drive import run, run_all
from tests.engine.test_lower import drive
from tests.engine.test_prefix import job, prompt, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def core(**changes: Any) -> EngineCore:
    return EngineCore(replace(tiny.config(**changes), device="cuda"), tiny.files())


def test_float32_answers_equal_the_cpus() -> None:
    asks = [job(str(i), prompt(10 + 7 * i, i), tokens=8) for i in range(5)]
    results = run_all(core(dtype="float32"), asks)
    for ask in asks:
        assert results[ask.id].tokens == reference(list(ask.prompt), 8)


def test_reuse_is_neutral_in_bfloat16() -> None:
    warm = core(dtype="bfloat16")
    ids = prompt(60)
    cold = run(warm, job("a", ids))
    again = run(warm, job("b", ids))
    assert (again.cached, again.tokens) == (56, cold.tokens)


def test_blocks_come_back_from_host_memory() -> None:
    below = core(blocks=16, dtype="float32", kv_host_bytes=1 << 20)
    assert below.lower is not None
    below.lower.stack.observe_prefill = lambda tokens, seconds: None  # type: ignore[method-assign]
    ids = prompt(41)
    drive(below, job("a", ids))
    for seed in range(4):
        drive(below, job(f"f{seed}", prompt(41, seed + 1)))
    result = drive(below, job("b", ids))
    assert result.tokens == reference(ids)
    assert result.sequence.cached_by.get("host", 0) > 0
    below.close()
