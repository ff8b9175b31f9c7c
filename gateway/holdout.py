"""The hold-out: a small random share of hits is really sent upstream, so that what the cache saves is measured, not
supposed, and so that it shows whether the answers still agree.

The caller gets the new answer, or the kept one should the upstream fail. Nothing of it is stored: what is measured must
not be changed by the measuring. Curated answers are the operator's own word and are never held out.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, Literal

import orjson

Agreement = Literal["agrees", "differs", "unjudged"]

_INCIDENTAL = frozenset(
    ("id", "created", "created_at", "usage", "system_fingerprint", "service_tier", "call_id", "item_id", "request_id")
)
"""Fields that differ between two equal answers."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What could have been answered from the cache: the ``kept`` message, empty where it cannot be compared (sampled),
    from which ``place`` (`gateway.trust`), and whether it is ``held_out`` (else its place is disarmed).
    """

    kept: bytes
    place: str
    held_out: bool


PATIENCE = 60.0
"""Seconds after which a held-out hit is answered from the cache after all."""
_FARTHEST = 64  # times the usual distance, while the upstream fails


class HoldOut:
    """Picks hits at random distances, on average one in ``1 / share``."""

    def __init__(self, share: float, chance: random.Random | None = None) -> None:
        self._share = share
        self._chance = chance or random.Random()
        self._stretch = 1
        self._left = self._distance()
        self._owed = 0  # hits that the short path has left to the full path for this

    @property
    def left(self) -> int:
        """Hits until the next one."""
        return self._left

    def went(self, well: bool) -> None:
        """How the last one went: while the upstream fails, hits are left alone more and more."""
        self._stretch = 1 if well else min(2 * self._stretch, _FARTHEST)
        if not well:
            self._left = self._distance()

    def due(self) -> bool:
        """Counts a hit, and says whether it is to be sent upstream."""
        if self._owed:
            self._owed -= 1
            return True
        return not self._passes()

    def passes(self) -> bool:
        """Counts a hit on the short path, and says whether it may be answered there. The one that may not, and no other
        meanwhile, is for the full path to send upstream.
        """
        passes = self._passes()
        self._owed += not passes
        return passes

    def _passes(self) -> bool:
        if self._left > 0:
            self._left -= 1
            return True
        self._left = self._distance()
        return False

    def _distance(self) -> int:
        """Half to one and a half times the mean, so that a process does not begin with a hit that is none."""
        if self._share <= 0:
            return sys.maxsize
        return round(self._chance.uniform(0.5, 1.5) / self._share * self._stretch) - 1


def agreement(kept: bytes, new: bytes | None) -> Agreement:
    """Whether two messages (plain forms of one dialect) say the same."""
    if new is None:
        return "unjudged"
    if kept == new:
        return "agrees"
    try:
        return "agrees" if _bare(orjson.loads(kept)) == _bare(orjson.loads(new)) else "differs"
    except orjson.JSONDecodeError:
        return "unjudged"


def _bare(value: Any) -> Any:
    """Without what is incidental, and without nulls, which a stream leaves out."""
    if isinstance(value, dict):
        return {name: _bare(item) for name, item in value.items() if name not in _INCIDENTAL and item is not None}
    return [_bare(item) for item in value] if isinstance(value, list) else value
