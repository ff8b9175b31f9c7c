"""At how many rows the model gives the very bits that it gives at fewer.

Libraries choose kernels by the number of rows, and another kernel may sum in another order. Guessed tokens are extra
rows of a decode pass, so they may ride along only where that changes nothing. Asked of the machine at start, not
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import Row
from engine.decoding import Decoder
from engine.kv.pool import KVPool
from engine.model.llama import Llama

MOST_ROWS = 16
"""Rows of a pass with guesses."""

_LAYERS = 8  # a difference anywhere spreads; with so many none stays unseen
_ALONE = 4  # rows tried alone
_SEEN = 128  # tokens that each row sees, itself included, where the context is not shorter


class ExactRows:
    """Compares the same rows in passes of every size that a decoder makes of up to `MOST_ROWS` rows."""

    @torch.inference_mode()
    def __init__(self, model: Llama, decoder: Decoder) -> None:
        length = min(_SEEN, model.spec.context)
        pool = KVPool(model.spec, MOST_ROWS, length, device=model.device, dtype=model.dtype)
        generator = torch.Generator().manual_seed(1)
        seen = pool.memory[:_LAYERS]
        seen.copy_(torch.randn(seen.shape, generator=generator))
        self._padded, trial = decoder.padded, decoder.over(pool)
        self._sizes = sorted({self._padded(rows) for rows in range(1, MOST_ROWS + 1)})
        tokens = torch.randint(model.spec.vocab, (self._sizes[-1],), generator=generator).tolist()
        rows = [Row(_Block([at]), length - 1, token) for at, token in enumerate(tokens)]
        largest = self._pass(trial, rows)
        steady = torch.equal(largest, self._pass(trial, rows[::-1]).flip(0))
        self._exact = {
            size for size in self._sizes if steady and torch.equal(self._pass(trial, rows[:size]), largest[:size])
        }
        alone = range(_ALONE if 1 in self._exact else 0)
        if not all(torch.equal(self._pass(trial, rows[row : row + 1]), largest[row : row + 1]) for row in alone):
            self._exact.discard(1)

    def most(self, rows: int) -> int:
        """The largest number of rows at which the first `rows` are as in a pass of just these, and all between too."""
        size = most = self._padded(rows)
        for larger in self._sizes:
            if larger >= size:
                if larger not in self._exact:
                    break
                most = larger
        return most if size in self._exact else rows

    @staticmethod
    def _pass(trial: Decoder, rows: list[Row]) -> Tensor:
        hidden, logits = trial.run(rows, layers=_LAYERS)
        return torch.cat([hidden.float(), logits], dim=1)


@dataclass
class _Block:
    """All that a decoder asks of a sequence."""

    blocks: list[int]
