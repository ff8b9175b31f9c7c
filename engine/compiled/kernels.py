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

from engine.compiled.lanes import add_column, fma, get, load, plus, power_of_two, put, splat, store, total

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
    kv_heads * head_dim]; queries: float32 [heads * head_dim]; scores: float32 [context + 16].
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


@compiled
def product(address: int, x: Array, block: int, out: Array) -> None:
    """out = W @ x, summed as oneDNN does: in order, over `block` columns at a time.

    W lies at `address` as oneDNN packs it, [outputs / 64, columns, 64]; a column is one input of float32 (x: float32),
    or two of bfloat16 (x: uint32). out: float32, its length a multiple of 64.
    """
    zero = splat(_ZERO)
    for at in range(0, len(out), 64):
        s0 = s1 = s2 = s3 = zero
        for first in range(0, len(x), block):
            t0 = t1 = t2 = t3 = zero
            for column in range(first, min(first + block, len(x))):
                value = x[column]
                t0 = add_column(t0, address, value)
                t1 = add_column(t1, address + 64, value)
                t2 = add_column(t2, address + 128, value)
                t3 = add_column(t3, address + 192, value)
                address += 256
            s0, s1, s2, s3 = plus(s0, t0), plus(s1, t1), plus(s2, t2), plus(s3, t3)
        store(out, at, s0)
        store(out, at + 16, s1)
        store(out, at + 32, s2)
        store(out, at + 48, s3)


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
    """Attention of one row to what lies at `places` (its own is the last). qkv, out: stored; places: int64 [tokens]."""
    shape, query, scores = a.shape, a.query, a.scores
    size, tokens = shape.head_dim, len(places)
    group = shape.heads // shape.kv_heads
    keys, values = a.kv[layer, 0], a.kv[layer, 1]
    scale = _ONE / np.float32(math.sqrt(np.float32(size)))
    whole = size - size % 16
    for head in range(shape.heads):
        inside = head // group * size
        at = head * size
        rotate(qkv[at : at + size], a.q_norm[layer], a.eps, a.cos[tokens - 1], a.sin[tokens - 1], query, 0)
        most = -np.float32(np.inf)
        for t in range(tokens):
            score = dot(query, 0, keys, places[t] + inside, size) * scale
            scores[t] = score
            most = max(most, score)
        for t in range(tokens):
            scores[t] = exp(scores[t] - most)
        scores[tokens : tokens + 16] = _ZERO
        sums = splat(_ZERO)
        for t in range(0, tokens, 16):
            sums = plus(sums, load(scores, t))
        share = _ONE / total(sums)
        for i in range(0, whole, 16):
            gathered = splat(_ZERO)
            for t in range(tokens):
                gathered = fma(splat(scores[t]), load(values, places[t] + inside + i), gathered)
            store(query, i, gathered)
        for i in range(whole, size):
            query[i] = _ZERO
            for t in range(tokens):
                query[i] = fma(scores[t], get(values, places[t] + inside + i), query[i])
        for i in range(size):
            put(out, at + i, query[i] * share)


@compiled
def norm_rows(x: Array, weight: Array, eps: float, out: Array) -> None:
    """`norm` of each row."""
    for row in range(len(x)):
        norm(x[row], weight, eps, out[row])


@compiled
def add_rows(x: Array, more: Array) -> None:
    """`add` for each row."""
    for row in range(len(x)):
        add(x[row], more[row])


@compiled
def gate_rows(gate_up: Array, out: Array) -> None:
    """`gate` of each row."""
    for row in range(len(out)):
        gate(gate_up[row], out[row])


@compiled
def attend_rows(a: Attention, layer: int, qkv: Array, places: Array, ends: Array, out: Array) -> None:
    """Writes the keys and values of all rows, then `attend` for each; row r's places end at ends[r] in `places`."""
    first = 0
    for row in range(len(ends)):
        remember(a, layer, qkv[row], ends[row] - first - 1, places[ends[row] - 1])
        first = ends[row]
    first = 0
    for row in range(len(ends)):
        attend(a, layer, qkv[row], places[first : ends[row]], out[row])
        first = ends[row]


class Matrices(NamedTuple):
    """A model's packed matrices for a lone row: where they lie, and over how many columns each is summed at once.

    addresses: int64 [layers, 4]; blocks: int64 [4]; attn_norm, ffn_norm: float32 [layers, hidden]; bias: float32
    [layers, qkv] or [layers, 0].
    """

    addresses: Array
    blocks: Array
    attn_norm: Array
    ffn_norm: Array
    bias: Array


class Scratch(NamedTuple):
    """A lone row's memory: sums in float32, then stored numbers; inputs of products once more as their columns."""

    wide: Array
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
def settle(sums: Array, bias: Array, out: Array) -> None:
    """Stores sums, with a bias if there is one."""
    if len(bias):
        for i in range(len(out)):
            put(out, i, sums[i] + bias[i])
    else:
        for i in range(len(out)):
            put(out, i, sums[i])


@compiled
def lone_hidden(a: Attention, m: Matrices, s: Scratch, x: Array, places: Array, layers: int) -> None:
    """Runs the layers for one row, whose embedding `x` (float32) becomes its hidden state."""
    none = x[:0]
    for layer in range(layers):
        norm(x, m.attn_norm[layer], a.eps, s.normed)
        _product(m, layer, 0, s.normed_columns, s.wide, m.bias[layer], s.qkv)
        remember(a, layer, s.qkv, len(places) - 1, places[-1])
        attend(a, layer, s.qkv, places, s.attended)
        _product(m, layer, 1, s.attended_columns, s.wide, none, s.out)
        add(x, s.out)
        norm(x, m.ffn_norm[layer], a.eps, s.normed)
        _product(m, layer, 2, s.normed_columns, s.wide, none, s.gate_up)
        gate(s.gate_up, s.gated)
        _product(m, layer, 3, s.gated_columns, s.wide, none, s.out)
        add(x, s.out)


@compiled
def _product(m: Matrices, layer: int, which: int, x: Array, wide: Array, bias: Array, out: Array) -> None:
    sums = wide[: (len(out) + 63) // 64 * 64]
    product(m.addresses[layer, which], x, m.blocks[which], sums)
    settle(sums, bias, out)


@compiled
def lone_logits(s: Scratch, x: Array, weight: Array, eps: float, head: int, block: int, out: Array) -> None:
    """The last norm and the head, at address `head`. x: float32; out: stored."""
    norm(x, weight, eps, s.normed)
    sums = s.wide[: (len(out) + 63) // 64 * 64]
    product(head, s.normed_columns, block, sums)
    settle(sums, x[:0], out)
