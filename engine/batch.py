"""Runs a scheduler's step on the model: one forward pass per prefill chunk, one for all decodes together.

A chunk has a pass of its own so that its arithmetic never depends on its neighbours in the batch. Decode batches of two
and more are padded to `_LEAST_ROWS` rows, below which matrix libraries choose other (and slower) kernels; with
`batch_invariant` also a lone row is, so that a sequence's numbers never depend on how many others decode beside it.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.pool import BlockTable, KVPool
from engine.model.llama import Llama
from engine.scheduler import Chunk, Step
from engine.sequence import Sequence

_LEAST_ROWS = 4


class Runner:
    """Executes steps: writes KV to the pool and gives the logits of sequences that await a token."""

    def __init__(self, model: Llama, pool: KVPool, *, batch_invariant: bool = False) -> None:
        self._model, self._pool, self._batch_invariant = model, pool, batch_invariant
        self.prefill_seconds = 0.0
        """How long the prefills of the last step took."""

    @torch.inference_mode()
    def run(self, step: Step) -> list[tuple[Sequence, Tensor]]:
        """Computes the step. Returns (sequence, float32 logits [vocab] on the CPU) for each that now needs a token."""
        results: list[tuple[Sequence, Tensor]] = []
        if step.decodes:
            rows = zip(step.decodes, self._decode(step.decodes), strict=True)
            results += [(sequence, row) for sequence, row in rows if sequence.computed + 1 == len(sequence.tokens)]
        began = time.perf_counter()
        for chunk in step.prefills:
            hidden = self.prefill(chunk)
            if chunk.end == len(chunk.sequence.tokens):
                results.append((chunk.sequence, self._model.logits(hidden[-1:])[0].cpu()))
        self.prefill_seconds = time.perf_counter() - began
        return results

    @torch.inference_mode()
    def prefill(self, chunk: Chunk) -> Tensor:
        """Computes one chunk; returns the hidden state of each of its rows, [rows, hidden]."""
        sequence, start, end = chunk
        ids, positions = self._rows(sequence.tokens[start:end], range(start, end))
        return self._model.hidden(ids, positions, _PrefillAttention(self._pool, sequence.blocks, start, end))

    def _decode(self, sequences: list[Sequence]) -> Tensor:
        alone = len(sequences) == 1 and not self._batch_invariant
        padding = 0 if alone else max(0, _LEAST_ROWS - len(sequences))
        tokens = [s.tokens[s.computed] for s in sequences] + [0] * padding
        ids, positions = self._rows(tokens, [s.computed for s in sequences] + [0] * padding)
        hidden = self._model.hidden(ids, positions, _DecodeAttention(self._pool, sequences, padding), decode=True)
        return self._model.logits(hidden[: len(sequences)], decode=True).cpu()

    def _rows(self, tokens: list[int], positions: range | list[int]) -> tuple[Tensor, Tensor]:
        device = self._model.device
        return torch.tensor(tokens, device=device), torch.tensor(list(positions), device=device)


class _PrefillAttention:
    """Attention of one chunk over everything before it and, causally, over itself."""

    def __init__(self, pool: KVPool, blocks: list[int], start: int, end: int) -> None:
        self._pool, self._table, self._slots = pool, pool.table(blocks, end), pool.slots(blocks, start, end)
        mask = torch.full((end - start, end), float("-inf"), device=pool.device, dtype=pool.dtype).triu_(start + 1)
        self._mask = mask.repeat(pool.group, 1) if end - start > 1 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, k, v)
        keys, values = self._pool.read(layer, self._table)
        return _attend(q, keys, values, self._mask)


class _DecodeAttention:
    """Attention of one row per sequence, each over its own tokens; padding rows see nothing."""

    def __init__(self, pool: KVPool, sequences: list[Sequence], padding: int) -> None:
        self._pool, self._count = pool, len(sequences)
        self._padding = padding
        self._tables: list[BlockTable] = [pool.table(s.blocks, s.computed + 1) for s in sequences]
        self._slots = torch.cat([pool.slots(s.blocks, s.computed, s.computed + 1) for s in sequences])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, k[: self._count], v[: self._count])
        rows = [_attend(q[i : i + 1], *self._pool.read(layer, table), None) for i, table in enumerate(self._tables)]
        if self._padding:
            rows.append(torch.zeros_like(q[self._count :]).flatten(1))
        return torch.cat(rows)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention. q: [rows, heads, d]; keys, values: [length, kv_heads, d]; → [rows, heads * d].

    `mask` is [group * rows, length], or None where all is visible. The heads that share a KV head (a group) become rows
    of one product, so no key is ever repeated.
    """
    rows, heads, size = q.shape
    shared = keys.shape[1]
    group = heads // shared
    folded = q.view(rows, shared, group, size).permute(1, 2, 0, 3).reshape(1, shared, group * rows, size)
    out = F.scaled_dot_product_attention(
        folded, keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0), attn_mask=mask
    )
    return out.view(shared, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads * size)
