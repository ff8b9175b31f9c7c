"""Answering an exact repeat from the cache without parsing it: admission, limits, freshness and the ledger included.

Used by the short path (`gateway.wire`). It answers only what the full path would answer with the same bytes, and
otherwise leaves the request, untouched and uncounted, to the full path.
"""

from __future__ import annotations

from asyncio import Future
from dataclasses import dataclass
from typing import NamedTuple

from cache.response import recall
from cache.response.entry import BadEntry, Entry
from gateway.dialects import DIALECTS
from gateway.hit import ready
from gateway.http import Request
from gateway.ids import accepted, unique
from gateway.ledger import Row, Tally
from gateway.memo import Memo, Remembered, Scope
from gateway.plan import Plan
from gateway.runtime import Runtime
from gateway.tenants import Caller, Denied

MEMO_BYTES = 64 * 1024 * 1024
_STEERING = (b"cache-control", b"x-warmgate-")


@dataclass(frozen=True, slots=True)
class Caught:
    """What a request head says: who asks, under which scope bodies are remembered, and the request id it brought."""

    caller: Caller
    scope: Scope
    request_id: str | None


class Lookup(NamedTuple):
    """A lookup in the shared store under way: for which repeat, and since when (monotonic seconds)."""

    slot: Remembered
    below: recall.Lookup
    began: float

    @property
    def call(self) -> Future[bytes | None]:
        """Done when the store has answered, or failed to."""
        return self.below.call


class Shortcut:
    """The memo and the way through it; `forget` whenever the configuration or the curated answers change."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._memo = Memo(MEMO_BYTES)

    def forget(self) -> None:
        """Drops every remembered plan."""
        self._memo = Memo(MEMO_BYTES)

    def understand(self, request: Request) -> Caught | None:
        """Reads a request without its body; None when it is not for the short path."""
        dialect = DIALECTS.get(request.path)
        if dialect is None:
            return None
        try:
            caller = self._runtime.tenants.identify(request)
        except Denied:
            return None
        return Caught(
            caller, scope_of(request, dialect.name, dialect.vary, caller), accepted(request.header(b"x-request-id"))
        )

    def remember(self, request: Request, plan: Plan) -> None:
        """Takes note of a plan that the full path has made, if memory could answer a repeat of the request."""
        steered = request.query or any(name.startswith(_STEERING) for name, _ in request.headers)
        if plan.may_recall and not steered:
            self._memo.put(scope_of(request, plan.dialect.name, plan.dialect.vary, plan.caller), request.body, plan)

    def answer(self, caught: Caught, body: bytes) -> bytes | Lookup | None:
        """Headers and body of the answer to a repeat, if memory holds a fresh one; if it holds none, a lookup in the
        shared store, to be given to `conclude`; None leaves the request to the full path.
        """
        slot = self._memo.get(caught.scope, body)
        if slot is None:
            return None
        runtime, identity = self._runtime, slot.plan.identity
        entry = runtime.recall.in_memory(identity)
        if entry is None or not runtime.recall.confirmed(identity):
            below = runtime.recall.begin(identity)
            if below is not None:
                return Lookup(slot, below, runtime.clock.monotonic())
        # if what memory has is not fresh, or not for this caller, no lookup helps
        return self._serve(caught, slot, entry, runtime.clock.monotonic()) if entry is not None else None

    def conclude(self, caught: Caught, lookup: Lookup) -> bytes | None:
        """Headers and body of what a lookup has found that is done; None leaves the request to the full path."""
        runtime, slot = self._runtime, lookup.slot
        read = runtime.recall.end(slot.plan.identity, lookup.below, runtime.clock.time(), slot.read)
        if runtime.memory is None:
            slot.read = read
        entry = read.entry if read is not None else runtime.recall.in_memory(slot.plan.identity, again=True)
        return self._serve(caught, slot, entry, lookup.began) if entry is not None else None

    def _serve(self, caught: Caught, slot: Remembered, entry: Entry, began: float) -> bytes | None:
        runtime, plan = self._runtime, slot.plan
        if not runtime.trust.believes(plan):
            return None
        now = runtime.clock.time()
        if runtime.generations.fresh_until(entry.generations, entry.born, entry.expires) <= now:
            return None
        try:
            if slot.ready is None or (slot.message is not entry.message and slot.message != entry.message):
                slot.ready, slot.message = ready(plan, entry.message), entry.message
            caught.caller.require(plan.model.name)
            if not runtime.holdout.passes():
                return None
        except (BadEntry, Denied):
            return None
        if not caught.caller.usage.admit_at_once():
            return None
        request_id = caught.request_id or unique(32)
        answer = slot.ready.filled(
            plan.dialect.identity(now), entry.expires - now, max(0.0, now - entry.born), request_id
        )
        took = runtime.clock.monotonic() - began
        caught.caller.usage.release(entry.usage)
        tally = slot.tally
        if tally is None or tally.row.upstream != entry.upstream or tally.row.usage != entry.usage:
            tally = slot.tally = self._tally(plan, entry)
        runtime.ledger.hit(tally, now, took, request_id)
        return answer

    def _tally(self, plan: Plan, entry: Entry) -> Tally:
        """The ledger's counter for hits of this entry by this request."""
        return self._runtime.ledger.tally(
            Row(
                at=0.0,
                tenant=plan.caller.tenant,
                model=plan.model.target,
                endpoint=plan.dialect.path,
                outcome="exact",
                upstream=entry.upstream,
                status=200,
                stream=plan.streams,
                usage=entry.usage,
                prompt=plan.question if self._runtime.stores_prompts else "",
            )
        )


def scope_of(request: Request, dialect: str, vary: tuple[str, ...], caller: Caller) -> Scope:
    """See `Scope`."""
    return dialect, caller.tenant, tuple(request.header(name.encode()) or "" for name in vary)
