"""Runs a scheduler's step on the model: one forward pass per prefill chunk, one for all decodes and drafts together.

A chunk has a pass of its own so that its arithmetic never depends on its neighbours in the batch. Decode batches are
padded to multiples of `_ROWS` rows: for other numbers matrix libraries choose other (and often slower) kernels, also
when they share the rows out among threads. So a sequence's numbers do not depend on how many others decode beside it.
The tokens of a draft are rows like those of other sequences, each attending as if it were decoded alone.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from engine.attention import DecodeAttention, PrefillAttention, Row
from engine.kv.pool import KVPool
from engine.model.llama import Llama
from engine.scheduler import Chunk, Step
from engine.sequence import Sequence

_ROWS = 4


class Runner:
    """Executes steps: writes KV to the pool and gives the logits of sequences that await a token."""

    def __init__(self, model: Llama, pool: KVPool) -> None:
        self._model, self._pool = model, pool
        self._rows_at_once = 1 if model.int8_decode else _ROWS  # sums of integers are exact in any order
        self.prefill_seconds = 0.0
        """How long the prefills of the last step took."""
        self.decode_seconds = 0.0
        """How long its decodes took."""

    @torch.inference_mode()
    def run(self, step: Step) -> list[tuple[Sequence, Tensor]]:
        """Computes the step. Returns (sequence, float32 logits on the CPU) for each that now needs a token.

        The logits are [1 + drafted, vocab]: after the last token, then after each token of the draft.
        """
        results: list[tuple[Sequence, Tensor]] = []
        began = time.perf_counter()
        if step.decodes:
            rows = zip(step.decodes, self._decode(step.decodes), strict=True)
            results += [(sequence, row) for sequence, row in rows if sequence.computed + 1 == len(sequence.tokens)]
            self.decode_seconds = time.perf_counter() - began
        began = time.perf_counter()
        for chunk in step.prefills:
            hidden = self.prefill(chunk)
            if chunk.end == len(chunk.sequence.tokens):
                results.append((chunk.sequence, self._model.logits(hidden[-1:]).cpu()))
        self.prefill_seconds = time.perf_counter() - began
        return results

    @torch.inference_mode()
    def prefill(self, chunk: Chunk) -> Tensor:
        """Computes one chunk; returns the hidden state of each of its rows, [rows, hidden]."""
        sequence, start, end = chunk
        ids, positions = self._rows(sequence.tokens[start:end], range(start, end))
        return self._model.hidden(ids, positions, PrefillAttention(self._pool, sequence.blocks, start, end))

    def padded(self, rows: int) -> int:
        """How many rows a decode pass for so many has."""
        return -(-rows // self._rows_at_once) * self._rows_at_once

    def _decode(self, sequences: list[Sequence]) -> list[Tensor]:
        rows = [
            Row(s, s.computed + at, token)
            for s in sequences
            for at, token in enumerate((s.tokens[s.computed], *s.draft))
        ]
        order = sorted(range(len(rows)), key=lambda at: rows[at].spans)  # those that attend together side by side
        rows = [rows[at] for at in order]
        padding = [0] * (self.padded(len(rows)) - len(rows))
        ids, positions = self._rows([r.token for r in rows] + padding, [r.position for r in rows] + padding)
        attend = DecodeAttention(self._pool, rows, len(padding))
        hidden = self._model.hidden(ids, positions, attend, decode=True)
        back = sorted(range(len(rows)), key=order.__getitem__)
        hidden[: len(rows)] = hidden[back]
        logits = self._model.logits(hidden, decode=True)[: len(rows)].cpu()
        return list(logits.split([1 + len(s.draft) for s in sequences]))

    def _rows(self, tokens: list[int], positions: range | list[int]) -> tuple[Tensor, Tensor]:
        device = self._model.device
        return torch.tensor(tokens, device=device), torch.tensor(list(positions), device=device)
