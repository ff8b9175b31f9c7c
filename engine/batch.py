"""Runs a scheduler's step on the model: one forward pass per prefill chunk, one for all decodes and drafts together.

A chunk has a pass of its own so that its arithmetic never depends on its neighbours in the batch. Decode batches are
padded to multiples of `_ROWS` rows: for other numbers matrix libraries choose other (and often slower) kernels, also
when they share the rows out among threads. So a sequence's numbers do not depend on how many others decode beside it.
The tokens of a draft are rows like those of other sequences, each attending as if it were decoded alone.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

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
        return self._model.hidden(ids, positions, _PrefillAttention(self._pool, sequence.blocks, start, end))

    def padded(self, rows: int) -> int:
        """How many rows a decode pass for so many has."""
        return -(-rows // self._rows_at_once) * self._rows_at_once

    def _decode(self, sequences: list[Sequence]) -> list[Tensor]:
        sizes = [1 + len(s.draft) for s in sequences]
        padding = [0] * (self.padded(sum(sizes)) - sum(sizes))
        tokens = [token for s in sequences for token in (s.tokens[s.computed], *s.draft)]
        places = [s.computed + at for s, size in zip(sequences, sizes, strict=True) for at in range(size)]
        ids, positions = self._rows(tokens + padding, places + padding)
        hidden = self._model.hidden(ids, positions, _DecodeAttention(self._pool, sequences, len(padding)), decode=True)
        return list(self._model.logits(hidden, decode=True)[: sum(sizes)].cpu().split(sizes))

    def _rows(self, tokens: list[int], positions: range | list[int]) -> tuple[Tensor, Tensor]:
        device = self._model.device
        return torch.tensor(tokens, device=device), torch.tensor(list(positions), device=device)


def attention_kind(pool: KVPool) -> str:
    """How a prefill attends; part of the identity of stored KV, as it decides the last bits."""
    return "products" if pool.device.type == "cpu" and pool.dtype == torch.bfloat16 else "fused"


class _PrefillAttention:
    """Attention of one chunk over everything before it and, causally, over itself."""

    def __init__(self, pool: KVPool, blocks: list[int], start: int, end: int) -> None:
        self._pool, self._table, self._slots = pool, pool.table(blocks, end), pool.slots(blocks, start, end)
        self._by_products = attention_kind(pool) == "products"
        seen = 0 if self._by_products else start  # by products only the chunk itself needs a mask
        mask = torch.full((end - start, end - start + seen), float("-inf"), device=pool.device, dtype=pool.dtype)
        mask.triu_(seen + 1)
        self._mask = mask.repeat(pool.group, 1) if end - start > 1 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, k, v)
        keys, values = self._pool.read(layer, self._table)
        return (_attend_by_products if self._by_products else _attend)(q, keys, values, self._mask)


class _DecodeAttention:
    """Attention of the rows of each sequence, each row over what is before it alone; padding rows see nothing."""

    def __init__(self, pool: KVPool, sequences: list[Sequence], padding: int) -> None:
        self._pool, self._padding = pool, padding
        ends = [(s, s.computed + 1, s.computed + 1 + len(s.draft)) for s in sequences]
        self._seen = [(pool.table(s.blocks, last), range(first, last + 1)) for s, first, last in ends]
        self._slots = torch.cat([pool.slots(s.blocks, first - 1, last) for s, first, last in ends])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = len(self._slots)
        self._pool.write(layer, self._slots, k[:count], v[:count])
        folded = q.view(len(q), -1, self._pool.group, q.shape[-1])  # of one row alone, heads are folded by a mere view
        rows: list[Tensor] = []
        for table, lengths in self._seen:
            keys, values = (part.transpose(0, 1).unsqueeze(0) for part in self._pool.read(layer, table))
            for length in lengths:
                seen = (keys, values) if length == table.length else (keys[:, :, :length], values[:, :, :length])
                rows.append(F.scaled_dot_product_attention(folded[len(rows) : len(rows) + 1], *seen))
        if self._padding:
            rows.append(torch.zeros_like(folded[count:]))
        return torch.cat(rows).flatten(1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention. q: [rows, heads, d]; keys, values: [length, kv_heads, d]; → [rows, heads * d].

    `mask` is [group * rows, length], or None where all is visible. The heads that share a KV head (a group) become rows
    of one product, so no key is ever repeated.
    """
    out = F.scaled_dot_product_attention(
        _fold(q, keys).unsqueeze(0), keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0), mask
    )
    return _unfold(out, q)


def _attend_by_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The same as two plain matrix products, which AMX makes nearly twice as fast as the fused form at 2k to 4k tokens.

    `mask` covers the last rows of `length` only. Scores are rounded to bfloat16 before the softmax, as in eager
    `transformers`.
    """
    scores = torch.bmm(_fold(q, keys) * q.shape[-1] ** -0.5, keys.permute(1, 2, 0))
    if mask is not None:
        scores[..., -mask.shape[1] :] += mask
    return _unfold(torch.bmm(torch.softmax(scores, -1), values.transpose(0, 1)), q)


def _fold(q: Tensor, keys: Tensor) -> Tensor:
    """Heads that share a KV head, as rows of one matrix: [kv_heads, group * rows, d]."""
    rows, heads, size = q.shape
    shared = keys.shape[1]
    return q.view(rows, shared, heads // shared, size).permute(1, 2, 0, 3).reshape(shared, -1, size)


def _unfold(out: Tensor, q: Tensor) -> Tensor:
    """Back to [rows, heads * d]."""
    rows, heads, size = q.shape
    return out.view(-1, rows, size).transpose(0, 1).reshape(rows, heads * size)
