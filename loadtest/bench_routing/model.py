"""A tiny random Llama model with a byte tokenizer, as a folder that any engine can serve: real arithmetic, real KV.

It answers in lower case letters, so that what it said has the same tokens again when it comes back in a prompt.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

NAME = "tiny"
CONTEXT = 8192
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 32, 4, 2, 48
KV_BYTES = LAYERS * 2 * KV_HEADS * (HIDDEN // HEADS) * 4
"""Bytes of KV for one token (float32)."""
_SPECIALS = ("<|im_end|>", "<|im_start|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Writes it into ``folder``/`NAME`, the same each time; returns that."""
    path = folder / NAME
    path.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(_TEMPLATE)
    vocab = tokenizer.get_vocab_size()
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": vocab - len(_SPECIALS),
    }
    (path / "config.json").write_text(json.dumps(config))
    spoken = [letters.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    save_file(_weights(vocab, spoken), path / "model.safetensors")
    return path


def _weights(vocab: int, spoken: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def random(rows: int, columns: int, scale: float | None = None) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * (scale or columns**-0.5)).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    head = np.zeros((vocab, HIDDEN), np.float32)
    head[spoken] = random(len(spoken), HIDDEN, 1.0)
    weights = {
        "model.embed_tokens.weight": random(vocab, HIDDEN, 1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": random(kv, HIDDEN),
            f"{name}.self_attn.v_proj.weight": random(kv, HIDDEN),
            f"{name}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": random(FFN, HIDDEN),
            f"{name}.mlp.up_proj.weight": random(FFN, HIDDEN),
            f"{name}.mlp.down_proj.weight": random(HIDDEN, FFN),
        }
    return weights
