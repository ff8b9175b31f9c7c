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
    """A model's parameters: where its matrices lie (qkv, o, gate and up, down of each layer), and the rest.

    embedding: stored [vocab, hidden]; matrices: int64 [layers, 4]; attn_norm, ffn_norm: float32 [layers, hidden]; bias:
    float32 [layers, qkv] or [layers, 0]; norm: float32 [hidden]; head: address.
    """

    embedding: Array
    matrices: Array
    attn_norm: Array
    ffn_norm: Array
    bias: Array
    norm: Array
    head: int


class Scratch(NamedTuple):
    """Memory of a pass, [rows, …] for a multiple of four rows: sums in float32, the rest stored.

    Inputs of products once more as their columns.
    """

    sums: Array
    normed: Array
    normed_columns: Array
    qkv: Array
    attended: Array
    attended_columns: Array
    gate_up: Array
    gated: Array
    gated_columns: Array
    out: Array


@compiled
def run_layers(a: Attention, w: Weights, s: Scratch, rows: Array, blocks: Array, layers: int) -> Array:
    """Runs so many layers for rows as in `lay_out`. Returns their hidden states, float32 [rows, hidden].

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
            norm(x[row], w.attn_norm[layer], a.eps, s.normed[row])
        if len(places) <= _FETCHED:
            fetch(a, layer, places)
        multiply(w.matrices[layer, 0], s.normed_columns, s, w.bias[layer], s.qkv, count)
        for row in range(count):
            remember(a, layer, s.qkv[row], rows[row, 1], places[ends[row] - 1])
        for row in range(count):
            attend(a, layer, s.qkv[row], places[ends[row] - rows[row, 1] - 1 : ends[row]], s.attended[row])
        multiply(w.matrices[layer, 1], s.attended_columns, s, none, s.out, count)
        for row in range(count):
            add(x[row], s.out[row])
            norm(x[row], w.ffn_norm[layer], a.eps, s.normed[row])
        multiply(w.matrices[layer, 2], s.normed_columns, s, none, s.gate_up, count)
        for row in range(count):
            gate(s.gate_up[row], s.gated[row])
        multiply(w.matrices[layer, 3], s.gated_columns, s, none, s.out, count)
        for row in range(count):
            add(x[row], s.out[row])
    return x


@compiled
def run_head(a: Attention, w: Weights, s: Scratch, x: Array) -> Array:
    """The last norm and the head. x: float32 [rows, hidden]. Returns float32 [rows, outputs of the head's tiles]."""
    for row in range(len(x)):
        norm(x[row], w.norm, a.eps, s.normed[row])
    out = np.empty(((len(x) + 3) // 4 * 4, (len(w.embedding) + 63) // 64 * 64), np.float32)
    product(w.head, s.normed_columns[: len(x)], out)
    return out[: len(x)]


@compiled
def multiply(address: int, x: Array, s: Scratch, bias: Array, out: Array, rows: int) -> None:
    """out = x @ W.T + bias for so many rows, stored."""
    width = (out.shape[1] + 63) // 64 * 64
    sums = s.sums[: (rows + 3) // 4 * 4 * width].reshape(-1, width)
    product(address, x[:rows], sums)
    for row in range(rows):
        settle(sums[row], bias, out[row])


@compiled
def product(address: int, x: Array, out: Array) -> None:
    """out = x @ W.T, each sum taken in the order of the inputs.

    W lies at `address` in tiles of 64 outputs, [outputs / 64, columns, 64]; a column is one input in float32 (x:
    float32), or two in bfloat16 (x: uint32). x: [rows, columns]; out: float32 [rows, outputs], the outputs a multiple
    of 64. There must be memory behind both for a multiple of four rows. A tile is read once from memory, for further
    rows from the cache.
    """
    rows, size = x.shape
    for at in range(0, out.shape[1], 64):
        for row in range(0, rows, 4):
            here = address + at * size * 4
            if row == rows - 1:
                one = tile_of_1()
                for column in range(size):
                    one = add_column(one, here, x, row, column)
                    here += 256
                store_tile(out, row, at, one)
            else:
                four = tile_of_4()
                for column in range(size):
                    four = add_column(four, here, x, row, column)
                    here += 256
                store_tile(out, row, at, four)
