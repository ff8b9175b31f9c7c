"""Joining streamed pieces into a message, and cutting text into pieces, for every dialect whose stream is made of
deltas.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from gateway.dialects.base import Unjoinable

TEXT = frozenset({"arguments", "content", "reasoning", "reasoning_content", "refusal", "text", "thinking"})
"""Fields whose pieces are concatenated. Any other string that comes twice with two values cannot be joined surely."""

_CUT = re.compile(r".{1,24}(?:\s+|$)|.{1,24}", re.DOTALL)


def merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a delta to a message in place: texts grow, objects merge, lists merge by ``index``; raises `Unjoinable` in
    doubt.
    """
    for name, new in delta.items():
        old = into.get(name)
        if old is None or (old == "" and isinstance(new, str)):
            into[name] = merged_list([], new, name) if isinstance(new, list) else copy.deepcopy(new)
        elif new is None or (new == "" and isinstance(old, str)):
            continue
        elif isinstance(old, str) and isinstance(new, str) and name in TEXT:
            into[name] = old + new
        elif isinstance(old, dict) and isinstance(new, dict):
            merge(old, new)
        elif isinstance(old, list) and isinstance(new, list):
            into[name] = merged_list(old, new, name)
        elif type(old) is not type(new) or old != new:
            raise Unjoinable(f"the field {name!r} came twice with two values")


def merged_list(old: list[Any], new: list[Any], name: str) -> list[Any]:
    """List items that carry an ``index`` merge with the item of that index; all others are appended."""
    for item in new:
        index = item.get("index") if isinstance(item, dict) else None
        if index is None:
            old.append(copy.deepcopy(item))
            continue
        known = next((other for other in old if isinstance(other, dict) and other.get("index") == index), None)
        if known is None:
            known = {"index": index}
            old.append(known)
        merge(known, {key: value for key, value in item.items() if key != "index"})
    return old


def by_index(items: list[Any], what: str) -> list[Any]:
    """Items in the order of their ``index``, which they lose; raises `Unjoinable` unless the indexes are 0, 1, 2, …"""
    ordered = sorted(items, key=lambda item: item["index"])
    if [item["index"] for item in ordered] != list(range(len(ordered))):
        raise Unjoinable(f"the indexes of {what} are not 0 to {len(ordered) - 1}")
    return [{key: value for key, value in item.items() if key != "index"} for item in ordered]


def cut(text: str) -> list[str]:
    """Pieces of a text, a few words each, that join to the text exactly."""
    return _CUT.findall(text)
