"""The tokenizer and chat template in a GGUF file's metadata; the tensors are left alone.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). Lengths are
checked against the file before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and its settings under Hugging Face's names. Raises `ValueError`, `OSError`, `struct.error`."""
    with path.open("rb") as file:
        metadata = _Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).metadata()
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ValueError(f"its kind ({kind}) is not byte-level BPE")
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    types = metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = _splitter(split)  # type: ignore[reportAttributeAccessIssue]
    named = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in named if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == _USER_DEFINED])
    settings: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for name in ("bos", "eos"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            settings[f"{name}_token"] = tokens[number]
    return tokenizer, settings


def _splitter(kind: str) -> PreTokenizer:
    """By the name that llama.cpp gives to the rule. (SmolLM's takes digits one by one: without, other ids result.)"""
    match kind:
        case "smollm":
            return pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        case "gpt-2" | "gpt2" | "default":
            return ByteLevel(add_prefix_space=False)
        case "qwen2" | "llama-bpe" | "llama3":
            words = Regex(_WORDS % (r"\p{N}" if kind == "qwen2" else r"\p{N}{1,3}"))
            return pre_tokenizers.Sequence(
                [Split(words, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
            )
    raise ValueError(f"its way of splitting text ({kind}) is not known")


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def metadata(self) -> dict[str, Any]:
        if self._take(4) != b"GGUF" or self._number("<I") not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3")
        self._count(24)
        return {self._string(): self._value(self._number("<I")) for _ in range(self._count(13))}

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise ValueError(f"it holds the unknown type {kind}")
        item = self._number("<I")
        if item in _SCALARS:
            count = self._count(struct.calcsize(_SCALARS[item]))
            whole = f"<{count}{_SCALARS[item][1]}"
            return list(struct.unpack(whole, self._take(struct.calcsize(whole))))
        return [self._value(item, depth + 1) for _ in range(self._count(8))]

    def _count(self, least_size: int) -> int:
        """A number of things of at least so many bytes: more than fit in the file is a lie."""
        count = self._number("<Q")
        if count * least_size > len(self._data) - self._at:
            raise ValueError("it announces more than it holds")
        return count

    def _string(self) -> str:
        return self._take(self._count(1)).decode("utf-8", "surrogateescape")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise ValueError("it ends too early")
        self._at += count
        return piece
