"""A pass of one row, whole: it reads the matrices where oneDNN has packed them, as fast as memory gives them.

oneDNN's own products of so few rows take twice that. The order of oneDNN's sums is known but for how many columns it
takes at once, so that is found by trying, and the row's bits are those that it has among other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor

from engine.compiled import kernels
from engine.compiled.arrays import columns, stacked, stored
from engine.compiled.kernels import Array, Attention
from engine.model.linear import PackedWeight, linear
from engine.model.llama import Llama

_AT_ONCE = (512, 1024, 2048)
"""Inputs that oneDNN is known to sum at once, where a matrix has more."""

_TRIED = 64
"""Rows by which an order is told from another, in bfloat16 too, which hides most differences."""


class LoneRow:
    """Passes of one row. `of` makes one, where this machine's products are understood."""

    def __init__(self, model: Llama, matrices: Sequence[Sequence[PackedWeight]], head: PackedWeight) -> None:
        spec, layers = model.spec, model.layers
        self._head = head
        self._norm = model.norm.float().numpy()
        self._eps = spec.norm_eps
        orders = [order(matrix) for matrix in (*matrices[0], head)]
        self.understood = all(orders)
        self._head_block = orders[-1]
        self._matrices = kernels.Matrices(
            addresses=np.array([[matrix.address for matrix in row] for row in matrices]),
            blocks=np.array(orders[:-1]),
            attn_norm=stacked([layer.attn_norm for layer in layers]),
            ffn_norm=stacked([layer.ffn_norm for layer in layers]),
            bias=stacked([layer.qkv_bias for layer in layers]),
        )
        heads = spec.heads * spec.head_dim
        sizes = (spec.hidden, heads + 2 * spec.kv_heads * spec.head_dim, heads, 2 * spec.ffn, spec.ffn, spec.hidden)
        normed, qkv, attended, gate_up, gated, out = (torch.zeros(size, dtype=model.dtype) for size in sizes)
        self._normed = normed
        self._scratch = kernels.Scratch(
            wide=np.zeros(max(*sizes, spec.vocab) + 64, np.float32),
            normed=stored(normed),
            normed_columns=columns(normed),
            qkv=stored(qkv),
            attended=stored(attended),
            attended_columns=columns(attended),
            gate_up=stored(gate_up),
            gated=stored(gated),
            gated_columns=columns(gated),
            out=stored(out),
        )

    @classmethod
    def of(cls, model: Llama) -> LoneRow | None:
        """For a model whose matrices are packed in an order that this machine's own products confirm, or None."""
        matrices = [[layer.qkv, layer.o, layer.gate_up, layer.down] for layer in model.decode_layers]
        head = model.decode_head
        packed = [[matrix for matrix in row if isinstance(matrix, PackedWeight)] for row in matrices]
        if not isinstance(head, PackedWeight) or any(len(row) < 4 for row in packed):
            return None
        lone = cls(model, packed, head)
        return lone if lone.understood else None

    def hidden(self, attention: Attention, x: Array, places: Array, layers: int) -> None:
        """Turns a row's embedding, float32 [hidden], into its hidden state after so many layers."""
        kernels.lone_hidden(attention, self._matrices, self._scratch, x, places, layers)

    def logits(self, x: Array) -> Tensor:
        """float32 [vocab] of a hidden state."""
        out = torch.empty(self._head.outputs, dtype=self._normed.dtype)
        kernels.lone_logits(self._scratch, x, self._norm, self._eps, self._head.address, self._head_block, stored(out))
        return out.float()


def order(weight: PackedWeight) -> int:
    """Over how many columns oneDNN sums at once in products with this weight; 0 if they are not understood."""
    inputs, padded = weight.inputs, -(-weight.outputs // 64) * 64
    if weight.bytes != padded * inputs * weight.dtype.itemsize or not _can(weight.dtype):
        return 0
    x = torch.randn(_TRIED, inputs, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    expected, by_columns = linear(x, weight), columns(x)
    out, wide, no_bias = torch.empty_like(expected), np.empty(padded, np.float32), np.zeros(0, np.float32)
    for at_once in (*(size for size in _AT_ONCE if size < inputs), inputs):
        block = at_once * by_columns.shape[1] // inputs
        for row in range(_TRIED):
            kernels.product(weight.address, by_columns[row], block, wide)
            kernels.settle(wide, no_bias, stored(out[row]))
        if torch.equal(out, expected):
            return block
    return 0


def _can(dtype: torch.dtype) -> bool:
    """Whether this machine has the instruction that sums pairs of bfloat16."""
    return dtype == torch.float32 or bool(get_host_cpu_features().get("avx512bf16"))
