"""What a decode pass does to its rows, compiled for this machine's CPU.

Arrays of "stored" numbers are float32, or bfloat16 as uint16; all is computed in float32. No function lets the compiler
reorder a sum, so a row's bits do not depend on the other rows, nor on what a function was compiled into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from engine.compiled.lanes import (
    add_column,
    fma,
    get,
    larger,
    load,
    plus,
    power_of_two,
    put,
    splat,
    store,
    store_tile,
    store_totals,
    tile,
    total,
)

Array = Any
"""A NumPy array; Numba compiles these functions for the dtypes that they are called with."""


def compiled(function: Callable[..., Any]) -> Any:
    """Without the GIL; division by zero gives infinity; the machine code is kept for the next start where it can be."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written
        return njit(**options)(function)


_ZERO, _ONE = np.float32(0), np.float32(1)


class Shape(NamedTuple):
    """The sizes of a model."""

    heads: int
    kv_heads: int
    head_dim: int


class Attention(NamedTuple):
    """All that attention of any layer needs beside its input: parameters (empty where there are none), angles, memory.

    q_norm, k_norm: float32 [layers, head_dim]; cos, sin: float32 [context, head_dim]; kv: stored [layers, 2, slots *
    kv_heads * head_dim]. Scratch for four heads, float32: query [4 * head_dim], scores [(context + 4) * 4], most [16].
    """

    shape: Shape
    eps: float
    q_norm: Array
    k_norm: Array
    cos: Array
    sin: Array
    kv: Array
    query: Array
    scores: Array
    most: Array


tile_of_1, tile_of_4 = tile(1), tile(4)


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


@compiled
def exp(x: Any) -> Any:
    """e**x to within 2 units in the last place; 0 below -87."""
    x = max(x, np.float32(-87.3))
    whole = np.float32(math.floor(fma(x, np.float32(1.442695041), np.float32(0.5))))
    rest = fma(whole, np.float32(-0.693359375), x)
    rest = fma(whole, np.float32(2.12194440e-4), rest)
    y = np.float32(1.9875691500e-4)
    y = fma(y, rest, np.float32(1.3981999507e-3))
    y = fma(y, rest, np.float32(8.3334519073e-3))
    y = fma(y, rest, np.float32(4.1665795894e-2))
    y = fma(y, rest, np.float32(1.6666665459e-1))
    y = fma(y, rest, np.float32(5.0000001201e-1))
    y = fma(y, rest * rest, rest + _ONE)
    return y * power_of_two(whole)


@compiled
def dot(a: Array, at: int, b: Array, start: int, size: int) -> Any:
    """The sum of a[at + i] * b[start + i]."""
    sums = splat(_ZERO)
    whole = size - size % 16
    for i in range(0, whole, 16):
        sums = fma(load(a, at + i), load(b, start + i), sums)
    out = total(sums)
    for i in range(whole, size):
        out = fma(get(a, at + i), get(b, start + i), out)
    return out


@compiled
def norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """Root mean square norm (arXiv:1910.07467). x, weight: float32; out: stored."""
    scale = _ONE / np.float32(math.sqrt(dot(x, 0, x, 0, len(x)) / np.float32(len(x)) + np.float32(eps)))
    for i in range(len(x)):
        put(out, i, x[i] * scale * weight[i])


@compiled
def add(x: Array, more: Array) -> None:
    """x += more. x: float32; more: stored."""
    for i in range(len(x)):
        x[i] += get(more, i)


@compiled
def gate(gate_up: Array, out: Array) -> None:
    """SiLU of the first half times the second half. Stored both."""
    size = len(out)
    for i in range(size):
        value = get(gate_up, i)
        put(out, i, value / (_ONE + exp(-value)) * get(gate_up, size + i))


@compiled
def rotate(head: Array, weight: Array, eps: float, cos: Array, sin: Array, out: Array, at: int) -> None:
    """Writes a head's numbers at out[at], normed if there is a weight, and turned (in halves; `sin` has the sign).

    head: stored; out: stored.
    """
    size, half = len(head), len(head) // 2
    scale = _ONE
    if len(weight):
        scale = _ONE / np.float32(math.sqrt(dot(head, 0, head, 0, size) / np.float32(size) + np.float32(eps)))
    for i in range(size):
        other = i + half if i < half else i - half
        one, two = get(head, i) * scale, get(head, other) * scale
        if len(weight):
            one, two = one * weight[i], two * weight[other]
        put(out, at + i, fma(two, sin[i], one * cos[i]))


@compiled
def remember(a: Attention, layer: int, qkv: Array, position: int, place: int) -> None:
    """Writes the keys and values of a row into the pool, at `place`. qkv: stored."""
    shape = a.shape
    size = shape.head_dim
    keys, values = a.kv[layer, 0], a.kv[layer, 1]
    for head in range(shape.kv_heads):
        at = (shape.heads + head) * size
        rotate(qkv[at : at + size], a.k_norm[layer], a.eps, a.cos[position], a.sin[position], keys, place + head * size)
        at += shape.kv_heads * size
        for i in range(size):
            values[place + head * size + i] = qkv[at + i]


@compiled
def attend(a: Attention, layer: int, qkv: Array, places: Array, out: Array) -> None:
    """Attention of one row to what lies at `places` (its own is the last). qkv, out: stored; places: int64 [tokens].

    Four query heads that share a key head go together, so that a key or value is read once for them.
    """
    shape = a.shape
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    cos, sin = a.cos[len(places) - 1], a.sin[len(places) - 1]
    for shared in range(shape.kv_heads):
        for first in range(shared * group, (shared + 1) * group, 4):
            heads = min(4, (shared + 1) * group - first)
            for head in range(heads):
                at = (first + head) * size
                rotate(qkv[at : at + size], a.q_norm[layer], a.eps, cos, sin, a.query, head * size)
            score(a, a.kv[layer, 0], places, shared * size)
            shares(a, len(places))
            gather(a, a.kv[layer, 1], places, shared * size)
            for head in range(heads):
                for i in range(size):
                    put(out, (first + head) * size + i, a.query[head * size + i] * a.most[head])


@compiled
def score(a: Attention, keys: Array, places: Array, inside: int) -> None:
    """scores[token, head] = the head's query times the token's key, over the root of the size."""
    size, query, zero = a.shape.head_dim, a.query, splat(_ZERO)
    scale = _ONE / np.float32(math.sqrt(np.float32(size)))
    whole = size - size % 16
    for t in range(len(places)):
        place = places[t] + inside
        s0 = s1 = s2 = s3 = zero
        for i in range(0, whole, 16):
            key = load(keys, place + i)
            s0 = fma(load(query, i), key, s0)
            s1 = fma(load(query, size + i), key, s1)
            s2 = fma(load(query, 2 * size + i), key, s2)
            s3 = fma(load(query, 3 * size + i), key, s3)
        store_totals(a.scores, 4 * t, s0, s1, s2, s3)
        for i in range(whole, size):
            for head in range(4):
                more = get(query, head * size + i) * get(keys, place + i)
                put(a.scores, 4 * t + head, get(a.scores, 4 * t + head) + more)
        for head in range(4):
            put(a.scores, 4 * t + head, get(a.scores, 4 * t + head) * scale)


@compiled
def shares(a: Attention, tokens: int) -> None:
    """Softmax but for a factor: turns scores into powers of e, the largest 1, and `most` into one over their sums."""
    scores, most, minus_infinity = a.scores, a.most, -np.float32(np.inf)
    end = (4 * tokens + 15) // 16 * 16
    for i in range(4 * tokens, end):
        scores[i] = minus_infinity
    lanes = splat(minus_infinity)
    for i in range(0, end, 16):
        lanes = larger(lanes, load(scores, i))
    store(most, 0, lanes)
    for i in range(16):  # a lane's head is its number modulo four
        head = i % 4
        most[i] = max(max(most[head], most[head + 4]), max(most[head + 8], most[head + 12]))
    for i in range(0, end, 16):
        for lane in range(16):
            put(scores, i + lane, exp(get(scores, i + lane) - get(most, lane)))
    lanes = splat(_ZERO)
    for i in range(0, end, 16):
        lanes = plus(lanes, load(scores, i))
    store(most, 0, lanes)
    for head in range(4):
        most[head] = _ONE / ((most[head] + most[head + 4]) + (most[head + 8] + most[head + 12]))


@compiled
def gather(a: Attention, values: Array, places: Array, inside: int) -> None:
    """query[head] = the sum of the tokens' values, each times its share."""
    size, query, scores, zero = a.shape.head_dim, a.query, a.scores, splat(_ZERO)
    whole = size - size % 16
    for i in range(0, whole, 16):
        s0 = s1 = s2 = s3 = zero
        for t in range(len(places)):
            value = load(values, places[t] + inside + i)
            s0 = fma(splat(get(scores, 4 * t)), value, s0)
            s1 = fma(splat(get(scores, 4 * t + 1)), value, s1)
            s2 = fma(splat(get(scores, 4 * t + 2)), value, s2)
            s3 = fma(splat(get(scores, 4 * t + 3)), value, s3)
        store(query, i, s0)
        store(query, size + i, s1)
        store(query, 2 * size + i, s2)
        store(query, 3 * size + i, s3)
    for i in range(whole, size):
        for head in range(4):
            total = _ZERO
            for t in range(len(places)):
                total = fma(get(scores, 4 * t + head), get(values, places[t] + inside + i), total)
            put(query, head * size + i, total)


class Weights(NamedTuple):
    """A model's parameters: where its matrices lie (qkv, o, gate and up, down of each layer), and the small ones.

    matrices: int64 [layers, 4]; attn_norm, ffn_norm: float32 [layers, hidden]; bias: float32 [layers, qkv] or
    [layers, 0]; norm: float32 [hidden]; head: address.
    """

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
def multiply(address: int, x: Array, s: Scratch, bias: Array, out: Array, rows: int) -> None:
    """out = x @ W.T + bias for so many rows, stored."""
    width = (out.shape[1] + 63) // 64 * 64
    sums = s.sums[: (rows + 3) // 4 * 4 * width].reshape(-1, width)
    product(address, x[:rows], sums)
    for row in range(rows):
        settle(sums[row], bias, out[row])


@compiled
def run_layers(a: Attention, w: Weights, s: Scratch, x: Array, places: Array, ends: Array, layers: int) -> None:
    """Turns the rows' embeddings x, float32 [rows, hidden], into their hidden states after so many layers.

    Row r sees what lies at places[ends[r - 1] : ends[r]], itself last. First the keys and values of all rows are
    written: the rows of a draft see each other.
    """
    rows, none = len(x), x[0, :0]
    for layer in range(layers):
        for row in range(rows):
            norm(x[row], w.attn_norm[layer], a.eps, s.normed[row])
        multiply(w.matrices[layer, 0], s.normed_columns, s, w.bias[layer], s.qkv, rows)
        for row in range(rows):
            first = ends[row - 1] if row else 0
            remember(a, layer, s.qkv[row], ends[row] - first - 1, places[ends[row] - 1])
        for row in range(rows):
            first = ends[row - 1] if row else 0
            attend(a, layer, s.qkv[row], places[first : ends[row]], s.attended[row])
        multiply(w.matrices[layer, 1], s.attended_columns, s, none, s.out, rows)
        for row in range(rows):
            add(x[row], s.out[row])
            norm(x[row], w.ffn_norm[layer], a.eps, s.normed[row])
        multiply(w.matrices[layer, 2], s.normed_columns, s, none, s.gate_up, rows)
        for row in range(rows):
            gate(s.gate_up[row], s.gated[row])
        multiply(w.matrices[layer, 3], s.gated_columns, s, none, s.out, rows)
        for row in range(rows):
            add(x[row], s.out[row])


@compiled
def run_head(a: Attention, w: Weights, s: Scratch, x: Array, out: Array) -> None:
    """The last norm and the head. x: float32 [rows, hidden]; out: float32 [rows, vocab]."""
    for row in range(len(x)):
        norm(x[row], w.norm, a.eps, s.normed[row])
    multiply(w.head, s.normed_columns, s, x[0, :0], out, len(x))


@compiled
def settle(sums: Array, bias: Array, out: Array) -> None:
    """Stores sums, with a bias if there is one."""
    if len(bias):
        for i in range(len(out)):
            put(out, i, sums[i] + bias[i])
    else:
        for i in range(len(out)):
            put(out, i, sums[i])
