"""The small model as a Hugging Face folder, as vLLM wants it: `python -m tests.real.model FOLDER`.

Weights in bfloat16. The tokenizer is the engine's own, which takes digits one by one; transformers' reading of the same
file does not, and gives other ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.folder import LAYER, TOP
from engine.model.spec import ModelSpec
from engine.model.weights import ModelFiles, open_model


def save(files: ModelFiles, folder: Path) -> None:
    """Writes a Llama model; ``folder`` may be there already."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {theirs: files.tensor(ours).to(torch.bfloat16).contiguous() for ours, theirs in _names(files.spec)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    files.tokenizer.save(folder / "tokenizer.json")
    _write(folder / "tokenizer_config.json", _tokenizer_config(files))
    if files.tokenizer.template is not None:
        (folder / "chat_template.jinja").write_text(files.tokenizer.template, "utf-8")
    _write(folder / "config.json", _config(files))


def _names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Each tensor by the engine's name and by Hugging Face's."""
    for ours, theirs in TOP.items():
        if ours != "head" or not spec.tied:
            yield ours, theirs
    for layer in range(spec.layers):
        for ours, theirs in LAYER.items():
            if ours not in ("q_norm", "k_norm"):  # Llama has none
                yield f"layers.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"


def _config(files: ModelFiles) -> dict[str, Any]:
    spec = files.spec
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "eos_token_id": sorted(files.tokenizer.ends),
    }


def _tokenizer_config(files: ModelFiles) -> dict[str, Any]:
    tokenizer = files.tokenizer
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos,
        "eos_token": tokenizer.eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": files.spec.context,
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")


if __name__ == "__main__":
    save(open_model("smollm2-135m-instruct"), Path(sys.argv[1]))
