"""What workers and gateways that share a store must agree on: which purges were made, and the secret of the salts."""

from __future__ import annotations

import hashlib
import hmac

from cache.response.tags import PULSE
from cache.stores.breaker import GuardedStore
from gateway.runtime import Runtime
from gateway.sentinels.lights import Light, green, grey, red
from gateway.sentinels.patience import comes_true

HEARD_WITHIN = 2.0
"""Seconds in which a purge must have been heard of."""
_SECRET_KEY = hashlib.sha256(b"warmgate sentinel: secret").digest()[:16]


async def purges(runtime: Runtime, store: GuardedStore | None) -> Light:
    """Makes a purge of nothing in the store, as another worker would, and waits to hear of it."""
    name, known = "purges", runtime.generations
    if store is None:
        return grey(name, "no store is shared, so that no purge comes from elsewhere", "cache.disk")
    pulse = await store.bump(PULSE)
    if pulse is None:
        return grey(name, f"nothing can be purged while {store.name} cannot be written")
    made = (await store.generations() or {}) | {PULSE: pulse}
    missed: list[str] = []

    async def heard() -> bool:
        missed[:] = [scope for scope, generation in made.items() if not known.knows(scope, generation)]
        return not missed

    if await comes_true(heard, HEARD_WITHIN):
        return green(name)
    real = len(missed) - (PULSE in missed)
    served = f", so that it still serves what {real} of them ended" if real else ""
    return red(name, f"this worker does not hear of purges{served}: restart it", f"cache.{store.name}")


async def salt(runtime: Runtime, store: GuardedStore | None, every: float) -> Light:
    """Compares a proof of the secret with that of whoever else uses the store; ``every``: seconds between rounds."""
    name, config = "salt", runtime.config
    if store is None:
        return grey(name, "no store is shared, so that nobody else makes salts")
    if not any(member.config.cache_salt for member in runtime.pool.members) and not any(
        model.prompt_cache for model in config.models.values()
    ):
        return grey(name, "no salts are sent", "upstreams[].cache_salt")
    mine = hmac.new(runtime.secret, b"warmgate sentinel", hashlib.sha256).digest()[:16]
    theirs = await store.get(_SECRET_KEY)
    if theirs is None or theirs == mine:
        kept = await store.set(_SECRET_KEY, mine, 3 * every)
        theirs = await store.get(_SECRET_KEY) if kept else theirs
    if theirs is None:
        return grey(name, f"cannot be told while {store.name} cannot be written")
    if theirs == mine:
        return green(name)
    cause = "another gateway on this store has another secret: neither has any use of prefixes computed for the other"
    return red(name, cause, "secret (the same for all)")
