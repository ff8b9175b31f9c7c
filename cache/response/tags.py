"""Purging in O(1): every entry remembers the generation of each scope it belongs to, and a purge raises one generation.

Scopes are ``all``, ``tenant:T``, ``model:M``, ``namespace:T/N``, ``tag:X`` and ``key:HEX``. Hard generations are
compared for equality, so an entry written under a generation that this process has not heard of yet is dead, never
alive by mistake. Soft generations (scope ``~…``) make older entries stale from the moment of the purge on; they are
compared, not timed, so that clocks of several machines need not agree. ``before@MS`` ends, and ``~before@MS`` makes
stale, all that was born before a moment in unix milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVERYTHING = "all"
PULSE = "pulse"
"""A scope that nothing belongs to: raised now and then, to see that purges are heard of."""
_BEFORE = "before@"
_SOFT = "~"


def scopes_of(*, key: bytes, tenant: str, namespace: str, model: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Every scope by which an entry can be purged."""
    own = (EVERYTHING, f"tenant:{tenant}", f"model:{model}", f"namespace:{tenant}/{namespace}", f"key:{key.hex()}")
    return own + tuple(f"tag:{tag}" for tag in tags)


def before(moment: float) -> str:
    """The scope that purges everything born before a unix time in seconds."""
    return f"{_BEFORE}{int(moment * 1000)}"


def soft(scope: str) -> str:
    """The name under which a soft purge of ``scope`` is kept."""
    return _SOFT + scope


class Generations:
    """The generations this process knows of; a scope never purged is at 0."""

    def __init__(self) -> None:
        self._hard: dict[str, int] = {}
        self._soft: dict[str, int] = {}
        self._dead_before = 0.0  # unix milliseconds
        self._stale_before = 0.0
        self._stale_since = 0.0  # when that was decided
        self._pulse = 0  # apart from the others, so that whoever has purged nothing pays for no comparison

    def learn(self, scope: str, generation: int) -> None:
        """Takes note of a purge, whether made here or heard of; generations never go back."""
        kind = self._soft if scope.startswith(_SOFT) else self._hard
        name = scope.removeprefix(_SOFT)
        if name == PULSE:
            self._pulse = max(generation, self._pulse)
            return
        if not name.startswith(_BEFORE):
            kind[name] = max(generation, kind.get(name, 0))
            return
        moment = float(name.removeprefix(_BEFORE))
        if kind is self._hard:
            self._dead_before = max(self._dead_before, moment)
        elif moment > self._stale_before:
            self._stale_before, self._stale_since = moment, generation

    def knows(self, scope: str, generation: int) -> bool:
        """Whether this purge, or a later one of its scope, was heard of."""
        hard = not scope.startswith(_SOFT)
        name = scope.removeprefix(_SOFT)
        if name == PULSE:
            return self._pulse >= generation
        if name.startswith(_BEFORE):
            return (self._dead_before if hard else self._stale_before) >= float(name.removeprefix(_BEFORE))
        return (self._hard if hard else self._soft).get(name, 0) >= generation

    def purge(self, scope: str, now: float) -> None:
        """Makes a purge that no store has numbered. ``now``: unix seconds."""
        kind = self._soft if scope.startswith(_SOFT) else self._hard
        self.learn(scope, max(int(now * 1000), kind.get(scope.removeprefix(_SOFT), 0) + 1))

    def stamp(self, scopes: Iterable[str]) -> dict[str, int]:
        """The present generation of each scope, for an entry about to be made; soft ones only where there are any."""
        scopes = tuple(scopes)
        stamped = {scope: self._hard.get(scope, 0) for scope in scopes}
        return stamped | {soft(scope): self._soft[scope] for scope in scopes if scope in self._soft}

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
        if born * 1000 < self._stale_before:
            expires = min(expires, self._stale_since / 1000)
        for scope in stamped if self._soft else ():
            generation = self._soft.get(scope, 0)
            if generation > stamped.get(soft(scope), 0):
                expires = min(expires, generation / 1000)
        return expires
