"""Decode passes in machine code, whole: as fast as memory gives the weights, where torch needs a thousand small calls.

The matrices are read where oneDNN has packed them for prefills, if that is in tiles which are understood here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from copy import copy

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features
from torch import Tensor

from engine.attention import Row
from engine.compiled.arrays import columns, stacked, stored
from engine.compiled.attention import Attention, Shape
from engine.compiled.jit import Array
from engine.compiled.passes import Input, Scratch, Weights, run_pass
from engine.errors import ModelError
from engine.kv.pool import KVPool
from engine.model.int8 import Int8Weight
from engine.model.linear import PackedWeight
from engine.model.llama import Llama

Tiled = PackedWeight | Int8Weight
"""What has its numbers in tiles."""

_NONE = np.zeros(0, np.float32)


class CompiledDecoder:
    """Computes decode rows of a model whose keys and values are in `pool`. See `Decoder`. `of` makes one if it can.

    Each row is computed as if it were alone, but for the reading of weights: the bits do not depend on its company.
    """

    def __init__(self, model: Llama, pool: KVPool, matrices: Rows[Tiled]) -> None:
        """`matrices`: four of each layer, in order, and the head."""
        spec, layers = model.spec, model.layers
        self._model, self._pool = model, pool
        self._attention = Attention(
            shape=Shape(spec.heads, spec.kv_heads, spec.head_dim),
            eps=spec.norm_eps,
            q_norm=stacked([layer.q_norm for layer in layers]),
            k_norm=stacked([layer.k_norm for layer in layers]),
            cos=model.cos.numpy(),
            sin=model.sin.numpy(),
            kv=_by_layer(pool),
            block_size=pool.block_size,
            query=np.zeros(4 * spec.head_dim, np.float32),
            scores=np.zeros(4 * (spec.context + 4), np.float32),
            most=np.zeros(16, np.float32),
        )
        scales = [matrix.scale.numpy() if isinstance(matrix, Int8Weight) else _NONE for matrix in matrices]
        first = [0, *itertools.accumulate(map(len, scales))]
        table = np.array([(matrix.tiles, at) for matrix, at in zip(matrices, first, strict=False)])
        self._weights = Weights(
            kind=stored(model.embed[:0, 0]),
            embedding=stored(model.embed),
            matrices=table[:-1].reshape(spec.layers, 4, 2),
            head=table[-1],
            scales=np.concatenate(scales),
            attn_norm=stacked([layer.attn_norm for layer in layers]),
            ffn_norm=stacked([layer.ffn_norm for layer in layers]),
            bias=stacked([layer.qkv_bias for layer in layers]),
            norm=stacked([model.norm])[0],
        )
        self._scratch = self._memory(4)
        self.run([Row(_FirstBlock(), 0, 0)], layers=1)  # compiles, so that no request waits for it

    @classmethod
    def of(cls, model: Llama, pool: KVPool) -> CompiledDecoder | None:
        """For a model on a CPU whose matrices lie in tiles, or None. Raises `ModelError` if int8 cannot be had."""
        if model.device.type != "cpu" or not _can(model.dtype):
            if model.int8_head is not None:
                raise ModelError("int8_decode in bfloat16 takes a CPU with AVX512_BF16; float32 works on any")
            return None
        if model.int8_head is not None:
            return cls(model, pool, [*itertools.chain(*model.int8_layers), model.int8_head])
        matrices = [*itertools.chain(*(layer.matrices for layer in model.layers)), model.head]
        tiled = [matrix for matrix in matrices if isinstance(matrix, PackedWeight) and matrix.tiles]
        return cls(model, pool, tiled) if len(tiled) == len(matrices) else None

    def over(self, pool: KVPool) -> CompiledDecoder:
        """The same with another pool."""
        other = copy(self)
        other._pool, other._attention = pool, self._attention._replace(kv=_by_layer(pool), block_size=pool.block_size)
        return other

    def padded(self, rows: int) -> int:
        """How many rows a pass for so many has."""
        return rows

    def run(self, rows: Rows[Row], layers: int | None = None) -> tuple[Tensor, Tensor]:
        """Runs all layers (or the first `layers`). Returns the hidden states before the last norm, and the logits.

        float32 [rows, hidden] and [rows, vocab].
        """
        every = self._model.spec.layers
        plan, blocks = list[tuple[int, int, int]](), list[int]()
        for row in rows:
            if not 0 <= row.token < self._model.spec.vocab:  # nothing below checks either
                raise IndexError(f"there is no token {row.token}")
            if not 0 <= row.position < self._model.spec.context:
                raise IndexError(f"there is no position {row.position}")
            plan.append((row.token, row.position, len(blocks)))
            blocks += row.sequence.blocks[: row.position // self._pool.block_size + 1]
        scratch, layers = self._scratch_for(len(rows)), min(layers or every, every)
        hidden, logits = run_pass(self._attention, self._weights, scratch, np.array(plan), np.array(blocks), layers)
        return torch.from_numpy(hidden), torch.from_numpy(logits)

    def _scratch_for(self, rows: int) -> Scratch:
        if rows > len(self._scratch.qkv):
            self._scratch = self._memory(-(-rows // 4) * 4)
        return self._scratch

    def _memory(self, rows: int) -> Scratch:
        spec = self._model.spec
        heads = spec.heads * spec.head_dim
        sizes = (spec.hidden, heads + 2 * spec.kv_heads * spec.head_dim, heads, 2 * spec.ffn, spec.ffn, spec.hidden)
        normed, qkv, attended, gate_up, gated, out = (torch.zeros(rows, n, dtype=self._model.dtype) for n in sizes)
        return Scratch(
            sums=np.zeros(rows * (max(*sizes, spec.vocab) + 64), np.float32),
            wide=np.zeros(rows * max(sizes), np.float32),
            normed=Input(stored(normed), columns(normed)),
            qkv=stored(qkv),
            attended=Input(stored(attended), columns(attended)),
            gate_up=stored(gate_up),
            gated=Input(stored(gated), columns(gated)),
            out=stored(out),
        )


def _can(dtype: torch.dtype) -> bool:
    """Whether this machine has the instruction that sums pairs of bfloat16."""
    return dtype == torch.float32 or bool(get_host_cpu_features().get("avx512bf16"))


def _by_layer(pool: KVPool) -> Array:
    return stored(pool.memory).reshape(len(pool.memory), 2, -1)


class _FirstBlock:
    @property
    def blocks(self) -> list[int]:
        return [0]
