"""Whether an upstream's KV events arrive and mean here what they mean there: a canary's blocks must appear in the
router's index, under the very names by which requests look them up.
"""

from __future__ import annotations

from typing import Any

from gateway.runtime import Runtime
from gateway.sentinels.aside import PATH
from gateway.sentinels.lights import Light, green, grey, red
from gateway.sentinels.patience import comes_true
from gateway.upstreams.pool import Member

WITHIN = 1.5
"""Seconds in which the events of a canary must have come."""
AT_LAST = 6.0
"""Seconds that are given to those of another one, before it is said that they do not come."""
_NAME = "events"


class Telling:
    """Made before the canary ``body`` is sent. ``tokens``: those of the prompt as the upstream's tokenizer makes them
    here, 0 where there is none; ``other_tokens``: its events name others.
    """

    def __init__(self, runtime: Runtime, member: Member, body: dict[str, Any]) -> None:
        self._exact, self._index = runtime.router.exact, runtime.router.index
        self._member, self._bodies = member, [body]
        self._before = self._counts()
        self.tokens = 0
        self.other_tokens = False

    @property
    def expected(self) -> bool:
        """Whether events should come at all."""
        return self._before is not None

    def also(self, body: dict[str, Any]) -> None:
        """Before one more canary is sent: events may get lost once, or come late. From here on those of any will do."""
        self._bodies.append(body)

    async def light(self, salt: str, *, found: bool) -> Light:
        """After the canaries were sent with ``salt``. ``found``: the upstream has found one again."""
        name, config = self._member.name, self._member.config
        if config.kv_events is None:
            return grey(_NAME, "it is not asked for events", "upstreams[].kv_events", name)
        if config.tokenizer is None:
            cause = "without the upstream's tokenizer nobody can tell what its events mean"
            return red(_NAME, cause, "upstreams[].tokenizer", name)
        if self._before is None:
            cause = "they cannot be read: the address cannot be had, or the package pyzmq is missing"
            return red(_NAME, cause, "upstreams[].kv_events", name)
        within = WITHIN if len(self._bodies) == 1 else AT_LAST
        if await comes_true(lambda: self._held(salt), within):
            return green(_NAME, name)
        if not found:
            return grey(_NAME, "it keeps no prefix, so that there is nothing to tell", upstream=name)
        return await self._diagnosis(self._before)

    async def _diagnosis(self, before: dict[str, int]) -> Light:
        name = self._member.name
        new = {what: count - before.get(what, 0) for what, count in (self._counts() or {}).items()}
        if new.get("another block size"):
            cause = f"its blocks do not hold {self._member.config.kv_events.block_size} tokens, as configured"  # type: ignore[union-attr]
            return red(_NAME, cause, "upstreams[].kv_events.block_size", name)
        if not new.get("batches"):
            cause = "none arrive: publishing is off there, the address is another, or something between cuts them off"
            return red(_NAME, cause, "upstreams[].kv_events", name)
        if not self._exact.reads(name):
            return red(_NAME, "its tokenizer cannot be read here", "upstreams[].tokenizer", name)
        if await self._held(""):
            cause = "its blocks come without the salt that was sent; see the light of its prefixes"
            return grey(_NAME, cause, "upstreams[].cache_salt", name)
        bad = next(
            (what for what in ("unknown parent", "tokens do not fit the blocks", "unknown kind") if new.get(what)), ""
        )
        if bad:
            return red(_NAME, f"what comes cannot be understood: {bad}", "upstreams[].kv_events.replay", name)
        if not self.tokens:
            return grey(_NAME, "its prompt could not be read in time here", upstream=name)
        self.other_tokens = True
        return grey(_NAME, "its blocks hold other tokens; see the light of its template", upstream=name)

    async def _held(self, salt: str) -> bool:
        """Whether the index has at least half of a canary's blocks: engines may publish in larger units, and the
        first blocks may be those of the template.
        """
        for body in self._bodies:
            tokens, told = await self._exact.read(PATH, body, salt, [self._member])
            self.tokens = tokens or self.tokens
            if not told or self._member.name not in self._index.names():
                continue
            chain, slot = told[0].chain, self._index.slot(self._member.name)
            if self._index.match(chain, [slot]).get(slot, (0,))[-1] * 2 >= max(2, len(chain)):
                return True
        return False

    def _counts(self) -> dict[str, int] | None:
        return self._exact.counts().get(self._member.name)
