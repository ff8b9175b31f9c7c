"""Purging in O(1): every entry remembers the generation of each scope it belongs to, and a purge raises one generation.

Scopes are ``all``, ``tenant:T``, ``model:M``, ``namespace:T/N``, ``tag:X`` and ``key:HEX``. Hard generations are
compared for equality, so an entry written under a generation that this process has not heard of yet is dead, never
alive by mistake. Soft generations (scope ``~…``) make older entries stale from the moment of the first such purge on,
however many follow; they are compared, not timed, so that clocks of several machines need not agree. ``before@MS``
ends, and ``~before@MS`` makes stale, all that was born before a moment in unix milliseconds.

Two more scopes, ``armed:PLACE`` and ``disarmed:PLACE``, purge nothing: of the two, the one raised last says whether
what is kept of a place (a tenant's namespace, for one model) may answer.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

EVERYTHING = "all"
PULSE = "pulse"
"""A scope that nothing belongs to: raised now and then, to see that purges are heard of."""
RENEWED = "renewed"
"""A scope that nothing belongs to: raised when somebody would not have an answer and a new one took its place, so that
other processes ask the shared store again for what they hold in memory.
"""
_BEFORE = "before@"
_SOFT = "~"
_ARMED, _DISARMED = "armed:", "disarmed:"
MARKS = 16
"""Soft purges of one scope that are told apart; those before them are taken for one, since the first of them."""


def scopes_of(*, key: bytes, tenant: str, namespace: str, model: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Every scope by which an entry can be purged."""
    own = (EVERYTHING, f"tenant:{tenant}", f"model:{model}", f"namespace:{tenant}/{namespace}", f"key:{key.hex()}")
    return own + tag_scopes(tags)


def tag_scopes(tags: Iterable[str]) -> tuple[str, ...]:
    """The scopes of tags."""
    return tuple(f"tag:{tag}" for tag in tags)


def before(moment: float) -> str:
    """The scope that purges everything born before a unix time in seconds."""
    return f"{_BEFORE}{int(moment * 1000)}"


def soft(scope: str) -> str:
    """The name under which a soft purge of ``scope`` is kept."""
    return _SOFT + scope


def place_of(tenant: str, namespace: str, model: str) -> str:
    """The name of a place; `parts_of` takes it apart."""
    return json.dumps([tenant, namespace, model], ensure_ascii=False, separators=(",", ":"))


def parts_of(place: str) -> tuple[str, str, str]:
    """Tenant, namespace and model."""
    tenant, namespace, model = json.loads(place)
    return tenant, namespace, model


def arming(place: str, *, armed: bool) -> str:
    """The scope to be raised so that what is kept of a place may answer, or may not."""
    return (_ARMED if armed else _DISARMED) + place


class _Marks:
    """The soft purges of one scope."""

    __slots__ = ("_marks", "latest")

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []
        self.latest = 0

    def add(self, limit: int, since: int) -> None:
        """Whatever lies before ``limit`` is stale ``since`` then (unix milliseconds)."""
        self._marks.append((limit, since))
        self.latest = max(limit, self.latest)
        if len(self._marks) > MARKS:
            (one, began), (other, again) = self._marks[:2]
            self._marks[:2] = [(max(one, other), min(began, again))]

    def since(self, place: float) -> float:
        """Since when what lies at ``place`` is stale, in unix seconds."""
        if not self._marks:
            return math.inf
        return min([since for limit, since in self._marks if place < limit], default=math.inf) / 1000


class Generations:
    """The generations this process knows of; a scope never purged is at 0."""

    def __init__(self) -> None:
        self._hard: dict[str, int] = {}
        self._soft: defaultdict[str, _Marks] = defaultdict(_Marks)
        self._dead_before = 0  # unix milliseconds
        self._stale_before = _Marks()
        self._pulse = 0  # apart from the others, so that whoever has purged nothing pays for no comparison
        self.renewed = 0
        self._armings: dict[str, int] = {}
        self.disarmed: set[str] = set()  # places

    def learn(self, scope: str, generation: int) -> None:
        """Takes note of a purge, whether made here or heard of; generations never go back."""
        is_soft, name = scope.startswith(_SOFT), scope.removeprefix(_SOFT)
        if name == PULSE:
            self._pulse = max(generation, self._pulse)
        elif name == RENEWED:
            self.renewed = max(generation, self.renewed)
        elif name.startswith((_ARMED, _DISARMED)):
            self._armings[name] = max(generation, self._armings.get(name, 0))
            self._set(name.partition(":")[2])
        elif name.startswith(_BEFORE):
            moment = int(name.removeprefix(_BEFORE))
            if is_soft:
                self._stale_before.add(moment, generation)
            else:
                self._dead_before = max(self._dead_before, moment)
        elif not is_soft:
            self._hard[name] = max(generation, self._hard.get(name, 0))
        elif generation > self._soft[name].latest:
            self._soft[name].add(generation, generation)

    def knows(self, scope: str, generation: int) -> bool:
        """Whether this purge, or a later one of its scope, was heard of."""
        is_soft, name = scope.startswith(_SOFT), scope.removeprefix(_SOFT)
        if name == PULSE:
            return self._pulse >= generation
        if name == RENEWED:
            return self.renewed >= generation
        if name.startswith((_ARMED, _DISARMED)):
            return self._armings.get(name, 0) >= generation
        if name.startswith(_BEFORE):
            return (self._stale_before.latest if is_soft else self._dead_before) >= int(name.removeprefix(_BEFORE))
        return self._latest(name, is_soft=is_soft) >= generation

    def armed_at(self, place: str) -> int:
        """The generation at which a place was last armed or disarmed; 0 where it never was."""
        return max(self._armings.get(scope + place, 0) for scope in (_ARMED, _DISARMED))

    def _set(self, place: str) -> None:
        if self._armings.get(_DISARMED + place, 0) > self._armings.get(_ARMED + place, 0):
            self.disarmed.add(place)
        else:
            self.disarmed.discard(place)

    def purge(self, scope: str, now: float) -> None:
        """Makes a purge that no store has numbered. ``now``: unix seconds."""
        is_soft, name = scope.startswith(_SOFT), scope.removeprefix(_SOFT)
        self.learn(scope, max(int(now * 1000), self._latest(name, is_soft=is_soft) + 1))

    def _latest(self, name: str, *, is_soft: bool) -> int:
        if name.startswith((_ARMED, _DISARMED)):
            return self.armed_at(name.partition(":")[2])
        if not is_soft:
            return self._hard.get(name, 0)
        marks = self._soft.get(name)
        return marks.latest if marks is not None else 0

    def stamp(self, scopes: Iterable[str]) -> dict[str, int]:
        """The present generation of each scope, for an entry about to be made; soft ones only where there are any."""
        scopes = tuple(scopes)
        stamped = {scope: self._hard.get(scope, 0) for scope in scopes}
        return stamped | {soft(scope): self._soft[scope].latest for scope in scopes if scope in self._soft}

    def widened(self, stamped: Mapping[str, int], scopes: Iterable[str], born: float) -> dict[str, int]:
        """A stamp with ``scopes`` that the entry was not made under: at what their generations were when it was
        ``born`` (unix seconds), as far as clocks tell, since a generation is no less than the time of its purge.
        """
        wider, moment = dict(stamped), int(born * 1000)
        for scope in scopes:
            if scope not in wider:
                generation = self._hard.get(scope, 0)
                wider[scope] = generation if generation <= moment else 0
                wider[soft(scope)] = moment
        return wider

    def alive(self, stamped: Mapping[str, int], born: float) -> bool:
        """Whether nothing has been purged under the entry, ``born`` at a unix time in seconds, since it was stamped."""
        hard = self._hard
        if born * 1000 < self._dead_before:
            return False
        return not hard or all(
            hard.get(scope, 0) == generation or scope.startswith(_SOFT) for scope, generation in stamped.items()
        )

    def fresh_until(self, stamped: Mapping[str, int], born: float, expires: float) -> float:
        """When the entry stops being fresh (unix seconds): as it ``expires``, or since a soft purge before that."""
        expires = min(expires, self._stale_before.since(born * 1000))
        for scope in stamped if self._soft else ():
            marks = self._soft.get(scope)
            if marks is not None:
                expires = min(expires, marks.since(stamped.get(soft(scope), 0)))
        return expires
