"""Notices conversations whose beginning changes from turn to turn: a clock or a counter at the head of a prompt makes
every turn a full prefill, wherever it goes, and only the caller can mend it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

from cache.response.canonical import spell
from gateway.upstreams.prompt import first_user_turn

MAX_CONVERSATIONS = 512
MAX_BEGINNING = 16 * 1024
"""Bytes of a beginning that are compared."""


class Beginnings:
    """How conversations began when they were last seen. What goes before the first user turn is the beginning; that
    turn and the answer to it name the conversation, so that it is not taken for another.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self.changed: Counter[str] = Counter()
        self.last_at: dict[str, int] = {}

    def look(self, model: str, body: Mapping[str, Any], begins: bytes, root: int) -> int | None:
        """``begins``: the prompt before its first user turn, in canonical spelling. Its first byte that is not what it
        was a turn ago; None: it is the same, or there is nothing to compare it with. Raises `BadBody`.
        """
        turns = body.get("messages") or body.get("input")
        if not isinstance(turns, list):
            return None
        user = first_user_turn(turns)
        if user + 1 >= len(turns) or _role(turns[user + 1]) != "assistant":
            return None
        name = xxh3_64_intdigest(spell(turns[user : user + 2]), root)
        begins = begins[:MAX_BEGINNING]
        before = self._seen.pop(name, None)
        self._seen[name] = begins
        if len(self._seen) > MAX_CONVERSATIONS:
            self._seen.popitem(last=False)
        if before is None or before == begins:
            return None
        at = next((i for i, (a, b) in enumerate(zip(before, begins, strict=False)) if a != b), len(begins))
        self.changed[model] += 1
        self.last_at[model] = at
        return at

    def told_of(self) -> dict[str, dict[str, int]]:
        """By model: requests whose beginning had changed, and where the last of them had."""
        return {model: {"requests": count, "at": self.last_at[model]} for model, count in self.changed.items()}


def _role(turn: object) -> object:
    return turn.get("role") if isinstance(turn, Mapping) else None
