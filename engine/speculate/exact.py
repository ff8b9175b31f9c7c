"""At how many rows the model gives the very bits that it gives at fewer.

Libraries choose kernels by the number of rows, and another kernel may sum in another order. Guessed tokens are extra
rows of a decode pass, so they may ride along only where that changes nothing. Asked of the machine at start, not
assumed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.llama import Llama

MOST_ROWS = 16
"""Rows of a pass with guesses."""

_LAYERS = 8  # a difference anywhere spreads; with so many none stays unseen
_ALONE = 4  # rows tried alone


class ExactRows:
    """Compares the same rows in passes of every size that `padded` makes of up to `MOST_ROWS` rows."""

    @torch.inference_mode()
    def __init__(self, model: Llama, padded: Callable[[int], int]) -> None:
        self._model, self._padded = model, padded
        self._sizes = sorted({padded(rows) for rows in range(1, MOST_ROWS + 1)})
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(model.spec.vocab, (self._sizes[-1],), generator=generator).to(model.device)
        largest = self._pass(ids)
        steady = torch.equal(largest, self._pass(ids.flip(0)).flip(0))
        self._exact = {size for size in self._sizes if steady and torch.equal(self._pass(ids[:size]), largest[:size])}
        alone = range(_ALONE if 1 in self._exact else 0)
        if not all(torch.equal(self._pass(ids[row : row + 1]), largest[row : row + 1]) for row in alone):
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

    def _pass(self, ids: Tensor) -> Tensor:
        hidden = self._model.hidden(
            ids, torch.ones_like(ids), lambda layer, q, k, v: q.flatten(1), decode=True, layers=_LAYERS
        )
        return torch.cat([hidden.float(), self._model.logits(hidden, decode=True)], dim=1)
