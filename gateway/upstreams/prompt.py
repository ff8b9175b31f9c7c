"""A prompt as routing sees it: hashes that name its beginnings, and which conversation it belongs to.

Used where nothing tells which tokens an upstream holds. The chunks are of the request's text in canonical spelling, so
that equal beginnings give equal hashes whatever the dialect, the spacing and the order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from cache.response.canonical import BadBody, spell

CHUNK = 256
"""Bytes of one chunk, about 64 tokens of English."""
MAX_CHUNKS = 8192
"""Chunks of one prompt that are told apart; what lies behind them is taken as new."""

_HEADS = ("tools", "functions", "instructions", "system")
"""What engines and providers put before the conversation, in this order."""
_TURNS = ("messages", "input", "prompt")


def chain(text: bytes, root: int, size: int) -> list[int]:
    """Names each beginning of ``text`` that ends on a multiple of ``size`` bytes, by everything before it."""
    hashes: list[int] = []
    previous = root
    for start in range(0, min(len(text) // size, MAX_CHUNKS) * size, size):
        previous = xxh3_64_intdigest(text[start : start + size], previous)
        hashes.append(previous)
    return hashes


def root_of(*parts: str) -> int:
    """Where chains begin that share nothing with those of other parts (tenant, model, …)."""
    return xxh3_64_intdigest("".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "surrogatepass"))


def canonical_text(body: Mapping[str, Any]) -> tuple[bytes, int]:
    """The prompt of a request of any dialect in one spelling, what comes first in the prompt first; and how many of its
    bytes come before the first user turn, and so are not this conversation's alone.
    """
    heads = [spell(body[name]) for name in _HEADS if body.get(name)]
    turns = [_items(body[name]) for name in _TURNS if body.get(name)]
    first = next((body[name] for name in _TURNS if body.get(name)), "")
    common = turns[0][: first_user_turn(first)] if turns and isinstance(first, list) else []
    parts = [*heads, *(b",".join(items) for items in turns)]
    return b"\n".join(parts), sum(len(part) + 1 for part in (*heads, *common))


def first_user_turn(turns: Sequence[object]) -> int:
    """The position of the first user turn; 0 where there is none."""
    return next((i for i, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"), 0)


def session_of(body: Mapping[str, Any], root: int) -> int:
    """Names the conversation: by the caller's own word for it, else by how it begins (up to the first user turn)."""
    named = body.get("prompt_cache_key") or body.get("conversation")
    if isinstance(named, str):
        return root_of(str(root), named) or 1
    turns = next((body[name] for name in _TURNS if body.get(name)), "")
    if isinstance(turns, list):
        turns = turns[: first_user_turn(turns) + 1]
    try:
        begin = spell([[body.get(name) for name in _HEADS], turns])
    except BadBody:
        return 0
    return xxh3_64_intdigest(begin, root) or 1


def _items(turns: object) -> list[bytes]:
    """A list's items one by one, without its brackets, so that a longer one begins with a shorter one."""
    if isinstance(turns, Sequence) and not isinstance(turns, str):
        return [spell(turn) for turn in turns]
    return [turns.encode("utf-8", "replace") if isinstance(turns, str) else spell(turns)]
