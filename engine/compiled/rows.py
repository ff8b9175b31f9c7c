"""What happens to a row between two matrix products, but for attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.compiled.jit import ONE, ZERO, Array, compiled
from engine.compiled.lanes import fma, get, load, power_of_two, put, splat, total


@compiled
def exp(x: Any) -> Any:
    """e**x to within 2 units in the last place; 0 below -87, infinity from 88.4 on."""
    x = min(max(x, np.float32(-87.3)), np.float32(88.5))  # outside of these the power of two would be of another number
    whole = np.float32(math.floor(fma(x, np.float32(1.442695041), np.float32(0.5))))
    rest = fma(whole, np.float32(-0.693359375), x)
    rest = fma(whole, np.float32(2.12194440e-4), rest)
    y = np.float32(1.9875691500e-4)
    y = fma(y, rest, np.float32(1.3981999507e-3))
    y = fma(y, rest, np.float32(8.3334519073e-3))
    y = fma(y, rest, np.float32(4.1665795894e-2))
    y = fma(y, rest, np.float32(1.6666665459e-1))
    y = fma(y, rest, np.float32(5.0000001201e-1))
    y = fma(y, rest * rest, rest + ONE)
    return y * power_of_two(whole)


@compiled
def dot(a: Array, at: int, b: Array, start: int, size: int) -> Any:
    """The sum of a[at + i] * b[start + i]."""
    sums = splat(ZERO)
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
    scale = ONE / np.float32(math.sqrt(dot(x, 0, x, 0, len(x)) / np.float32(len(x)) + np.float32(eps)))
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
        put(out, i, value / (ONE + exp(-value)) * get(gate_up, size + i))


@compiled
def settle(sums: Array, bias: Array, out: Array) -> None:
    """Stores sums, with a bias if there is one."""
    if len(bias):
        for i in range(len(out)):
            put(out, i, sums[i] + bias[i])
    else:
        for i in range(len(out)):
            put(out, i, sums[i])
