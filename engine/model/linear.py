"""Linear layers: plain, or packed for the CPU.

The CPU's matrix library reads a weight fastest in blocks that fit its kernels. It reorders plain weights for every
product or, for few rows, does without and is half as fast; so they are reordered once, when the model is loaded. From
two rows on, its kernels gave a row the same bits at every number of rows tried (up to 512, both dtypes, 1 and 2
threads); a lone row may be summed in another order.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedWeight:
    """An [out, in] weight in the order in which oneDNN's kernels read it."""

    def __init__(self, weight: Tensor) -> None:
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self.tiles = _tiles(self._blocks, weight)
        """The address of its tiles, [out / 64, columns, 64]; 0 where the library packs otherwise.

        A column is one input in float32, a pair of inputs in bfloat16; missing outputs are zeros.
        """

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, in] → [rows, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._blocks, bias, "none", [], "")


_ROWS = 4  # of a typical product; the order that is best for few rows is no slower for many


def _tiles(packed: Tensor, weight: Tensor) -> int:
    outputs, inputs = weight.shape
    each = 4 // weight.itemsize  # inputs of a column
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    if inputs % each or size != -(-outputs // 64) * 64 * inputs * weight.itemsize:
        return 0
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=weight.dtype).view(-1, 64 * inputs)
    looked_at = range(0, outputs, max(64, outputs // 4 // 64 * 64))
    for first in looked_at:
        tile = weight[first : first + 64].view(-1, inputs // each, each).transpose(0, 1)
        if not torch.equal(memory[first // 64].view(-1, 64, each)[:, : tile.shape[1]], tile):
            return 0
    return address


Weight = Tensor | PackedWeight
"""What a linear layer may hold."""


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are packed here; part of the identity of stored KV, as it decides the last bits."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed(weight: Tensor) -> Weight:
    """The weight in its fastest form of the same values."""
    return PackedWeight(weight) if packs(weight.device, weight.dtype) else weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)
