"""Linear layers in int8 for decode, where reading weights is what takes the time: a quarter of the bytes of float32.

Weights have one scale per output, activations one per row, found at run time (LLM.int8() without outliers,
arXiv:2208.07339). Sums of int8 products are exact in int32, so a row's result never depends on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Int8Weight:
    """A quantised [out, in] weight."""

    def __init__(self, weight: Tensor) -> None:
        self._scale = (weight.float().abs().amax(dim=1) / 127).clamp_(min=1e-12)
        self._values = (weight.float() / self._scale[:, None]).round_().to(torch.int8).t()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, in] → [rows, out] in x's dtype."""
        wide = x.float()
        scale = (wide.abs().amax(dim=-1, keepdim=True) / 127).clamp_(min=1e-12)
        rows = (wide / scale).round_().to(torch.int8)
        product = torch._int_mm(rows, self._values)  # type: ignore[reportPrivateImportUsage]  # the only int8 product
        out = (product * scale).mul_(self._scale).to(x.dtype)
        return out if bias is None else out + bias
