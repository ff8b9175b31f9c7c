"""Decode passes in machine code: all that lies between matrix products, and for a lone row the products too.

In torch it is a thousand small calls, each of which finds caches that the weights have emptied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from copy import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import Row
from engine.compiled import kernels
from engine.compiled.arrays import stacked, stored
from engine.compiled.kernels import Array
from engine.compiled.lone import LoneRow
from engine.kv.pool import KVPool
from engine.model.linear import linear
from engine.model.llama import Llama

_ROWS = 4
"""Products are quickest for multiples of this, and then a row has the same bits at any number of rows."""


class CompiledDecoder:
    """Computes decode rows of a model on the CPU, whose keys and values are in `pool`. See `Decoder`."""

    def __init__(self, model: Llama, pool: KVPool) -> None:
        spec, layers = model.spec, model.decode_layers
        self._model, self._pool = model, pool
        self._attention = kernels.Attention(
            shape=kernels.Shape(spec.heads, spec.kv_heads, spec.head_dim),
            eps=spec.norm_eps,
            q_norm=stacked([layer.q_norm for layer in layers]),
            k_norm=stacked([layer.k_norm for layer in layers]),
            cos=model.cos.numpy(),
            sin=model.sin.numpy(),
            kv=_by_layer(pool),
            query=np.zeros(spec.head_dim, np.float32),
            scores=np.zeros(spec.context + 16, np.float32),
        )
        self._attn_norm = stacked([layer.attn_norm for layer in layers])
        self._ffn_norm = stacked([layer.ffn_norm for layer in layers])
        self._norm = stacked([model.norm])[0]
        self._lone = LoneRow.of(model)

    def over(self, pool: KVPool) -> CompiledDecoder:
        """The same with another pool."""
        other = copy(self)
        other._pool, other._attention = pool, self._attention._replace(kv=_by_layer(pool))
        return other

    def padded(self, rows: int) -> int:
        """How many rows a pass for so many has."""
        if self._model.int8_decode or (rows == 1 and self._lone is not None):
            return rows  # sums of integers are exact in any order
        return -(-rows // _ROWS) * _ROWS

    @torch.inference_mode()
    def hidden(self, rows: Rows[Row], layers: int | None = None) -> Tensor:
        """Runs all layers (or the first `layers`). Returns float32 [rows, hidden], before the last norm."""
        spec, seen = self._model.spec, [self._places(row) for row in rows]
        ids = torch.tensor([row.token for row in rows] + [0] * (self.padded(len(rows)) - len(rows)))
        x = F.embedding(ids, self._model.embed).float()
        if len(rows) == 1 and self._lone is not None:
            self._lone.hidden(self._attention, x[0].numpy(), seen[0], min(layers or spec.layers, spec.layers))
            return x
        rows_of_x, eps = x.numpy(), spec.norm_eps
        places, ends = np.concatenate(seen), np.array([*itertools.accumulate(map(len, seen))])
        sizes = (spec.hidden, spec.heads * spec.head_dim, spec.ffn)
        normed, attended, gated = (torch.zeros(len(ids), size, dtype=self._model.dtype) for size in sizes)
        for index, layer in enumerate(self._model.decode_layers[:layers]):
            kernels.norm_rows(rows_of_x, self._attn_norm[index], eps, stored(normed))
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            kernels.attend_rows(self._attention, index, stored(qkv), places, ends, stored(attended))
            kernels.add_rows(rows_of_x, stored(linear(attended, layer.o)))
            kernels.norm_rows(rows_of_x, self._ffn_norm[index], eps, stored(normed))
            kernels.gate_rows(stored(linear(normed, layer.gate_up)), stored(gated))
            kernels.add_rows(rows_of_x, stored(linear(gated, layer.down)))
        return x[: len(rows)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        if len(hidden) == 1 and self._lone is not None:
            return self._lone.logits(hidden[0].numpy())[None]
        normed = torch.zeros(self.padded(len(hidden)), hidden.shape[1], dtype=self._model.dtype)
        kernels.norm_rows(hidden.numpy(), self._norm, self._model.spec.norm_eps, stored(normed))
        return linear(normed, self._model.decode_head)[: len(hidden)].float()

    def _places(self, row: Row) -> Array:
        """Where in a layer's keys (and values) lie those of the row's own position and all before it, int64."""
        size, spec = self._pool.block_size, self._model.spec
        blocks = np.array(row.sequence.blocks[: row.position // size + 1])
        slots = blocks[:, None] * size + np.arange(size)
        return slots.reshape(-1)[: row.position + 1] * (spec.kv_heads * spec.head_dim)


def _by_layer(pool: KVPool) -> Array:
    return stored(pool.memory).reshape(len(pool.memory), 2, -1)
