"""A row's attention to the keys and values of its sequence, where they lie in the pool."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from engine.compiled.jit import ONE, ZERO, Array, compiled
from engine.compiled.lanes import fma, get, larger, load, plus, prefetch, put, splat, store, store_totals
from engine.compiled.rows import dot, exp


class Shape(NamedTuple):
    """The sizes of a model."""

    heads: int
    kv_heads: int
    head_dim: int


class Attention(NamedTuple):
    """All that attention of any layer needs beside its input: parameters (empty where there are none), angles, memory.

    q_norm, k_norm: float32 [layers, head_dim]; cos, sin: float32 [context, head_dim]; kv: stored [layers, 2, slots *
    kv_heads * head_dim], in blocks of `block_size` slots. Scratch for four heads, float32: query [4 * head_dim], scores
    [(context + 4) * 4], most [16].
    """

    shape: Shape
    eps: float
    q_norm: Array
    k_norm: Array
    cos: Array
    sin: Array
    kv: Array
    block_size: int
    query: Array
    scores: Array
    most: Array


@compiled
def lay_out(a: Attention, rows: Array, blocks: Array) -> tuple[Array, Array]:
    """Where in a layer's keys (and values) lie those of all that the rows see, and where each row's places end.

    rows: int64 [rows, 3], each a token, its position, and where its sequence's blocks begin in `blocks`, int64.
    """
    size, width = a.block_size, a.shape.kv_heads * a.shape.head_dim
    ends = np.cumsum(rows[:, 1] + 1)
    places = np.empty(ends[-1], np.int64)
    at = 0
    for row in range(len(rows)):
        for position in range(rows[row, 1] + 1):
            places[at] = (blocks[rows[row, 2] + position // size] * size + position % size) * width
            at += 1
    return places, ends


@compiled
def fetch(a: Attention, layer: int, places: Array) -> None:
    """Has the keys and values of a layer brought into the cache, beside what the processor does until it needs them."""
    keys, values = a.kv[layer, 0], a.kv[layer, 1]
    line = 64 // keys.itemsize
    for place in places:
        for i in range(0, a.shape.kv_heads * a.shape.head_dim, line):
            prefetch(keys, place + i)
            prefetch(values, place + i)


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
    scale = ONE / np.float32(math.sqrt(np.float32(size)))
    for shared in range(shape.kv_heads):
        for first in range(shared * group, (shared + 1) * group, 4):
            heads = min(4, (shared + 1) * group - first)
            for head in range(heads):
                at = (first + head) * size
                rotate(qkv[at : at + size], a.q_norm[layer], a.eps, cos, sin, a.query, head * size)
            for i in range(heads * size):
                a.query[i] *= scale
            score(a, a.kv[layer, 0], places, shared * size)
            shares(a, len(places))
            gather(a, a.kv[layer, 1], places, shared * size)
            for head in range(heads):
                for i in range(size):
                    put(out, (first + head) * size + i, a.query[head * size + i] * a.most[head])


@compiled
def rotate(head: Array, weight: Array, eps: float, cos: Array, sin: Array, out: Array, at: int) -> None:
    """Writes a head's numbers at out[at], normed if there is a weight, and turned (in halves; `sin` has the sign).

    head: stored; out: stored.
    """
    size, half = len(head), len(head) // 2
    scale = ONE
    if len(weight):
        scale = ONE / np.float32(math.sqrt(dot(head, 0, head, 0, size) / np.float32(size) + np.float32(eps)))
    for i in range(size):
        other = i + half if i < half else i - half
        one, two = get(head, i) * scale, get(head, other) * scale
        if len(weight):
            one, two = one * weight[i], two * weight[other]
        put(out, at + i, fma(two, sin[i], one * cos[i]))


@compiled
def score(a: Attention, keys: Array, places: Array, inside: int) -> None:
    """scores[token, head] = the head's query times the token's key."""
    size, query, zero = a.shape.head_dim, a.query, splat(ZERO)
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
    less = fma(load(most, 0), splat(-ONE), splat(ZERO))
    for i in range(0, end, 16):
        store(scores, i, plus(load(scores, i), less))
    for i in range(end):
        put(scores, i, exp(get(scores, i)))
    lanes = splat(ZERO)
    for i in range(0, end, 16):
        lanes = plus(lanes, load(scores, i))
    store(most, 0, lanes)
    for head in range(4):
        most[head] = ONE / ((most[head] + most[head + 4]) + (most[head + 8] + most[head + 12]))


@compiled
def gather(a: Attention, values: Array, places: Array, inside: int) -> None:
    """query[head] = the sum of the tokens' values, each times its share."""
    size, query, scores, zero = a.shape.head_dim, a.query, a.scores, splat(ZERO)
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
            total = ZERO
            for t in range(len(places)):
                total = fma(get(scores, 4 * t + head), get(values, places[t] + inside + i), total)
            put(query, head * size + i, total)
