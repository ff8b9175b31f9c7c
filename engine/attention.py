"""How the rows of a pass attend to what the KV pool holds for them: the rows of a prefill chunk, or those of a decode.

All that decides a row's bits is a function of its own sequence: where the chunk begins, how far a decode row is padded.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv.pool import KVPool

_SPAN = 128
_TOGETHER = 2048  # tokens of one call: as many as stay in the cache, and the copies in buffers that are used again


def attention_kind(device: torch.device, dtype: torch.dtype) -> str:
    """How rows attend; part of the identity of stored KV, as it decides the last bits."""
    return "products" if device.type == "cpu" and dtype == torch.bfloat16 else "fused"


class PrefillAttention:
    """Attention of one chunk over everything before it and, causally, over itself."""

    def __init__(self, pool: KVPool, blocks: list[int], start: int, end: int) -> None:
        self._pool, self._table, self._slots = pool, pool.table([blocks], end), pool.slots(blocks, start, end)
        self._by_products = attention_kind(pool.device, pool.dtype) == "products"
        seen = 0 if self._by_products else start  # by products only the chunk itself needs a mask
        mask = torch.full((end - start, end - start + seen), float("-inf"), device=pool.device, dtype=pool.dtype)
        mask.triu_(seen + 1)
        self._mask = mask.repeat(pool.group, 1) if end - start > 1 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, k, v)
        keys, values = (part[0] for part in self._pool.read(layer, self._table))
        return (_attend_by_products if self._by_products else _attend)(q, keys, values, self._mask)


class Blocks(Protocol):
    """Of a sequence: where its keys and values lie."""

    @property
    def blocks(self) -> list[int]:
        """Its blocks in the pool, in order."""
        ...


class Row(NamedTuple):
    """A token of a sequence that a decode pass computes, at its position."""

    sequence: Blocks
    position: int
    token: int

    @property
    def spans(self) -> int:
        """How many spans of `_SPAN` tokens hold all that it sees."""
        return self.position // _SPAN + 1


class DecodeAttention:
    """Attention of decode rows, each over what is before it alone; padding rows behind them see nothing.

    Rows with equal `spans` (they must stand side by side) attend in one call, each padded to whole spans. So how a row
    is padded depends on its own length only, and rows of one call have no part in each other's arithmetic: a row's
    result does not depend on its company.
    """

    def __init__(self, pool: KVPool, rows: list[Row], padding: int) -> None:
        self._pool, self._padding = pool, padding
        self._slots = torch.tensor([pool.slot(row.sequence.blocks, row.position) for row in rows], device=pool.device)
        self._calls = [
            (pool.table([row.sequence.blocks for row in part], spans * _SPAN), self._mask(part, spans * _SPAN))
            for spans, group in groupby(rows, lambda row: row.spans)
            for part in _parts(list(group), max(1, _TOGETHER // (spans * _SPAN)))
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = len(self._slots)
        self._pool.write(layer, self._slots, k[:count], v[:count])
        folded = q[:count].view(count, -1, self._pool.group, q.shape[-1])
        parts = folded.split([table.rows for table, _ in self._calls])
        out = [
            attend_rows(part, *self._pool.read(layer, table), mask)
            for part, (table, mask) in zip(parts, self._calls, strict=True)
        ]
        return torch.cat([*out, out[0].new_zeros(self._padding, out[0].shape[1])])

    def _mask(self, rows: list[Row], length: int) -> Tensor:
        """[rows, 1, 1, length], 0 where a row sees and minus infinity where not."""
        positions = torch.tensor([row.position for row in rows], device=self._pool.device)
        unseen = torch.arange(length, device=self._pool.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=self._pool.dtype, device=self._pool.device)
        return mask.masked_fill_(unseen, float("-inf"))[:, None, None]


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of one token per row. → [rows, heads * d].

    q: [rows, kv_heads, group, d]; keys, values: [rows, length, kv_heads, d]; mask: [rows, 1, 1, length].
    """
    if attention_kind(q.device, q.dtype) == "products":
        return _attend_rows_by_products(q, keys, values, mask)
    out = F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask)
    return out.reshape(len(q), -1)


def _attend_rows_by_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The same as two products for all KV heads at once, where each product by itself would be too small to be fast.

    A query is zero in the places of the other KV heads; of what it gathers from their values nothing is kept.
    """
    rows, shared, group, size = q.shape
    own = torch.eye(shared, dtype=q.dtype, device=q.device).view(shared, 1, shared, 1)
    wide = (q.unsqueeze(3) * own).view(rows, shared * group, shared * size)
    scores = torch.baddbmm(mask[:, 0], wide, keys.flatten(2).transpose(1, 2), alpha=size**-0.5)
    out = torch.bmm(torch.softmax(scores, -1), values.flatten(2)).view(rows, shared, group, shared, size)
    return out.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(rows, -1)


def _parts(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


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
