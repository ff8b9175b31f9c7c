"""Output held to a JSON schema: which tokens may come next, by the `llguidance` library (a lexer and an Earley parser).

Only a request with a `response_format` of JSON pays for it; every other answer is chosen exactly as without it.
"""

from __future__ import annotations

import json
import threading
from functools import cached_property
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from engine.errors import RequestError
from engine.model.tokenizer import Tokenizer

MAX_SCHEMA = 1 << 18
"""Characters of a schema; what it grows to is bounded by the library's own limits."""

_WHITESPACE = r"[ \n\r\t]{0,32}"
"""Between tokens of JSON: a small model would otherwise indent for ever."""


class Guide:
    """Follows one generation: `mask` before a token is chosen, `advance` after it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits: Tensor) -> Tensor:
        """A copy of float32 logits [vocab] in which a token that may not come next is at minus infinity.

        Raises `RequestError` (500) if the library gave up on the grammar in the middle of an answer.
        """
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise RequestError("the response_format became too complex to follow", status=500, code="guide_failed")
        return logits.masked_fill(allowed == 0, float("-inf"))

    def advance(self, token: int) -> None:
        """Takes note of the token that was chosen."""
        self._matcher.consume_token(token)

    def copy(self) -> Guide:
        """The same guide from its present place, for another choice of the same request."""
        return Guide(self._matcher.deep_copy())


class Grammars:
    """Makes guides for one model's vocabulary. Safe to call from several threads; the first guide takes longest."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._lock = threading.Lock()

    @cached_property
    def _library(self) -> LLTokenizer:
        vocabulary: Any = _Vocabulary(self._tokenizer, self._vocab)
        return LLTokenizer(vocabulary, eos_token=sorted(self._tokenizer.ends))

    def guide(self, response_format: dict[str, Any]) -> Guide:
        """A guide for OpenAI's `response_format` of type `json_object` or `json_schema`.

        Raises `RequestError` for any other, and for a schema that is no schema or uses what cannot be enforced.
        """
        grammar = LLMatcher.grammar_from_json_schema(
            _schema(response_format), overrides={"whitespace_pattern": _WHITESPACE}
        )
        if not self._tokenizer.ends:
            raise _refused("this model has no token that ends an answer, so it cannot be held to a schema")
        with self._lock:
            library = self._library
        matcher = LLMatcher(library, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(f"the JSON schema cannot be enforced: {' '.join(matcher.get_error().split())[:300]}")
        matcher.compute_logit_bias()
        if matcher.is_error():  # seen in the middle of an answer it would be the engine's fault, and not the caller's
            raise _refused("no answer can begin as the JSON schema asks")
        return Guide(matcher)


def wants_json(response_format: dict[str, Any] | None) -> bool:
    """Whether the answer must be guided at all. Raises `RequestError` for a kind of format that is unknown."""
    kind = (response_format or {"type": "text"}).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _refused(f"response_format of type {kind!r} is not supported; use text, json_object or json_schema")
    return kind != "text"


def _schema(response_format: dict[str, Any]) -> str:
    if response_format["type"] == "json_object":
        return '{"type": "object"}'
    outer = response_format.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise _refused("response_format.json_schema.schema must be a JSON schema")
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA:
        raise _refused(f"the JSON schema has {len(text)} characters; at most {MAX_SCHEMA} are taken")
    return text


def _refused(message: str) -> RequestError:
    return RequestError(message, param="response_format")


class _Vocabulary:
    """A tokenizer as the library wants to see it. Ids beyond the tokenizer's own (padding) are never allowed."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokens = [tokenizer.bytes_of(token) for token in range(vocab)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        for token in self.special_token_ids:
            self.tokens[token] = f"<|{token}|>".encode()
        self.eos_token_id = min(tokenizer.ends)
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
