"""int8 decode: close to the exact product, row by row independent, and never in the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore, Generation
from engine.model.int8 import Int8Weight, linear
from engine.model.weights import open_model
from tests.engine import tiny
from tests.engine.drive import GREEDY, run, run_all
from tests.engine.test_prefix import job, prompt

DATA = Path(__file__).parent / "data"


def test_products_are_close_and_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator)
    x = torch.randn(5, 64, generator=generator) * torch.tensor([0.01, 1, 1, 10, 100])[:, None]
    exact, quantised = linear(x, weight), linear(x, Int8Weight(weight))
    assert ((exact - quantised).norm(dim=1) / exact.norm(dim=1)).max() < 0.02
    for row in range(5):
        assert torch.equal(linear(x[row : row + 1], Int8Weight(weight))[0], quantised[row])
    bias = torch.ones(96)
    assert torch.equal(linear(x, Int8Weight(weight), bias), quantised + 1)
    assert not linear(torch.zeros(1, 64), Int8Weight(weight)).any()


def test_answers_do_not_depend_on_company_or_reuse() -> None:
    core = tiny.core(int8_decode=True, batch_invariant=False)
    ids = prompt(30)
    alone = run(core, job("a", ids, tokens=20)).tokens
    crowd = run_all(core, [job(str(i), ids if i == 2 else prompt(12, i), tokens=20) for i in range(5)])
    assert crowd["2"].tokens == alone


@pytest.mark.slow
def test_quality_on_the_real_model_is_near_float32() -> None:
    """Agreement of greedy tokens with transformers' float32, and perplexity over those texts."""
    torch.set_num_threads(1)
    core = EngineCore(EngineConfig(kv_bytes=256 << 20, int8_decode=True), open_model("smollm2-135m-instruct"))
    chats, golden = (
        json.loads((DATA / "tokens.json").read_text())["chats"],
        json.loads((DATA / "greedy.json").read_text()),
    )
    results = run_all(core, [Generation(str(i), ids, 32, GREEDY) for i, ids in enumerate(chats)])
    firsts = [results[str(i)].tokens[:8] == expected[:8] for i, expected in enumerate(golden)]
    assert sum(firsts) / len(firsts) >= 0.6
