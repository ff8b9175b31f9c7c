"""A memo from the raw bytes of a request body to its plan, so that an exact repeat is neither parsed nor hashed anew.

xxh3 finds, comparing the bytes confirms. A memo is good for one configuration; it is dropped whole when that changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from cache.response.recall import Read
from gateway.hit import Ready
from gateway.ledger import Tally
from gateway.plan import Plan
from policies.eviction import S3Fifo

Scope = tuple[str, str, tuple[str, ...]]
"""What besides the body makes the plan: dialect, tenant, and the values of the headers its answers vary by."""

_OVERHEAD = 4096


@dataclass(slots=True)
class Remembered:
    """A body, its plan, and the answer last made ready for it, good as long as ``message`` is what is kept. ``read``:
    what the shared store held last, where there is no memory tier to hold it.
    """

    body: bytes
    plan: Plan
    message: bytes = b""
    ready: Ready | None = None
    read: Read | None = None
    tally: Tally | None = None


class Memo:
    """Bounded in bytes; a body counts three times, for itself, its parsed form and its rendered answer."""

    def __init__(self, max_bytes: int) -> None:
        self._slots: dict[tuple[Scope, int], Remembered] = {}
        self._policy: S3Fifo[tuple[Scope, int]] = S3Fifo(max_bytes)

    def get(self, scope: Scope, body: bytes) -> Remembered | None:
        """What is known of this very body under this scope."""
        key = (scope, xxh3_64_intdigest(body))
        slot = self._slots.get(key)
        if slot is None or slot.body != body:
            return None
        self._policy.touch(key)
        return slot

    def put(self, scope: Scope, body: bytes, plan: Plan) -> None:
        """Remembers the plan of a body; what is known of it already stays, with the answer made ready for it."""
        key = (scope, xxh3_64_intdigest(body))
        known = self._slots.get(key)
        if known is not None and known.body == body:
            return
        self._slots[key] = Remembered(body, plan)
        for gone in self._policy.insert(key, 3 * len(body) + _OVERHEAD):
            del self._slots[gone]
