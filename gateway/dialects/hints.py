"""Helping a provider to cache prefixes, where the operator wishes it (``models.….prompt_cache``). No answer changes by
it, and a caller who gives hints of its own is left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from cache.response.canonical import spell

_MARK = {"type": "ephemeral"}


def prompt_cache_key(body: Mapping[str, Any], salt: str, *stable: object) -> dict[str, Any]:
    """OpenAI's ``prompt_cache_key``: equal for requests of one tenant (``salt``) that begin with the same ``stable``
    parts, so that the provider sends them to the machine that holds them. None without such a part.
    """
    if body.get("prompt_cache_key") is not None or not any(stable):
        return {}
    prefix = hashlib.sha256(spell(list(stable))).hexdigest()
    return {"prompt_cache_key": f"wg-{salt[:24]}-{prefix[:24]}"}


def breakpoints(body: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's cache breakpoints, behind the tools and behind the system text. Tools that are loaded only when they
    are searched for stand outside of the prefix, and are refused with a mark.
    """
    if "cache_control" in body or any(_marked(body.get(name)) for name in ("tools", "system", "messages")):
        return {}
    tools, system = body.get("tools"), body.get("system")
    changes: dict[str, Any] = {}
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        loaded = [place for place, tool in enumerate(tools) if not tool.get("defer_loading")]
        if loaded:
            last = loaded[-1]
            changes["tools"] = [*tools[:last], {**tools[last], "cache_control": _MARK}, *tools[last + 1 :]]
    if isinstance(system, str) and system.strip():
        changes["system"] = [{"type": "text", "text": system, "cache_control": _MARK}]
    elif isinstance(system, list) and system and isinstance(system[-1], dict) and system[-1].get("text"):
        changes["system"] = [*system[:-1], {**system[-1], "cache_control": _MARK}]
    return changes


def _marked(value: object) -> bool:
    if isinstance(value, dict):
        return "cache_control" in value or any(_marked(item) for item in value.values())
    return isinstance(value, list) and any(_marked(item) for item in value)
