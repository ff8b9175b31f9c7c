"""Rows of one pass have no part in each other's arithmetic: not in the packed products, not in attention.

So a sequence's numbers do not depend on its company, and guessed tokens may ride along. Bitwise, in both dtypes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.nn.functional as F

from engine.attention import DecodeAttention, Row
from engine.kv.pool import KVPool
from engine.model.linear import linear, packed
from engine.model.spec import ModelSpec
from tests.engine import tiny

DTYPES = [torch.float32, torch.bfloat16]
SPEC = ModelSpec(**{**vars(tiny.SPEC), "heads": 6, "head_dim": 16})


@dataclass
class Blocks:
    """All that attention asks of a sequence."""

    blocks: list[int]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "into"), [(960, 576), (576, 1536), (96, 32), (258, 32)])
def test_packed_products_are_exact_and_rows_are_independent(dtype: torch.dtype, out: int, into: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(out, into, generator=generator) / into**0.5).to(dtype)
    x = torch.randn(64, into, generator=generator).to(dtype)
    quick = packed(weight)
    whole = linear(x, quick)
    error = (whole.double() - F.linear(x.double(), weight.double())).abs().max()
    assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    for rows in (*range(4, 20, 4), 32, 48):
        for first in range(0, 64 - rows, rows):
            assert torch.equal(linear(x[first : first + rows], quick), whole[first : first + rows])
    bias = torch.ones(out, dtype=dtype)
    assert (linear(x, quick, bias).double() - whole.double() - 1).abs().max() < 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_attends_to_the_same_bits_in_any_company_wherever_its_blocks_lie(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    torch.manual_seed(3)
    pool = KVPool(SPEC, 160, 16, device=torch.device("cpu"), dtype=dtype)
    for trial in range(12):
        free = rng.sample(range(160), 160) if trial % 2 else [*range(160)]
        rows: list[Row] = []
        for _ in range(rng.randint(1, 6)):
            length = rng.choice([1, 16, 100, 127, 128, 129, 200, 256, 300])
            blocks = [free.pop(0) for _ in range(-(-(length + 3) // 16))]
            shared = Blocks(blocks)  # the rows of a draft lie behind each other
            rows += [Row(shared, length - 1 + at, 0) for at in range(rng.choice([1, 1, 3]))]
        rows.sort(key=lambda row: row.spans)
        q = torch.randn(len(rows), SPEC.heads, SPEC.head_dim).to(dtype)
        k, v = (torch.randn(len(rows), SPEC.kv_heads, SPEC.head_dim).to(dtype) for _ in range(2))
        filling(pool, rows)
        together = DecodeAttention(pool, rows, 3)(0, q, k, v)
        assert not together[len(rows) :].any()
        for at, row in enumerate(rows):
            alone = DecodeAttention(pool, [row], 0)(0, q[at : at + 1], k[at : at + 1], v[at : at + 1])
            assert torch.equal(alone[0], together[at])
            assert (together[at].double() - expected(pool, row, q[at])).abs().max() < 3e-2


def filling(pool: KVPool, rows: Tokens[Row]) -> None:
    """Something to see at every position."""
    for row in rows:
        slots = pool.slots(row.sequence.blocks, 0, row.position + 1)
        k, v = (torch.randn(len(slots), SPEC.kv_heads, SPEC.head_dim).to(pool.dtype) for _ in range(2))
        pool.write(0, slots, k, v)


def expected(pool: KVPool, row: Row, q: torch.Tensor) -> torch.Tensor:
    """Attention of one row, written down plainly."""
    keys, values = (part[0] for part in pool.read(0, pool.table([row.sequence.blocks], row.position + 1)))
    heads = torch.arange(SPEC.heads) // pool.group
    scores = torch.einsum("hd,lhd->hl", q.double(), keys[:, heads].double()) / SPEC.head_dim**0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values[:, heads].double()).flatten()


def test_a_fresh_pool_holds_zeros_and_takes_memory_only_as_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    pool = KVPool(SPEC, 1 << 15, 32, device=torch.device("cpu"), dtype=torch.float32)
    assert process.memory_info().rss - before < 16 << 20
    assert pool.block_bytes(SPEC, 32, torch.float32) << 15 > 128 << 20
    keys, values = pool.read(1, pool.table([[7]], 32))
    assert not keys.any()
    assert not values.any()
