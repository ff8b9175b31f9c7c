"""What every shared store can do, and the one way it fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

Kind = Literal["unavailable", "timeout", "busy", "denied", "moved", "full", "readonly", "protocol", "data", "behind"]

MAX_KEY = 400  # bytes; LMDB allows 511, of which the disk store's index needs some
GENERATIONS_KEPT = 90 * 86_400_000  # ms; longer than any entry may live, so that no purge is forgotten too early


class StoreError(Exception):
    """A store could not do what was asked. `kind` is what the breaker counts:

    - `unavailable`: no connection, no file; `timeout`: no answer in time; `busy`: it asks to come back later
    - `denied`: the credentials are wrong; `moved`: the key lives elsewhere (a cluster node)
    - `full`, `readonly`: writes fail, reads may go on
    - `protocol`: the peer does not speak RESP; `data`: this one key or value is not ours (wrong type, damaged)
    - `behind`: purges may have been missed, so what it holds is not to be believed
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind

    def copy(self) -> StoreError:
        """For each further caller: an exception raised many times gathers a traceback without end."""
        return StoreError(self.kind, str(self))


class SharedStore(Protocol):
    """Bytes by key, shared by processes. Calls that talk to the store raise StoreError and nothing else.

    The verbs return awaitables, not coroutines: the stores here return plain futures, which can be awaited without a
    task and, on hot paths, be given a callback without any coroutine.
    """

    @property
    def name(self) -> str: ...

    @property
    def timeout(self) -> float:
        """Seconds after which a `get` fails by itself; infinite where nobody sees to that."""
        ...

    async def open(self) -> None:
        """Get ready. Never raises for a store that is down: the calls will."""
        ...

    async def close(self) -> None:
        """Write what is pending, then release everything."""
        ...

    def get(self, key: bytes) -> Awaitable[bytes | None]:
        """The value, or None if there is none or it expired."""
        ...

    def set(self, key: bytes, value: bytes, ttl: float) -> Awaitable[None]:
        """Keep `value` for `ttl` seconds (> 0, else ValueError): nothing is kept without expiry."""
        ...

    def delete(self, key: bytes) -> Awaitable[None]: ...

    def bump(self, scope: str) -> Awaitable[int]:
        """Give `scope` a new generation: greater than any given out before, and at least the time in unix ms."""
        ...

    def generations(self) -> Awaitable[dict[str, int]]:
        """The generation of every scope bumped in the last 90 days."""
        ...

    async def watch(self, on_bump: Callable[[str, int], None]) -> None:
        """Tell of every generation, first those that exist, then each new one well within a second, whoever bumped it.

        Runs until cancelled and outlives any failure of the store. Each (scope, generation) is told once.
        """
        ...


def check_key(key: bytes) -> bytes:
    """`key`, or StoreError if a store could not hold it."""
    if not 0 < len(key) <= MAX_KEY:
        raise StoreError("data", f"a key must have 1 to {MAX_KEY} bytes, this one has {len(key)}")
    return key


def check_scope(scope: str) -> bytes:
    """`scope` as bytes, or ValueError: a purge that silently missed its scope would leave wrong answers alive."""
    raw = scope.encode()
    if not 0 < len(raw) <= MAX_KEY or b"\x00" in raw:
        raise ValueError(f"a purge scope must have 1 to {MAX_KEY} bytes, none of them NUL; this one has {len(raw)}")
    return raw


def check_ttl(ttl: float) -> int:
    """`ttl` in whole milliseconds, at least 1."""
    if not ttl > 0:
        raise ValueError(f"a time to live must be positive, got {ttl}")
    return max(1, int(ttl * 1000))
