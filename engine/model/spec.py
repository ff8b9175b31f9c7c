"""The shape of a Llama-family model: all that the forward pass and the KV layout must know, nothing about files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ModelError

_LARGEST = {"layers": 1000, "context": 1 << 24}
"""What no model has more of; a file that says so is broken, and would have the memory filled with nothing."""


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

    def __post_init__(self) -> None:
        """Raises `ModelError` if no model can have this shape: what the files say is not to be trusted."""
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
            if not 0 < getattr(self, name) <= _LARGEST.get(name, 1 << 31):
                raise ModelError(f"{self.name} is not a usable model: its files say {name} = {getattr(self, name)}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            shape = f"{self.heads} heads, {self.kv_heads} KV heads of {self.head_dim}"
            raise ModelError(f"{self.name} is not a usable model: its files say {shape}")
        scaling = self.rope_scaling or RopeScaling("none", 1.0)
        numbers = {"rope theta": self.rope_theta, "norm epsilon": self.norm_eps, "rope factor": scaling.factor}
        for name, value in numbers.items():
            if not 0 < value < math.inf:
                raise ModelError(f"{self.name} is not a usable model: its files say {name} = {value}")

    def rope(self) -> dict[str, float | int | str | bool | None]:
        """Every rotary parameter by name, for the layout id of stored KV."""
        scaling = vars(self.rope_scaling) if self.rope_scaling else {}
        return {"theta": self.rope_theta, "dim": self.head_dim, "style": "half", **scaling}
