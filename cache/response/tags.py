"""Purging in O(1): every entry remembers the generation of each scope it belongs to, and a purge raises one generation.

Scopes are ``all``, ``tenant:T``, ``model:M``, ``namespace:T/N``, ``tag:X`` and ``key:HEX``. Hard generations are compared for
equality, so an entry written under a generation that this process has not heard of yet is dead, never alive by mistake. A soft purge
is a moment in unix milliseconds (scope ``~…``): entries born before it are stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVERYTHING = "all"


def scopes_of(*, key: bytes, tenant: str, namespace: str, model: str, tags: Iterable[str]) -> tuple[str, ...]:
    """Every scope by which an entry can be purged."""
    own = (EVERYTHING, f"tenant:{tenant}", f"model:{model}", f"namespace:{tenant}/{namespace}", f"key:{key.hex()}")
    return own + tuple(f"tag:{tag}" for tag in tags)


def soft(scope: str) -> str:
    """The name under which a soft purge of ``scope`` is kept."""
    return f"~{scope}"


class Generations:
    """The generations this process knows of; a scope never purged is at 0."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}

    def learn(self, scope: str, generation: int) -> None:
        """Takes note of a purge, whether made here or heard of; generations never go back."""
        self._current[scope] = max(generation, self._current.get(scope, 0))

    def stamp(self, scopes: Iterable[str]) -> dict[str, int]:
        """The present generation of each scope, for an entry about to be made."""
        return {scope: self._current.get(scope, 0) for scope in scopes}

    def alive(self, stamped: Mapping[str, int]) -> bool:
        """Whether nothing has been purged under the entry since it was stamped."""
        current = self._current
        return not current or all(current.get(scope, 0) == generation for scope, generation in stamped.items())

    def softened(self, stamped: Mapping[str, int], born: float) -> bool:
        """Whether a soft purge has made the entry, ``born`` at a unix time in seconds, stale."""
        current = self._current
        return bool(current) and any(born * 1000 <= current.get(soft(scope), 0) for scope in stamped)
