"""Requests that share prefixes and seldom repeat: chats of many turns, agent loops with tools, long documents."""

from __future__ import annotations

import json
import random
from typing import Any

_SYSTEM = "You are a careful assistant of the support desk. " * 20
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name.replace('_', ' ')} when it helps.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for name in ("search_orders", "read_ticket", "write_note", "list_files")
]
_WORDS = "amber basalt cedar delta ember fjord grove harbor inlet juniper kelp lagoon meadow north orchid pine".split()


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


class Chat:
    """A conversation that grows by a question and an answer each turn."""

    def __init__(self, rng: random.Random, turns: int = 8) -> None:
        self._rng = rng
        self._left = turns
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM}]

    @property
    def over(self) -> bool:
        """Whether all turns have been taken."""
        return self._left == 0

    def body(self, model: str) -> dict[str, Any]:
        """The next turn's request, sampled and streamed as chats are."""
        self._left -= 1
        self._messages.append({"role": "user", "content": _prose(self._rng, 30)})
        return {"model": model, "temperature": 0.7, "messages": list(self._messages), "stream": True}

    def answered(self, text: str) -> None:
        """The assistant's answer becomes part of the conversation."""
        self._messages.append({"role": "assistant", "content": text})


class AgentLoop(Chat):
    """An agent that calls a tool each turn and reads what it gave."""

    def body(self, model: str) -> dict[str, Any]:
        self._left -= 1
        arguments = json.dumps({"query": _prose(self._rng, 3)})
        function = {"name": self._rng.choice(_TOOLS)["function"]["name"], "arguments": arguments}
        call = {"id": f"call_{self._rng.getrandbits(48):012x}", "type": "function", "function": function}
        self._messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": _prose(self._rng, 60)},
        ]
        return {"model": model, "temperature": 0, "messages": list(self._messages), "tools": _TOOLS}


def document(rng: random.Random, model: str, kilobytes: int = 20, documents: int = 40) -> dict[str, Any]:
    """A question about one of a few long documents."""
    number = rng.randrange(documents)
    text = _prose(random.Random(number), kilobytes * 1024 // 7)
    question = f"{text}\n\nWhat does the document say about {rng.choice(_WORDS)}?"
    return {"model": model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
