"""At how many rows the model gives the very bits that it gives at fewer.

Libraries choose kernels by the number of rows, and another kernel may sum in another order. Guessed tokens are extra
rows of a decode pass, so they may ride along only where that changes nothing. Asked of the machine at start, not
assumed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention import attend_rows
from engine.model.llama import Llama

MOST_ROWS = 16
"""Rows of a pass with guesses."""

_LAYERS = 8  # a difference anywhere spreads; with so many none stays unseen
_ALONE = 4  # rows tried alone
_SEEN = 127  # tokens that each row sees beside itself


class ExactRows:
    """Compares the same rows in passes of every size that `padded` makes of up to `MOST_ROWS` rows."""

    @torch.inference_mode()
    def __init__(self, model: Llama, padded: Callable[[int], int]) -> None:
        self._model, self._padded = model, padded
        self._sizes = sorted({padded(rows) for rows in range(1, MOST_ROWS + 1)})
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(model.spec.vocab, (self._sizes[-1],), generator=generator).to(model.device)
        seen = torch.randn(2, _SEEN, model.spec.kv_heads, model.spec.head_dim, generator=generator)
        self._seen = seen.to(model.device, model.dtype)
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
        hidden = self._model.hidden(ids, torch.ones_like(ids), self._attend, decode=True, layers=_LAYERS)
        return torch.cat([hidden.float(), self._model.logits(hidden, decode=True)], dim=1)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every row sees the same, and something of its own."""
        rows = len(q)
        keys, values = (
            torch.cat([own[:, None], seen.expand(rows, -1, -1, -1)], dim=1)
            for own, seen in zip((k, v), self._seen, strict=True)
        )
        return attend_rows(q.view(rows, k.shape[1], -1, q.shape[-1]), keys, values, keys.new_zeros(rows, 1, 1, 1))
