"""The digest by which an answer under load names its question, so that one wrong answer among millions is seen."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest_of(messages: list[dict[str, Any]]) -> str:
    """Sixteen hexadecimal digits that stand for the whole conversation."""
    text = json.dumps(messages, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
