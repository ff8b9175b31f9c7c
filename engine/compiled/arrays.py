"""Torch's tensors as the arrays that compiled functions take, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.compiled.jit import Array


def stored(tensor: Tensor) -> Array:
    """float32, or bfloat16 as uint16."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


def columns(tensor: Tensor) -> Array:
    """A product's input: float32, or pairs of bfloat16 as uint32."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint32)).numpy()


def stacked(parts: Sequence[Tensor | None]) -> Array:
    """One row per layer, float32 [layers, size]; rows of no length if a model has no such parameters."""
    return np.stack([np.zeros(0, np.float32) if part is None else part.float().numpy() for part in parts])
