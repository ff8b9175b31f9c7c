"""OpenAI embeddings: ``POST /v1/embeddings``. A request is a batch of items, and each item is remembered by itself
(`gateway.batch`); nothing is remembered of a batch as a whole.

What is kept of one item is two lines: the answer's model, and the item's object without its ``index``, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.dialects.base import Answer
from gateway.dialects.openai import VARY, counts, error_body
from gateway.dialects.plain import PlainDialect
from gateway.sse import frame
from policies.cacheability import Ask, Outcome

Item = str | list[int]
"""A text, or a text as tokens."""

_OF_THE_BATCH = frozenset(("object", "data", "model", "usage", "id", "created"))


class Embeddings(PlainDialect):
    """Texts in, vectors out."""

    name = "embeddings"
    path = "/v1/embeddings"
    vary = VARY
    excluded = {  # noqa: RUF012 (a constant of the class, as in every dialect)
        "user": "bookkeeping of the provider",
        "cache_salt": "replaced by the gateway's own",
        "priority": "order of service",
    }
    interchangeable = False  # vectors of two models cannot be compared
    held = 64 * 1024 * 1024

    def ask(self, body: Mapping[str, Any]) -> Ask:
        return Ask(turns=(), always_deterministic=True)

    def read(self, body: Mapping[str, Any], answer: bytes) -> Answer:
        """The message of a good answer is one kept item after another, by their place in the request."""
        try:
            found = orjson.loads(answer)
        except orjson.JSONDecodeError:
            return Answer(None, Outcome(fault="not JSON"))
        if not isinstance(found, dict) or found.get("error"):
            return Answer(None, Outcome(fault="unknown form"))
        usage = found.get("usage")
        tokens = read_only(**counts(prompt=usage.get("prompt_tokens"))) if isinstance(usage, dict) else {}
        items = items_of(body)
        if items is None or not found.keys() <= _OF_THE_BATCH or not _complete(found.get("data"), len(items)):
            return Answer(None, Outcome(fault="unknown form"), tokens)
        model = orjson.dumps(found.get("model"))
        placed = sorted(found["data"], key=lambda vector: vector["index"])
        lines = [line for vector in placed for line in (model, _without_index(vector))]
        return Answer(b"\n".join(lines), Outcome(("stop",)), tokens)

    def error(self, status: int, message: str, code: str | None = None, request_id: str = "") -> bytes:
        return error_body(status, message, code)

    def error_event(self, message: str, code: str) -> bytes:
        return frame(error_body(502, message, code))


def items_of(body: Mapping[str, Any]) -> list[Item] | None:
    """The items of a request, in order; None for an input that only the upstream can judge (empty, or mixed)."""
    given = body.get("input")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        return None
    if all(isinstance(item, str) for item in given):
        return given
    if _is_tokens(given):
        return [given]
    return given if all(_is_tokens(item) for item in given) else None


def kept_items(message: bytes) -> list[bytes]:
    """The kept form of each item of an answer that `Embeddings.read` has read."""
    lines = message.split(b"\n")
    return [b"\n".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]


def is_kept(message: bytes) -> bool:
    """Whether it has the form of a kept item."""
    return b"\n{" in message


def read_only(prompt: int | None = None) -> dict[str, int]:
    """Usage of an embedding: prompt tokens, none of them cached, and no output."""
    return {} if prompt is None else {"prompt": prompt, "output": 0, "cached": 0}


def assemble(kept: Sequence[bytes], prompt_tokens: int | None) -> bytes:
    """The answer to a batch, of kept items in the order of their request; without usage where it is not known."""
    pairs = [item.split(b"\n", 1) for item in kept]
    data = b",".join(b'{"index":%d,%s' % (index, vector[1:]) for index, (_, vector) in enumerate(pairs))
    usage = b""
    if prompt_tokens is not None:
        usage = b',"usage":{"prompt_tokens":%d,"total_tokens":%d}' % (prompt_tokens, prompt_tokens)
    return b'{"object":"list","data":[%s],"model":%s%s}' % (data, pairs[0][0], usage)


def shares(total: int, items: Sequence[Item]) -> list[int]:
    """How many of an answer's prompt tokens fall to each item: by its length in bytes or tokens, and in all exactly
    ``total``.
    """
    sizes = [max(1, len(item.encode(errors="replace") if isinstance(item, str) else item)) for item in items]
    whole, given, seen, found = sum(sizes), 0, 0, []
    for size in sizes:
        seen += size
        upto = total * seen // whole
        found.append(upto - given)
        given = upto
    return found


def _is_tokens(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(type(token) is int for token in item)


def _complete(data: object, wanted: int) -> bool:
    """Whether there is exactly one vector for each item."""
    if not isinstance(data, list) or len(data) != wanted:
        return False
    if not all(isinstance(vector, dict) and isinstance(vector.get("embedding"), list | str) for vector in data):
        return False
    indexes = [vector.get("index") for vector in data]
    return all(type(index) is int for index in indexes) and sorted(indexes) == list(range(wanted))


def _without_index(vector: dict[str, Any]) -> bytes:
    return orjson.dumps({name: value for name, value in vector.items() if name != "index"})
