"""Identifiers that need to be unique, not secret: drawn from a generator seeded once per process by the system."""

from __future__ import annotations

import os
import re
from random import Random

_draw = Random(os.urandom(32)).getrandbits
os.register_at_fork(after_in_child=lambda: _reseed())


_GIVEN = re.compile(r"[A-Za-z0-9._-]{1,128}")


def accepted(given: str | None) -> str | None:
    """A request id that a caller brought, if it is one that may stand in a header and a log line."""
    return given if given and _GIVEN.fullmatch(given) else None


def unique(digits: int) -> str:
    """``digits`` random hexadecimal digits."""
    return f"{_draw(4 * digits):0{digits}x}"


def _reseed() -> None:
    global _draw
    _draw = Random(os.urandom(32)).getrandbits
