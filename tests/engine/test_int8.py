"""int8 decode: close to the exact product, row by row independent, and never in the prefix cache."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.int8 import Int8Weight
from engine.model.linear import linear
from engine.model.weights import open_model
from tests.engine import tiny
from tests.engine.drive import run, run_all
from tests.engine.test_prefix import job, prompt

LICENSE = Path(__file__).parents[2] / "LICENSE"


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
    core = tiny.core(int8_decode=True)
    ids = prompt(30)
    alone = run(core, job("a", ids, tokens=20)).tokens
    crowd = run_all(core, [job(str(i), ids if i == 2 else prompt(12, i), tokens=20) for i in range(5)])
    assert crowd["2"].tokens == alone


def test_perplexity_on_the_real_model_stays_within_five_percent() -> None:
    core = EngineCore(EngineConfig(kv_bytes=256 << 20, int8_decode=True), open_model("smollm2-135m-instruct"))
    ids = core.tokenizer.encode(LICENSE.read_text()[:2500])[:500]
    targets = torch.tensor(ids[1:])

    def perplexity(*, decode: bool) -> float:
        hidden = core.model.hidden(torch.tensor(ids), torch.arange(len(ids)), Causal(), decode=decode)
        return float(F.cross_entropy(core.model.logits(hidden, decode=decode)[:-1], targets).exp())

    exact, quantised = perplexity(decode=False), perplexity(decode=True)
    print(f"perplexity: float32 {exact:.3f}, int8 {quantised:.3f}")
    assert exact < 20  # an English text that the model has seen the like of
    assert quantised < exact * 1.05


class Causal:
    """Attention of one whole text over itself, without a cache."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)
