"""Weights in int8 for decode, where reading weights is what takes the time: half the bytes of bfloat16.

One scale per output (as the weights of LLM.int8(), arXiv:2208.07339); inputs stay as they are, so a row's result never
depends on its neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Int8Weight:
    """A quantised [out, in] weight in tiles, int8 [out / 64, in, 64]; missing outputs are zeros.

    `scale`: float32, by which an output is multiplied, for those that are missing too.
    """

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        wide = weight.float()
        self.scale = (wide.abs().amax(dim=1) / 127).clamp_(min=1e-12)
        missing = -outputs % 64
        values = F.pad((wide / self.scale[:, None]).round_().to(torch.int8), (0, 0, 0, missing))
        self.scale = F.pad(self.scale, (0, missing), value=1.0)
        self._tiles = values.view(-1, 64, inputs).transpose(1, 2).contiguous()
        self.tiles = self._tiles.data_ptr()
        """The address of its tiles."""
