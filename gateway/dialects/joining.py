"""Joining streamed deltas into a message, and cutting texts into deltas. What no rule joins surely is refused.

A field is joined by its name: texts grow, log probabilities and token ids are appended, tool calls are kept apart by
``index``, and what is known to be constant may be repeated. Any other field may come once; where it comes again, no
rule tells a repetition from a continuation, and `Unjoinable` says so.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from cache.response.canonical import parse
from gateway.dialects.base import Unjoinable

_TEXTS = frozenset(("arguments", "content", "input", "reasoning", "reasoning_content", "refusal", "text"))
_CONSTANT = frozenset(
    ("finish_reason", "id", "model", "name", "object", "role", "severity", "stop_reason", "system_fingerprint", "type")
)
_CUT = re.compile(r".{1,24}(?:\s+|$)|.{1,24}", re.DOTALL)
_HUGE = re.compile(rb"[:\[,]\s*-?\d{19}")


class _Text(list[str]):
    """A text that grows; joined only at the end, so that a long one is not copied with every piece."""


class _Indexed(dict[int, dict[str, Any]]):
    """List items in the making, by their ``index``."""


def merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a delta to a message in the making, in place; raises `Unjoinable`. `settle` makes it a plain message."""
    for name, new in delta.items():
        old = into.get(name)
        if name == "tool_calls" and isinstance(new, list):
            if old is None:
                old = into[name] = _Indexed()
            _merge_indexed(old, new)
        elif old is None or (_empty(old) and type(old) is type(new)):
            into[name] = new
        elif new is None or (_empty(new) and (type(old) is type(new) or isinstance(old, _Text))):
            continue
        elif isinstance(new, str) and isinstance(old, _Text):
            old.append(new)
        elif isinstance(new, str) and isinstance(old, str) and name in _TEXTS:
            into[name] = _Text((old, new))
        elif isinstance(new, list) and isinstance(old, list) and name == "token_ids":
            old.extend(new)
        elif isinstance(new, dict) and isinstance(old, dict):
            (_extend if name == "logprobs" else merge)(old, new)
        elif type(old) is not type(new) or old != new or not (name in _CONSTANT or isinstance(new, bool)):
            raise Unjoinable(f"the field {name[:40]!r} came twice")


def merge_constant(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Adds fields that every chunk may repeat: they hold for the whole answer. Raises `Unjoinable` where two differ."""
    for name, value in new.items():
        old = into.get(name)
        if old is None or (old == "" and isinstance(value, str)):
            into[name] = value
        elif isinstance(old, dict) and isinstance(value, dict):
            merge_constant(old, value)
        elif value is not None and value != "" and (type(old) is not type(value) or old != value):
            raise Unjoinable(f"the field {name[:40]!r} came twice with two values")


def settle(value: Any) -> Any:
    """A message in the making as a plain one; raises `Unjoinable` unless list items came with indexes 0, 1, 2, …"""
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, _Indexed):
        if sorted(value) != list(range(len(value))):
            raise Unjoinable(f"indexes that are not 0 to {len(value) - 1}")
        return [settle(value[index]) for index in range(len(value))]
    if isinstance(value, dict):
        return {name: settle(item) for name, item in value.items()}
    return value


def cut(text: str) -> list[str]:
    """Pieces of a text, a few words each, that join to the text exactly; none for the empty text."""
    return _CUT.findall(text)


def load(data: bytes) -> Any:
    """Reads JSON without loss: integers beyond 64 bits keep every digit. Raises ValueError.

    Where such an integer may be, the exact and slower reader takes over.
    """
    return parse(data) if _HUGE.search(data) else orjson.loads(data)


def member(data: bytes, name: str) -> Any:
    """One member of a JSON object; None where there is none, or no object."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found.get(name) if isinstance(found, dict) else None


def loads_loosely(data: bytes) -> bool:
    """Whether it is JSON to a lenient reader (NaN, half surrogate pairs), though not to a strict one."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _empty(value: object) -> bool:
    return value == "" or value == []


def _merge_indexed(into: Any, items: list[Any]) -> None:
    if not isinstance(into, _Indexed):
        raise Unjoinable("a list that came after something else")
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        if type(index) is not int:
            raise Unjoinable("a list item without an index")
        merge(into.setdefault(index, {}), {name: value for name, value in item.items() if name != "index"})


def _extend(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Log probabilities come as lists, one item a token."""
    for name, new in more.items():
        old = into.get(name)
        if old is None:
            into[name] = new
        elif isinstance(old, list) and isinstance(new, list):
            old.extend(new)
        elif new is not None:
            raise Unjoinable(f"the field {name[:40]!r} came twice")
