"""Decode passes: one new token each of several sequences, and those of their drafts, in one pass.

Rows are padded to the numbers at which products are quickest, and no row has a part in another's arithmetic: a
sequence's numbers do not depend on how many others decode beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import DecodeAttention, Row
from engine.compiled.decoder import CompiledDecoder
from engine.kv.pool import KVPool
from engine.model.llama import Llama


class Decoder(Protocol):
    """Computes decode rows; keys and values are read from a pool and written to it."""

    def over(self, pool: KVPool) -> Decoder:
        """The same with another pool."""
        ...

    def padded(self, rows: int) -> int:
        """How many rows a pass for so many has."""
        ...

    def run(self, rows: Sequence[Row], layers: int | None = None) -> tuple[Tensor, Tensor]:
        """Runs all layers (or the first `layers`). Returns the hidden states before the last norm, and the logits.

        [rows, hidden] and float32 [rows, vocab].
        """
        ...


MakeDecoder = Callable[[Llama, KVPool], Decoder]


def quickest_decoder(model: Llama, pool: KVPool) -> Decoder:
    """The quickest way on the model's device."""
    return CompiledDecoder.of(model, pool) or TorchDecoder(model, pool)


class TorchDecoder:
    """The same pass in torch's operations, for any device."""

    _ROWS = 4

    def __init__(self, model: Llama, pool: KVPool) -> None:
        self._model, self._pool = model, pool

    def over(self, pool: KVPool) -> TorchDecoder:
        return TorchDecoder(self._model, pool)

    def padded(self, rows: int) -> int:
        return -(-rows // self._ROWS) * self._ROWS

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], layers: int | None = None) -> tuple[Tensor, Tensor]:
        order = sorted(range(len(rows)), key=lambda at: rows[at].spans)  # those that attend together side by side
        ordered = [rows[at] for at in order]
        padding = [0] * (self.padded(len(rows)) - len(rows))
        ids = torch.tensor([row.token for row in ordered] + padding, device=self._model.device)
        positions = torch.tensor([row.position for row in ordered] + padding, device=self._model.device)
        attend = DecodeAttention(self._pool, ordered, len(padding))
        hidden = self._model.hidden(ids, positions, attend, layers=layers)
        back = sorted(range(len(rows)), key=order.__getitem__)
        return hidden[back], self._model.logits(hidden)[back]
