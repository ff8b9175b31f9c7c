"""The shape of a Llama-family model: all that the forward pass and the KV layout must know, nothing about files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind`: `linear` (all by `factor`) or `llama3` (low ones by `factor`)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward.

    Every head is rotated whole, in halves.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    def rope(self) -> dict[str, float | int | str | bool | None]:
        """Every rotary parameter by name, for the layout id of stored KV."""
        scaling = vars(self.rope_scaling) if self.rope_scaling else {}
        return {"theta": self.rope_theta, "dim": self.head_dim, "style": "half", **scaling}
