"""Text to token ids and back: a `tokenizers` pipeline built from a GGUF file's metadata, and streaming byte decoding.

The pre-tokenizer is chosen by the file's own `tokenizer.ggml.pre`. For SmolLM that is one token per digit, then
GPT-2's byte-level split; leaving the digits out gives ids that differ from llama.cpp's.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from engine.errors import ModelError
from engine.model.spec import ModelSpec

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_END_NAMES = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>")

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _pre_tokenizer(kind: str) -> PreTokenizer | None:
    match kind:
        case "smollm":
            return pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        case "gpt-2" | "gpt2" | "default":
            return ByteLevel(add_prefix_space=False)
        case "qwen2":
            return _split(_QWEN2)
        case "llama-bpe" | "llama3":
            return _split(_LLAMA3)
    return None


class Tokenizer:
    """A byte-level BPE vocabulary. `ends`: the ids that end a generation; `template`: the chat template, in Jinja."""

    def __init__(self, pipeline: Pipeline, ends: frozenset[int], template: str | None, bos: str, eos: str) -> None:
        self._pipeline = pipeline
        self.ends, self.template, self.bos, self.eos = ends, template, bos, eos
        self.size = pipeline.get_vocab_size(with_added_tokens=True)
        special = {i for i, token in pipeline.get_added_tokens_decoder().items() if token.special}
        self._bytes = [b"" if i in special else token_to_bytes(pipeline.id_to_token(i) or "") for i in range(self.size)]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, control tokens in it included. Lone surrogates become U+FFFD."""
        clean = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        return self._pipeline.encode(clean, add_special_tokens=False).ids

    def bytes_of(self, token: int) -> bytes:
        """The raw bytes a token stands for; empty for control tokens and ids outside the vocabulary."""
        return self._bytes[token] if token < self.size else b""

    def text_of(self, token: int) -> str:
        """A token by itself, for log-probability reports; control tokens by their name."""
        return self.bytes_of(token).decode("utf-8", "replace") or self._pipeline.id_to_token(token) or ""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of whole token lists."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def save(self, path: Path) -> None:
        """Writes the pipeline as a `tokenizer.json`."""
        self._pipeline.save(str(path))

    def stream(self) -> TextStream:
        """A decoder for one generation."""
        return TextStream(self)


class TextStream:
    """Decodes one generation token by token and never gives out half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token; may be empty."""
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019), character → byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(moved)}


_ALPHABET = _byte_alphabet()


def token_to_bytes(token: str) -> bytes:
    """The bytes behind a vocabulary string; a string outside the byte alphabet (an added token) stands for itself."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def from_gguf(metadata: Mapping[str, Any], spec: ModelSpec) -> Tokenizer:
    """Builds the tokenizer a GGUF file describes. Raises `ModelError` when it is of an unknown kind or damaged."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    split = _pre_tokenizer(pre) if kind == "gpt2" else None
    if split is None:
        raise ModelError(f"the model's tokenizer ({kind}, {pre}) is not supported; byte-level BPE kinds are")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(merges, list) or len(tokens) != spec.vocab:
        raise ModelError("the model's tokenizer data is missing or does not fit its embedding")
    if not isinstance(types, list) or len(types) != len(tokens):
        types = [_NORMAL] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        pipeline = Pipeline(BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise ModelError(f"the model's tokenizer data is damaged: {error}") from error
    pipeline.pre_tokenizer = split
    pipeline.decoder = decoders.ByteLevel()  # for others that read what `save` writes; here `bytes_of` decodes
    pipeline.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    pipeline.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )

    def named(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    bos, eos = named("bos"), named("eos")
    ends = {vocab[name] for name in _END_NAMES if name in vocab and types[vocab[name]] == _CONTROL}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        pipeline,
        frozenset(ends | ({eos} if eos is not None else set())),
        template if isinstance(template, str) else None,
        bos="" if bos is None else tokens[bos],
        eos="" if eos is None else tokens[eos],
    )
