"""The forward pass of a Llama-family model, free of files, caches and batching.

Attention is handed in (`Attend`): the caller knows where keys and values live. All rows of all sequences in one call
go through the linear layers together; shapes are [rows, features].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ModelError
from engine.model.int8 import Int8Weight
from engine.model.linear import Weight, linear, packed
from engine.model.spec import ModelSpec


class Attend(Protocol):
    """Stores this layer's new keys and values, and attends over all that each row may see.

    q is [rows, heads, head_dim], k and v are [rows, kv_heads, head_dim]; the result is [rows, heads * head_dim].
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    """One block's weights; q, k, v and gate, up are fused so that each is one matrix product."""

    attn_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    ffn_norm: Tensor
    gate_up: Weight
    down: Weight

    @property
    def matrices(self) -> tuple[Weight, Weight, Weight, Weight]:
        """In the order in which a pass reads them."""
        return self.qkv, self.o, self.gate_up, self.down

    def packed(self) -> Layer:
        """The same layer with its matrices in their fastest form."""
        qkv, o, gate_up, down = (packed(m) if isinstance(m, Tensor) else m for m in self.matrices)
        return replace(self, qkv=qkv, o=o, gate_up=gate_up, down=down)


class Llama:
    """Weights on a device. `hidden` runs the layers, `logits` the head; both without gradients.

    With `int8_decode` there are int8 copies of the matrices for compiled decode passes. These here never use them, so
    what is kept in the prefix cache does not depend on it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensor: Callable[[str], Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        int8_decode: bool = False,
        progress: Callable[[int], None] = lambda layer: None,
    ) -> None:
        if int8_decode and device.type != "cpu":
            raise ModelError("int8_decode works on the CPU only")
        self.spec, self.device, self.dtype = spec, device, dtype
        self._tensor = tensor
        self.embed = self._get("embed", spec.vocab, spec.hidden)
        self.layers: list[Layer] = []
        self.int8_layers: list[list[Int8Weight]] = []
        for index in range(spec.layers):
            layer = self._layer(f"layers.{index}.")
            self.layers.append(layer.packed())
            if int8_decode:
                self.int8_layers.append([Int8Weight(m) for m in layer.matrices if isinstance(m, Tensor)])
            progress(index + 1)
        self.norm = self._get("norm", spec.hidden)
        head = self.embed if spec.tied else self._get("head", spec.vocab, spec.hidden)
        self.head = packed(head)
        self.int8_head = Int8Weight(head) if int8_decode else None
        self._eps = torch.full((1,), spec.norm_eps, device=device)
        self.cos, self.sin = rope_tables(spec, spec.context, device)

    def _get(self, name: str, *shape: int) -> Tensor:
        value = self._tensor(name)
        if value.shape != shape:
            raise ModelError(f"tensor {name} has shape {tuple(value.shape)}, but the model's metadata asks for {shape}")
        return value.to(self.device, self.dtype).contiguous()

    def _layer(self, at: str) -> Layer:
        spec = self.spec
        q_out, kv_out = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        outs = (("q", q_out), ("k", kv_out), ("v", kv_out))
        return Layer(
            attn_norm=self._get(at + "attn_norm", spec.hidden),
            qkv=torch.cat([self._get(at + name, out, spec.hidden) for name, out in outs]),
            qkv_bias=torch.cat([self._get(f"{at}{n}.bias", out) for n, out in outs]) if spec.qkv_bias else None,
            q_norm=self._get(at + "q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._get(at + "k_norm", spec.head_dim) if spec.qk_norm else None,
            o=self._get(at + "o", spec.hidden, q_out),
            ffn_norm=self._get(at + "ffn_norm", spec.hidden),
            gate_up=torch.cat([self._get(at + name, spec.ffn, spec.hidden) for name in ("gate", "up")]),
            down=self._get(at + "down", spec.hidden, spec.ffn),
        )

    @torch.inference_mode()
    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, *, layers: int | None = None) -> Tensor:
        """Runs all layers (or the first `layers`). `ids`, `positions`: int64 [rows]. Returns [rows, hidden], before the
        last norm."""
        spec = self.spec
        q_out, kv_out = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        rows = len(ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = F.embedding(ids, self.embed)
        for index, layer in enumerate(self.layers[:layers]):
            qkv = linear(self._norm(x, layer.attn_norm), layer.qkv, layer.qkv_bias)
            qk, v = qkv.split([q_out + kv_out, kv_out], dim=-1)
            qk = qk.view(rows, spec.heads + spec.kv_heads, spec.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qk.split([spec.heads, spec.kv_heads], dim=1)
                qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], dim=1)
            q, k = rotate(qk, cos, sin).split([spec.heads, spec.kv_heads], dim=1)
            x = x + linear(attend(index, q, k, v.view(rows, spec.kv_heads, spec.head_dim)), layer.o)
            gate, up = linear(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(F.silu(gate).mul_(up), layer.down)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        return linear(self._norm(hidden, self.norm), self.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over the last axis (arXiv:1910.07467), in float32; `F.rms_norm` is slower on CPUs."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)


def rope_tables(spec: ModelSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and (signed) sine for each position, float32 [length, head_dim] (RoFormer, arXiv:2104.09864).

    The sine of the first half carries the minus sign of the rotation, so that `rotate` is two products and a sum.
    """
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequency = _stretch(1.0 / spec.rope_theta**half, spec)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def _stretch(frequency: Tensor, spec: ModelSpec) -> Tensor:
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each head in halves. x: [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim]. Computed in float32."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
