"""Runs a scheduler's step on the model: one forward pass per prefill chunk, one for all decodes and drafts together.

A chunk has a pass of its own so that its arithmetic never depends on its neighbours in the batch. The tokens of a draft
are rows of the decode pass like those of other sequences, each attending as if it were decoded alone.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from engine.attention import PrefillAttention, Row
from engine.decoding import Decoder
from engine.kv.pool import KVPool
from engine.model.llama import Llama
from engine.scheduler import Chunk, Step
from engine.sequence import Sequence


class Runner:
    """Executes steps: writes KV to the pool and gives the logits of sequences that await a token."""

    def __init__(self, model: Llama, pool: KVPool, decoder: Decoder) -> None:
        self._model, self._pool, self._decoder = model, pool, decoder
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
        ids = torch.tensor(sequence.tokens[start:end], device=self._model.device)
        positions = torch.arange(start, end, device=self._model.device)
        return self._model.hidden(ids, positions, PrefillAttention(self._pool, sequence.blocks, start, end))

    def _decode(self, sequences: list[Sequence]) -> list[Tensor]:
        rows = [
            Row(s, s.computed + at, token)
            for s in sequences
            for at, token in enumerate((s.tokens[s.computed], *s.draft))
        ]
        _, logits = self._decoder.run(rows)
        return list(logits.cpu().split([1 + len(s.draft) for s in sequences]))
