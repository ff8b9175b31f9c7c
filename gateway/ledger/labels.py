"""Names that the ledger counts by, kept within bounds: callers choose some of them, and must not fill it."""

from __future__ import annotations

MODELS = 1_000
"""Models told apart."""
REASONS = 300
"""Reasons told apart."""
OTHER = "(other)"
"""What the rest is counted under."""
NAME, REASON, PROMPT = 200, 80, 2_000
"""Characters kept."""


class Labels:
    """Remembers which names were given."""

    def __init__(self) -> None:
        self._models: set[str] = set()
        self._reasons: set[str] = set()

    def model(self, name: str) -> str:
        """The name a model is counted under."""
        return name if name in self._models else _admitted(clean(name, NAME), self._models, MODELS)

    def reason(self, reason: str) -> str:
        """A reason as it is counted: without the particulars behind its colon."""
        return _admitted(clean(reason.split(":", 1)[0], REASON), self._reasons, REASONS)


def clean(text: str, length: int) -> str:
    """Text that can be written: at most ``length`` characters, none of them half a surrogate pair."""
    return text[:length].encode("utf-8", "replace").decode()


def _admitted(name: str, known: set[str], most: int) -> str:
    if name not in known:
        if len(known) >= most:
            return OTHER
        known.add(name)
    return name
