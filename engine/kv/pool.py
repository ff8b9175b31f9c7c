"""The memory of the paged KV cache: per layer one tensor of keys and one of values, cut into blocks of equal size.

Block `b` holds slots `b * block_size` … of every layer. Layer-first, so that a run of neighbouring blocks is read
without a copy; whole blocks leave and enter page-first (`export`, `load`), as the lower tiers keep them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.spec import ModelSpec


class KVPool:
    """`blocks` blocks of `block_size` tokens for every layer, on one device, allocated once."""

    def __init__(
        self, spec: ModelSpec, blocks: int, block_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.blocks, self.block_size, self.device, self.dtype = blocks, block_size, device, dtype
        self.group = spec.heads // spec.kv_heads
        self._inner = (spec.kv_heads, spec.head_dim)
        self.memory = _zeros((spec.layers, 2, blocks * block_size, *self._inner), device, dtype)

    @staticmethod
    def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        return spec.layers * 2 * block_size * spec.kv_heads * spec.head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores one row per slot. slots: int64 [rows]; keys, values: [rows, kv_heads, head_dim]."""
        self.memory[layer, 0].index_copy_(0, slots, keys)
        self.memory[layer, 1].index_copy_(0, slots, values)

    def read(self, layer: int, table: BlockTable) -> tuple[Tensor, Tensor]:
        """Keys and values of a table's tokens in order, each [rows, length, kv_heads, head_dim]; views if possible."""
        keys, values = self.memory[layer, 0], self.memory[layer, 1]
        if table.first_slot is not None:
            span = slice(table.first_slot, table.first_slot + table.length)
            return keys[None, span], values[None, span]
        return self._gather(keys, table), self._gather(values, table)

    def _gather(self, source: Tensor, table: BlockTable) -> Tensor:
        pages = source.view(self.blocks, -1).index_select(0, table.index)
        return pages.view(table.rows, -1, *self._inner)[:, : table.length]

    def table(self, rows: Sequence[Sequence[int]], length: int) -> BlockTable:
        """Prepares reading the first `length` tokens that each row of blocks holds.

        Behind the end of a row that holds fewer stands whatever the pool holds there, always finite numbers.
        """
        count = -(-length // self.block_size)
        used = [blocks[:count] for blocks in rows]
        first = used[0][0]
        in_a_run = len(rows) == 1 and first + count <= self.blocks and used[0] == [*range(first, first + len(used[0]))]
        flat = [blocks[min(at, len(blocks) - 1)] for blocks in used for at in range(count)]
        index = torch.tensor(flat, dtype=torch.int64, device=self.device)
        return BlockTable(index, len(rows), length, first * self.block_size if in_a_run else None)

    def slots(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """The slots of token positions start … end - 1 of a sequence, int64."""
        flat = [self.slot(blocks, position) for position in range(start, end)]
        return torch.tensor(flat, dtype=torch.int64, device=self.device)

    def slot(self, blocks: Sequence[int], position: int) -> int:
        """The slot of one token position of a sequence."""
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def export(self, blocks: Sequence[int]) -> Tensor:
        """Copies whole blocks out, page-first: [n, layers, 2, block_size, kv_heads, head_dim]."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        paged = self._paged()
        out = torch.empty((len(blocks), len(paged), 2, *paged.shape[3:]), device=self.device, dtype=self.dtype)
        for layer in range(len(paged)):
            for part in range(2):
                out[:, layer, part] = paged[layer, part].index_select(0, index)
        return out

    def staging(self, count: int) -> Tensor:
        """Host memory for `count` whole blocks, page-first as `load` takes them; pinned where that speeds copies up."""
        layers = self.memory.shape[0]
        shape = (count, layers, 2, self.block_size, *self._inner)
        return torch.empty(shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def load(self, blocks: Sequence[int], payload: Tensor) -> None:
        """Copies whole blocks in; the inverse of `export`."""
        payload = payload.to(self.device, non_blocking=True)
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        paged = self._paged()
        for layer in range(len(paged)):
            for part in range(2):  # one long index_copy_ over all layers is ten times slower
                paged[layer, part].index_copy_(0, index, payload[:, layer, part])

    def _paged(self) -> Tensor:
        layers = self.memory.shape[0]
        return self.memory.view(layers, 2, self.blocks, self.block_size, *self._inner)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where the tokens of some rows lie: block ids, how many tokens each, the first slot of a lone row in one run."""

    index: Tensor
    rows: int
    length: int
    first_slot: int | None


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only as they are written, where the system can do that."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
