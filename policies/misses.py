"""Why a cache did not have an answer, although an ideal one would have: what each repeated request was lost to.

An ideal cache knows every question that was asked before, whoever asked, however long ago, and whatever incidental
fields came with it. What keeps a real one from that is counted under the first cause that applies.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Cause = Literal["first", "expired", "gone", "not stored", "tenancy", "fields", "disarmed", "held out", "declined"]
MEANS: dict[str, str] = {
    "first": "Nobody has asked this before: no cache could have known.",
    "expired": "It was answered, and the answer outlived its time (cache.ttl).",
    "gone": "It was answered, and the answer was evicted or purged, or the store was away (cache.memory, the stores).",
    "not stored": "It was asked before, and the answer was not kept (see warmgate_not_stored_total).",
    "tenancy": "Another tenant has asked the same; answers are not shared between tenants.",
    "fields": "The same was asked with other fields: where they change no answer, send them alike.",
    "disarmed": "It was answered, and the answer is not believed: too many there disagree (GET /admin/agreement).",
    "held out": "It was answered, and sent upstream all the same, to measure what hits save (cache.holdout).",
    "declined": "The caller or a rule would have none of it (no-cache, no-store, max-age, only-if-cached, a TTL of 0).",
}
SAMPLED = 16
"""One in so many requests that take no part in the cache is followed, picked by its hash, so that all its repeats are
(spatial sampling; Waldspurger et al., FAST 2015).
"""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Seen:
    """A request by its key (``exact``), and by hashes of its prompt alone (``alike``) and of each other field that is
    in its key.
    """

    exact: bytes
    alike: int
    tenant: str
    fields: Mapping[str, int]


class Misses:
    """Remembers the last ``most`` requests; what was asked before those counts as asked for the first time."""

    def __init__(self, most: int = 10_000) -> None:
        self.causes: Counter[str] = Counter()
        self.fields: Counter[str] = Counter()
        self.uncacheable_repeats = 0
        self._kept: _Latest[bytes, float] = _Latest(most)  # fresh until (unix seconds); 0: not stored
        self._asked: _Latest[int, Seen] = _Latest(most)
        self._uncacheable: _Latest[int, None] = _Latest(most)

    def cause(self, seen: Seen, now: float) -> Cause:
        """Why the cache does not have the answer; ``now``: unix seconds. To be given to `count` if nobody else's call
        brings it.
        """
        until = self._kept.get(seen.exact)
        before = self._asked.get(seen.alike)
        self._asked.put(seen.alike, seen)
        if until is not None:
            return "not stored" if not until else "expired" if until <= now else "gone"
        self._kept.put(seen.exact, 0.0)
        if before is None:
            return "first"
        names = before.fields.keys() | seen.fields.keys()
        differing = [name for name in names if before.fields.get(name) != seen.fields.get(name)]
        if not differing and before.tenant != seen.tenant:
            return "tenancy"
        self.fields.update(differing or ("others",))
        return "fields"

    def count(self, cause: Cause) -> None:
        """An upstream had to compute it."""
        self.causes[cause] += 1

    def stored(self, exact: bytes, until: float) -> None:
        """Its answer is kept, fresh until a moment (unix seconds)."""
        self._kept.put(exact, until)

    def uncacheable(self, request: int) -> None:
        """A request that takes no part in the cache, by the hash of all of it."""
        if request % SAMPLED == 0:
            if request in self._uncacheable:
                self.uncacheable_repeats += SAMPLED
            self._uncacheable.put(request, None)


class _Latest(Generic[K, V]):
    """A mapping that forgets what was used longest ago."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._most:
            self._items.popitem(last=False)
