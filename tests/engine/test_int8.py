"""int8 decode: close to the exact product, row by row independent, and never in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llvmlite.binding import get_host_cpu_features

from engine.attention import Row
from engine.compiled.passes import product
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.decoding import Decoder, TorchDecoder, quickest_decoder
from engine.model.int8 import Int8Weight
from engine.model.weights import open_model
from tests.engine import tiny
from tests.engine.drive import run, run_all
from tests.engine.test_prefix import job, prompt

LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [96, 128])
def test_products_are_close_and_rows_are_independent(outputs: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, 64, generator=generator)
    x = torch.randn(5, 64, generator=generator) * torch.tensor([0.01, 1, 1, 10, 100])[:, None]
    quick = Int8Weight(weight.to(dtype))

    def multiplied(rows: torch.Tensor) -> torch.Tensor:
        sums = np.zeros((8, 128), np.float32)
        product(np.empty(0, np.int8), quick.tiles, rows.numpy(), sums[: -(-len(rows) // 4) * 4])
        return torch.from_numpy(sums[: len(rows), :outputs]) * quick.scale[:outputs]

    exact, quantised = x @ weight.T, multiplied(x)
    assert ((exact - quantised).norm(dim=1) / exact.norm(dim=1)).max() < 0.02
    for row in range(5):
        assert torch.equal(multiplied(x[row : row + 1])[0], quantised[row])
    assert not multiplied(torch.zeros(1, 64)).any()
    assert not Int8Weight(torch.zeros(3, 64)).scale.isnan().any()


def test_answers_do_not_depend_on_company_or_reuse() -> None:
    core = tiny.core(int8_decode=True)
    ids = prompt(30)
    alone = run(core, job("a", ids, tokens=20)).tokens
    crowd = run_all(core, [job(str(i), ids if i == 2 else prompt(12, i), tokens=20) for i in range(5)])
    assert crowd["2"].tokens == alone


@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if get_host_cpu_features().get("avx512bf16") else [])])
def test_perplexity_on_the_real_model_stays_within_five_percent(dtype: str) -> None:
    config = EngineConfig(kv_bytes=256 << 20, int8_decode=True, dtype=dtype)
    core = EngineCore(config, open_model("smollm2-135m-instruct"))
    ids = core.tokenizer.encode(LICENSE.read_text()[:2500])[:500]
    blocks = Blocks([*range(len(ids) // core.pool.block_size + 1)])
    rows = [Row(blocks, at, token) for at, token in enumerate(ids)]  # as if all were a draft

    def perplexity(decoder: Decoder) -> float:
        return float(F.cross_entropy(decoder.run(rows)[1][:-1], torch.tensor(ids[1:])).exp())

    exact, quantised = (
        perplexity(TorchDecoder(core.model, core.pool)),
        perplexity(quickest_decoder(core.model, core.pool)),
    )
    print(f"perplexity: {dtype} {exact:.3f}, int8 {quantised:.3f}")
    assert exact < 20  # an English text that the model has seen the like of
    assert exact != quantised < exact * 1.05


@dataclass
class Blocks:
    """All that a decoder asks of a sequence."""

    blocks: list[int]
