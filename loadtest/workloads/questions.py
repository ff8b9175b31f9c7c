"""Frequently asked questions: the popularity of the n-th is proportional to 1 / n^s (Zipf's law)."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

_SUBJECTS = (
    "capital population currency anthem language area flag climate history highest-mountain longest-river".split()
)


class Questions:
    """``count`` different questions; the exponent of their popularity must be told with any hit rate that is quoted."""

    def __init__(self, count: int = 500, exponent: float = 1.1) -> None:
        self.exponent = exponent
        self._texts = [f"What is the {_SUBJECTS[n % len(_SUBJECTS)]} of country {n}?" for n in range(count)]
        self._weights = list(accumulate(1 / (n + 1) ** exponent for n in range(count)))

    def body(self, rng: random.Random, model: str) -> dict[str, Any]:
        """A deterministic request for one of them, streamed in three of ten cases."""
        text = rng.choices(self._texts, cum_weights=self._weights)[0]
        messages = [{"role": "user", "content": text}]
        return {"model": model, "temperature": 0, "messages": messages, "stream": rng.random() < 0.3}
