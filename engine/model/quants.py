"""Dequantisation of ggml tensor types to float32 over numpy.

Block formats as described by ggml (`ggml-common.h`): every block is read as one row of a byte matrix, so that each
type is a few vectorised lines. Supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class TensorType(NamedTuple):
    """How a ggml type is laid out: `block` values in `size` bytes; `decode` maps [blocks, size] to [blocks, block]."""

    name: str
    block: int
    size: int
    decode: Callable[[Bytes], Floats]


def _half(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _f32(raw: Bytes) -> Floats:
    return raw.view(np.float32)


def _bf16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _nibbles(raw: Bytes) -> Floats:
    """16 bytes hold 32 values: all low halves first, then all high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float32)


def _q4_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]) - 8).astype(np.float32, copy=False)


def _q4_1(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]) + _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32)


def _q4_k(raw: Bytes) -> Floats:
    """256 values in eight groups of 32; six-bit scale and minimum of each group are packed in 12 bytes."""
    n = len(raw)
    d, dmin = _half(raw[:, :2]), _half(raw[:, 2:4])
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1).astype(np.float32)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1).astype(np.float32)
    packed = raw[:, 16:].reshape(n, 4, 1, 32)
    values = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(n, 8, 32).astype(np.float32)
    decoded = (d * scale)[..., None] * values - (dmin * minimum)[..., None]
    return decoded.reshape(n, 256).astype(np.float32, copy=False)


def _q6_k(raw: Bytes) -> Floats:
    """256 values of six bits (four low, two high) in 16 groups with an int8 scale each."""
    n = len(raw)
    low = raw[:, :128].reshape(n, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(n, 2, 4, 32)
    high = raw[:, 128:192].reshape(n, 2, 1, 32)
    high = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    values = (low | (high << 4)).reshape(n, 16, 16).astype(np.float32) - 32
    scale = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return (_half(raw[:, 208:210])[..., None] * scale[..., None] * values).reshape(n, 256)


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, _f32),
    1: TensorType("F16", 1, 2, _half),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    30: TensorType("BF16", 1, 2, _bf16),
}
