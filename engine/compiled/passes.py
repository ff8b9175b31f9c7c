"""A pass: all layers for some rows, and the head; with the matrix products, in which most of its time goes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled.attention import Attention, attend, fetch, lay_out, remember
from engine.compiled.jit import Array, compiled
from engine.compiled.lanes import add_column, get, store_tile, tile
from engine.compiled.rows import add, gate, norm, settle

_FETCHED = 512
"""Tokens whose keys and values are fetched ahead: so many stay in the cache until they are needed."""

tile_of_1, tile_of_4 = tile(1), tile(4)


class Weights(NamedTuple):
    """A model's parameters: where its matrices lie (qkv, o, gate and up, down of each layer; the head), and the rest.

    kind: no elements, of the packed matrices' dtype; embedding: stored [vocab, hidden]; matrices: int64 [layers, 4, 2];
    head: int64 [2]. A matrix is the address of its tiles and, in int8, the place of its scales in `scales`, float32,
    which is empty otherwise. attn_norm, ffn_norm: float32 [layers, hidden]; bias: float32 [layers, qkv] or [layers, 0];
    norm: float32 [hidden].
    """

    kind: Array
    embedding: Array
    matrices: Array
    head: Array
    scales: Array
    attn_norm: Array
    ffn_norm: Array
    bias: Array
    norm: Array


class Input(NamedTuple):
    """A product's inputs, [rows, …]: stored, and the same memory as columns; float32 and its columns are one."""

    stored: Array
    columns: Array


class Scratch(NamedTuple):
    """Memory of a pass, [rows, …] for a multiple of four rows. sums, wide: float32 without a shape; the rest stored."""

    sums: Array
    wide: Array
    normed: Input
    qkv: Array
    attended: Input
    gate_up: Array
    gated: Input
    out: Array


@compiled
def run_pass(a: Attention, w: Weights, s: Scratch, rows: Array, blocks: Array, layers: int) -> tuple[Array, Array]:
    """Runs so many layers for rows as in `lay_out`, and the head.

    Returns their hidden states before the last norm, float32 [rows, hidden], and their logits, float32 [rows, vocab].
    First the keys and values of all rows are written: the rows of a draft see each other.
    """
    places, ends = lay_out(a, rows, blocks)
    count, hidden = len(rows), w.embedding.shape[1]
    x = np.empty((count, hidden), np.float32)
    none = x[0, :0]
    for row in range(count):
        for i in range(hidden):
            x[row, i] = get(w.embedding[rows[row, 0]], i)
    for layer in range(layers):
        for row in range(count):
            norm(x[row], w.attn_norm[layer], a.eps, s.normed.stored[row])
        if len(places) <= _FETCHED:
            fetch(a, layer, places)
        multiply(w, w.matrices[layer, 0], s.normed, s, w.bias[layer], s.qkv, count)
        for row in range(count):
            remember(a, layer, s.qkv[row], rows[row, 1], places[ends[row] - 1])
        for row in range(count):
            attend(a, layer, s.qkv[row], places[ends[row] - rows[row, 1] - 1 : ends[row]], s.attended.stored[row])
        multiply(w, w.matrices[layer, 1], s.attended, s, none, s.out, count)
        for row in range(count):
            add(x[row], s.out[row])
            norm(x[row], w.ffn_norm[layer], a.eps, s.normed.stored[row])
        multiply(w, w.matrices[layer, 2], s.normed, s, none, s.gate_up, count)
        for row in range(count):
            gate(s.gate_up[row], s.gated.stored[row])
        multiply(w, w.matrices[layer, 3], s.gated, s, none, s.out, count)
        for row in range(count):
            add(x[row], s.out[row])
    for row in range(count):
        norm(x[row], w.norm, a.eps, s.normed.stored[row])
    vocab = len(w.embedding)
    logits = np.empty(((count + 3) // 4 * 4, (vocab + 63) // 64 * 64), np.float32)
    sum_up(w, w.head, s.normed, s, logits, count)
    return x, logits[:count, :vocab]


@compiled
def multiply(w: Weights, matrix: Array, x: Input, s: Scratch, bias: Array, out: Array, rows: int) -> None:
    """out = x @ W.T + bias for so many rows, stored."""
    width = (out.shape[1] + 63) // 64 * 64
    sums = s.sums[: (rows + 3) // 4 * 4 * width].reshape(-1, width)
    sum_up(w, matrix, x, s, sums, rows)
    for row in range(rows):
        settle(sums[row], bias, out[row])


@compiled
def sum_up(w: Weights, matrix: Array, x: Input, s: Scratch, sums: Array, rows: int) -> None:
    """sums = x @ W.T for so many rows; sums: float32, as in `product`."""
    address, scale = matrix[0], matrix[1]
    if len(w.scales):
        size = x.stored.shape[1]
        wide = s.wide[: (rows + 3) // 4 * 4 * size].reshape(-1, size)
        for row in range(rows):
            for i in range(size):
                wide[row, i] = get(x.stored[row], i)
        product(np.empty(0, np.int8), address, wide[:rows], sums)
        for row in range(rows):
            for i in range(sums.shape[1]):
                sums[row, i] *= w.scales[scale + i]
    else:
        product(w.kind, address, x.columns[:rows], sums)


@compiled
def product(kind: Array, address: int, x: Array, out: Array) -> None:
    """out = x @ W.T, each sum taken in the order of the inputs.

    W lies at `address` in tiles of 64 outputs, [outputs / 64, columns, 64]; of `kind` and columns, see `add_column`. x:
    [rows, columns]; out: float32 [rows, outputs], the outputs a multiple of 64. There must be memory behind both for a
    multiple of four rows. A tile is read once from memory, for further rows from the cache.
    """
    rows, size = x.shape
    step = 64 if kind.itemsize == 1 else 256
    for at in range(0, out.shape[1], 64):
        for row in range(0, rows, 4):
            here = address + at // 64 * size * step
            if row == rows - 1:
                one = tile_of_1()
                for column in range(size):
                    one = add_column(one, kind, here, x, row, column)
                    here += step
                store_tile(out, row, at, one)
            else:
                four = tile_of_4()
                for column in range(size):
                    four = add_column(four, kind, here, x, row, column)
                    here += step
                store_tile(out, row, at, four)
