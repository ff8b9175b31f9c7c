"""A tiny random model with a byte tokenizer: real arithmetic in microseconds, for everything but the truth tests."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.decoding import MakeDecoder, quickest_decoder
from engine.kv.manager import BlockEvents
from engine.kv.pool import KVPool
from engine.model.spec import ModelSpec
from engine.model.tokenizer import Tokenizer
from engine.model.weights import ModelFiles

SPECIALS = ("<|im_end|>", "<|im_start|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPEC = ModelSpec(
    name="tiny",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=258,
    context=256,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied=False,
)


def pipeline() -> Pipeline:
    """One token per byte, then two control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Pipeline(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[reportAttributeAccessIssue]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return made


def tokenizer() -> Tokenizer:
    """The pipeline as the engine uses it."""
    return Tokenizer(pipeline(), frozenset({256}), TEMPLATE, bos="", eos=SPECIALS[0])


def files(spec: ModelSpec = SPEC, seed: int = 0) -> ModelFiles:
    """Random weights, the same for the same spec and seed."""

    def tensor(name: str) -> torch.Tensor:
        part = name.split(".")[-1]
        q_out, kv_out = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shape = {
            "embed": (spec.vocab, spec.hidden),
            "head": (spec.vocab, spec.hidden),
            "q": (q_out, spec.hidden),
            "k": (kv_out, spec.hidden),
            "v": (kv_out, spec.hidden),
            "o": (spec.hidden, q_out),
            "gate": (spec.ffn, spec.hidden),
            "up": (spec.ffn, spec.hidden),
            "down": (spec.hidden, spec.ffn),
        }.get(part)
        if shape is None:
            return torch.ones(spec.head_dim if part in ("q_norm", "k_norm") else spec.hidden)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        scale = {"embed": 1.0, "head": 0.5}.get(part) or float(shape[-1]) ** -0.5
        return torch.randn(shape, generator=generator) * scale

    digest = hashlib.sha256(f"{seed}".encode()).digest()
    return ModelFiles(spec, tokenizer(), digest, tensor)


def config(blocks: int = 64, **changes: object) -> EngineConfig:
    """Blocks of 4 tokens, chunks of 8, a pool of `blocks` blocks."""
    size = KVPool.block_bytes(SPEC, 4, torch.float32)
    base = EngineConfig(model="tiny", block_size=4, prefill_chunk=8, step_tokens=16, threads=1)
    return replace(base, kv_bytes=blocks * size, device="cpu", **changes)  # type: ignore[arg-type]


def core(
    blocks: int = 64,
    *,
    events: BlockEvents | None = None,
    model: ModelFiles | None = None,
    make_decoder: MakeDecoder = quickest_decoder,
    **changes: object,
) -> EngineCore:
    """An engine core over the tiny model."""
    return EngineCore(config(blocks, **changes), model or files(), events=events, make_decoder=make_decoder)
