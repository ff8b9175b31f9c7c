"""Hugging Face model folders: `config.json`, `*.safetensors`, `tokenizer.json`, for Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as Pipeline

from engine.errors import ModelError
from engine.model.spec import ModelSpec, RopeScaling
from engine.model.tokenizer import Tokenizer

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_BIASED = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


class Folder:
    """An open model folder: its spec, its tokenizer, `tensor(name)` by the engine's names, `digest`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if (path / "adapter_config.json").exists():
            raise ModelError(f"{path} is an adapter, which is not supported; merge it into its model first")
        config = self._json("config.json")
        self._files = sorted(path.glob("*.safetensors"))
        if not self._files:
            raise ModelError(f"{path} has no *.safetensors files")
        self._where: dict[str, Callable[[str], torch.Tensor]] = {}
        for file in self._files:
            try:
                tensors = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is not a usable safetensors file: {error}") from error
            self._where |= dict.fromkeys(tensors.keys(), tensors.get_tensor)
        self.spec = self._spec(config)
        self.tokenizer = self._tokenizer(config)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as float32. Raises `ModelError` if the files do not hold it."""
        if name in TOP:
            theirs = TOP[name]
        else:
            _, layer, part = name.split(".", 2)
            part, _, suffix = part.partition(".")
            theirs = f"model.layers.{layer}.{LAYER[part]}.{suffix or 'weight'}"
        if theirs not in self._where:
            raise ModelError(f"{self._path} has no tensor {theirs!r}")
        return self._where[theirs](theirs).float()

    def digest(self) -> bytes:
        """SHA-256 over all that decides what is computed: the configuration and the weight files, in order."""
        whole = hashlib.sha256()
        for file in (self._path / "config.json", *self._files):
            with file.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
        return whole.digest()

    def _json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        file = self._path / name
        if optional and not file.exists():
            return {}
        try:
            value = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"{file} does not hold a JSON object")
        return value

    def _spec(self, config: dict[str, Any]) -> ModelSpec:
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ModelError(f"{self._path} holds a {family!r} model; supported are {', '.join(_FAMILIES)}")
        if config.get("quantization_config"):
            raise ModelError(f"{self._path} is quantised in a way that is not supported; use a GGUF file instead")
        if config.get("use_sliding_window") or (family == "mistral" and config.get("sliding_window")):
            raise ModelError(f"{self._path} uses sliding-window attention, which is not supported")
        for name in self._where:
            if name.endswith(".bias") and not name.endswith(_BIASED):
                raise ModelError(f"{self._path} has a bias ({name}) where this engine's models have none")
        if config.get("hidden_act") not in (None, "silu", "swish"):
            raise ModelError(f"{self._path} is activated by {config['hidden_act']!r}; supported is silu")
        if (_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
            raise ModelError(f"{self._path} rotates only a part of each head, which is not supported")
        try:
            heads = int(config["num_attention_heads"])
            return ModelSpec(
                name=self._path.name,
                layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                ffn=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                rope_theta=float(_rope(config).get("rope_theta") or 10000.0),
                norm_eps=float(config["rms_norm_eps"]),
                rope_scaling=self._scaling(_rope(config)),
                tied=TOP["head"] not in self._where,
                qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._where,
                qk_norm=family == "qwen3",
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"{self._path}/config.json is incomplete: {error}") from error

    def _scaling(self, rope: dict[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return None
        if kind not in ("linear", "llama3"):
            raise ModelError(f"{self._path} stretches positions by {kind!r}; supported are linear and llama3")
        scaling = RopeScaling(kind, float(rope["factor"]))
        if kind == "linear":
            return scaling
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return RopeScaling(kind, scaling.factor, low, high, int(rope["original_max_position_embeddings"]))

    def _tokenizer(self, config: dict[str, Any]) -> Tokenizer:
        try:
            pipeline = Pipeline.from_file(str(self._path / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"cannot read {self._path}/tokenizer.json: {error}") from error
        settings = self._json("tokenizer_config.json", optional=True)
        ends = self._json("generation_config.json", optional=True).get("eos_token_id") or config.get("eos_token_id")
        template_file = self._path / "chat_template.jinja"
        template = template_file.read_text("utf-8") if template_file.exists() else settings.get("chat_template")

        def named(key: str) -> str:
            value = settings.get(key)
            return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")

        return Tokenizer(
            pipeline,
            frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)),
            template if isinstance(template, str) else None,
            bos=named("bos_token"),
            eos=named("eos_token"),
        )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings, from either of the two places where they are written."""
    return (
        {"rope_theta": config.get("rope_theta")}
        | (config.get("rope_scaling") or {})
        | (config.get("rope_parameters") or {})
    )
