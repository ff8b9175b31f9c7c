"""Purging in O(1): every entry remembers the generation of each scope it belongs to, and a purge raises one generation.

Scopes are ``all``, ``tenant:T``, ``model:M``, ``namespace:T/N``, ``tag:X`` and ``key:HEX``. Hard generations are
compared for equality, so an entry written under a generation that this process has not heard of yet is dead, never
alive by mistake. A soft purge is a moment in unix milliseconds (scope ``~…``): entries born before it are stale.
``before@MS`` ends all that was born before a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVERYTHING = "all"
_BEFORE = "before@"


def scopes_of(*, key: bytes, tenant: str, namespace: str, model: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Every scope by which an entry can be purged."""
    own = (EVERYTHING, f"tenant:{tenant}", f"model:{model}", f"namespace:{tenant}/{namespace}", f"key:{key.hex()}")
    return own + tuple(f"tag:{tag}" for tag in tags)


def before(moment: float) -> str:
    """The scope that purges everything born before a unix time in seconds."""
    return f"{_BEFORE}{int(moment * 1000)}"


def soft(scope: str) -> str:
    """The name under which a soft purge of ``scope`` is kept."""
    return f"~{scope}"


class Generations:
    """The generations this process knows of; a scope never purged is at 0."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._dead_before = 0.0  # unix milliseconds
        self._stale_before = 0.0

    def learn(self, scope: str, generation: int) -> None:
        """Takes note of a purge, whether made here or heard of; generations never go back."""
        hard, softly = scope.startswith(_BEFORE), scope.startswith(soft(_BEFORE))
        if hard:
            self._dead_before = max(self._dead_before, float(scope.removeprefix(_BEFORE)))
        elif softly:
            self._stale_before = max(self._stale_before, float(scope.removeprefix(soft(_BEFORE))))
        else:
            self._current[scope] = max(generation, self._current.get(scope, 0))

    def stamp(self, scopes: Iterable[str]) -> dict[str, int]:
        """The present generation of each scope, for an entry about to be made."""
        return {scope: self._current.get(scope, 0) for scope in scopes}

    def alive(self, stamped: Mapping[str, int], born: float) -> bool:
        """Whether nothing has been purged under the entry, ``born`` at a unix time in seconds, since it was stamped."""
        current = self._current
        if born * 1000 < self._dead_before:
            return False
        return not current or all(current.get(scope, 0) == generation for scope, generation in stamped.items())

    def softened(self, stamped: Mapping[str, int], born: float) -> bool:
        """Whether a soft purge has made the entry stale."""
        current, moment = self._current, born * 1000
        if moment < self._stale_before:
            return True
        return bool(current) and any(moment <= current.get(soft(scope), 0) for scope in stamped)
