"""Routing live: asks the index who holds a prompt's beginning, the policy where it goes, and counts the load it makes.

A `Route` is held from the decision to the end of the answer. Nothing is awaited between a decision and its being
counted, so that requests that come together do not all see the same idle upstream.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import TracebackType
from typing import Any

from cache.response.canonical import BadBody
from gateway.clock import Clock
from gateway.config import Routing
from gateway.upstreams.exact import ExactSource, Told
from gateway.upstreams.pool import Member
from gateway.upstreams.prefix_index import Belief, Depths, Learned, PrefixIndex, deepest
from gateway.upstreams.prompt import CHUNK, canonical_text, chain, root_of, session_of
from policies.routing import Ask, Decision, Engine, Held, Share, home_of, make_policy, settle_rates

TOKENS_PER_BYTE = 0.25
"""Until usage reports have shown how many prompt tokens a byte makes."""
MAX_CHUNKS = 1_000_000
"""Chunks believed to be held, all upstreams together."""
FETCH = (0.0, 0.05, 0.3)
"""What a token costs to fetch from device, host and remote memory, as a share of what it costs to compute."""
MANY = 16
"""Upstreams that are all looked at for every request. Of more, `HOLDERS` who hold most and `SAMPLE` others are."""
HOLDERS, SAMPLE = 4, 4
_LEAST_MEASURED = 256
"""Prompt tokens below which the time to the first token says little of the prefill rate."""

_Found = tuple[list[Depths], float]
"""Who holds how many links of a chain, by tier, and the tokens that one link stands for."""


@dataclass(slots=True)
class Asked:
    """A request as the router sees it. ``size``: bytes of its prompt. ``blocks``: the chains of its token blocks, for
    the upstreams that tell which they hold. ``common``: bytes of its prompt before the first user turn.
    """

    model: str
    size: int
    chunks: Sequence[int] = ()
    session: int = 0
    tokens: int = 0
    blocks: Sequence[Told] = ()
    common: int = 0


class Route:
    """One request under way to one upstream: a context that counts it there until it is left, however that happens."""

    def __init__(self, router: Router, member: Member, asked: Asked, decision: Decision, now: float) -> None:
        self.member = member
        self.decision = decision
        self.note = ""  # whether it was split, or why not
        self.asked, self._router = asked, router
        self._sent_at = now
        self._alone = member.engine.pending <= 0
        self._pending = float(decision.uncached)
        self._open = True
        member.in_flight += 1
        member.engine.running += 1
        member.engine.pending += self._pending
        member.engine.add_work(self._pending, now)
        self._belief = router.believe(member, asked, now)

    @property
    def header(self) -> bytes:
        """For ``x-warmgate-route``: why it went there, and whether it was split."""
        decision = self.decision
        held = f"; cached={decision.cached}/{decision.cached + decision.uncached}" if decision.cached else ""
        note = f"; {self.note}" if self.note else ""
        return f"{decision.reason}{held}{note}".encode()

    @property
    def waiting(self) -> bool:
        """Whether its answer has not begun."""
        return self._pending > 0

    def begun(self, *, first_token: bool) -> None:
        """Its answer begins, so that its prompt has been computed. ``first_token``: and no more than that."""
        self.member.health.succeeded(self._router.now())
        if first_token and self._alone and self._pending >= _LEAST_MEASURED:
            self._router.timed(self.member, self._pending / max(1e-3, self._router.now() - self._sent_at))
        self._settle()

    def failed(self) -> None:
        """The upstream could not be reached or could not answer: whatever it held may be lost."""
        if self.member.health.failed(self._router.now()):
            self._router.forget(self.member)

    def refused(self, status: int, retry_after: float | None) -> None:
        """The upstream sends us away: because it cannot answer, or (429) because we ask too much of it."""
        if status != 429:
            self.failed()
        if retry_after is not None:
            self.member.health.rest(self._router.now(), retry_after)

    def learn(self, usage: Mapping[str, int] | None) -> None:
        """The upstream reports the tokens it used; an upstream may say anything, so within bounds."""
        prompt = (usage or {}).get("prompt")
        if usage is None or not prompt or prompt < 0:
            return
        self._router.measured(self.asked, prompt)
        told = usage.get("cached")
        if told is not None and 0 <= told <= prompt:
            self._router.correct(self.member, self._belief, self.decision, told, prompt)

    def spared(self) -> None:
        """Its prompt is computed elsewhere."""
        self._settle()
        self.member.engine.add_work(-self.decision.uncached, self._router.now())

    def burdened(self) -> None:
        """Its prompt is computed here after all, from now on."""
        now = self._router.now()
        self._pending, self._sent_at = float(self.decision.uncached), now
        self.member.engine.pending += self._pending
        self.member.engine.add_work(self._pending, now)

    def close(self) -> None:
        """It is over. May be called twice."""
        if self._open:
            self._open = False
            self._settle()
            self.member.in_flight -= 1
            self.member.engine.running -= 1

    def _settle(self) -> None:
        engine = self.member.engine
        engine.pending = max(0.0, engine.pending - self._pending)
        self._pending = 0.0

    def __enter__(self) -> Route:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Router:
    """Chooses among members. One per process; it outlives reloads, so that what it has learned stays."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._random = random.Random()
        self.index = PrefixIndex()
        self._learned: dict[str, Learned] = {}
        self._tokens_per_byte: dict[str, float] = {}
        self.exact = ExactSource(self.index, self._told)
        self.decisions: Counter[str] = Counter()
        self.expected = self.told = 0
        self.seconds = 0.0
        self.apply(Routing(), ())

    def apply(self, routing: Routing, members: Sequence[Member]) -> None:
        """Takes a configuration, or other upstreams, into use."""
        self._routing, self._members = routing, list(members)
        self._policy = make_policy(routing.policy, self._random.randrange, routing.max_load_ratio)
        names = {member.name for member in members}
        for name in self._learned.keys() - names:
            self._learned.pop(name).clear()
        self.exact.apply(members)
        for name in self.index.names() - names:
            self.index.free(name)
        for member in members:
            member.slot = self.index.slot(member.name)
            member.bit = 1 << member.slot
        self._all = _by_slot(members)
        self._share = MAX_CHUNKS // max(1, len(members))

    def now(self) -> float:
        return self._clock.monotonic()

    async def read(
        self, model: str, path: str, body: Mapping[str, Any], size: int, salt: str, members: Sequence[Member]
    ) -> Asked:
        """What a request asks, whose ``body`` has so many bytes. Cheap where there is nothing to choose."""
        tokens, blocks = 0, ()
        if len(members) > 1 and self._routing.policy == "prefix":
            tokens, blocks = await self.exact.read(path, body, salt, members)
        return self._asked(model, body, size, salt, members, tokens, blocks)

    def read_now(
        self, model: str, body: Mapping[str, Any], size: int, salt: str, members: Sequence[Member]
    ) -> Asked | None:
        """The same, where no prompt has to be tokenised first; else None."""
        if len(members) > 1 and self._routing.policy == "prefix" and self.exact.tells(members):
            return None
        return self._asked(model, body, size, salt, members, 0, ())

    def _asked(
        self,
        model: str,
        body: Mapping[str, Any],
        size: int,
        salt: str,
        members: Sequence[Member],
        tokens: int,
        blocks: Sequence[Told],
    ) -> Asked:
        if len(members) < 2 or self._routing.policy in ("load", "round_robin"):
            return Asked(model, size)
        root = root_of(salt, model)
        try:
            text, common = canonical_text(body)
        except BadBody:
            return Asked(model, size)
        session = session_of(body, root)
        if self._routing.policy == "sticky":
            return Asked(model, len(text), session=session)
        told = sum(each.slots for each in blocks)
        chunks = chain(text, root, CHUNK) if any(not member.bit & told for member in members) else ()
        return Asked(model, len(text), chunks, session, tokens, blocks, common)

    def route(self, asked: Asked, members: Sequence[Member]) -> Route:
        """Decides, and counts the load at once. ``members``: at least one."""
        now = self._clock.monotonic()
        prompt = self._prompt(asked)
        if len(members) == 1 and self._routing.policy == "prefix" and not asked.chunks and not asked.blocks:
            self.decisions["only"] += 1
            return Route(self, members[0], asked, Decision(0, "only", 0, prompt), now)
        by_slot, among = self._all if members == self._members else _by_slot(members)
        found = self._found(asked, among, prompt)
        many = len(members) > MANY and self._routing.policy == "prefix"
        few = self._few(found, asked.session, members, by_slot) if many else members
        able = [m for m in few if m.known_models is not None and m.health.available(now)] or _able(members, now)
        engines: list[Engine] = []
        for member in able:
            engines.append(member.engine)
            member.engine.weight = member.config.weight * member.health.share(now)
        shared = prompt * asked.common // max(1, asked.size)
        ask = Ask(prompt, _held(found, able, prompt), asked.session, shared)
        decision = self._policy.choose(engines, ask, now)
        self.decisions[decision.reason] += 1
        self.seconds += self._clock.monotonic() - now
        return Route(self, able[decision.index], asked, decision, now)

    def uncached(self, asked: Asked, member: Member) -> int:
        """The prompt tokens that a member is expected to have to compute."""
        prompt = self._prompt(asked)
        held = _held(self._found(asked, member.bit, prompt), [member], prompt).get(0, ())
        return max(0, prompt - sum(count for count, _ in held))

    def _prompt(self, asked: Asked) -> int:
        """The tokens of a prompt, as far as can be told; at least 1."""
        return asked.tokens or int(asked.size * self._tokens_per_byte.get(asked.model, TOKENS_PER_BYTE)) or 1

    def _found(self, asked: Asked, among: int, prompt: int) -> list[_Found]:
        """What is known of who holds the prompt: of those who tell by its blocks, of the others by its chunks.
        ``among``: the bits of those asked about.
        """
        found: list[_Found] = []
        for chain_, size, slots in asked.blocks:
            found.append((self.index.holders(chain_, among & slots), size))
            among &= ~slots
        if among and asked.chunks:
            found.append((self.index.holders(asked.chunks, among), prompt * CHUNK / max(1, asked.size)))
        return found

    def _few(
        self, found: list[_Found], session: int, members: Sequence[Member], by_slot: Mapping[int, Member]
    ) -> Sequence[Member]:
        """Of many, those to decide among: who holds most, else the session's own, and some at random, which makes for
        nearly as even a load as all would (Mitzenmacher 2001).
        """
        few: dict[int, Member] = {}
        for tiers, _ in found:
            for slot in deepest(tiers[-1], HOLDERS) if tiers else ():
                few[slot] = by_slot[slot]
        if not few and session:
            own = members[home_of([member.engine for member in members], session)]
            few[own.slot] = own
        start = int(self._random.random() * len(members)) - len(members)
        for i in range(start, start + SAMPLE):
            few[members[i].slot] = members[i]
        return list(few.values())

    def believe(self, member: Member, asked: Asked, now: float) -> Belief | None:
        """A prompt goes to an upstream that does not tell what it holds: it will hold this."""
        if not asked.chunks or any(told.slots & member.bit for told in asked.blocks):
            return None
        learned = self._learned.get(member.name)
        if learned is None:
            learned = self._learned[member.name] = Learned(self.index, self.index.slot(member.name), self._share)
        return learned.send(asked.chunks, now)

    def correct(self, member: Member, belief: Belief | None, decision: Decision, told: int, prompt: int) -> None:
        """An upstream reports how many of a prompt's tokens it held."""
        self.expected += decision.cached
        self.told += told
        member.engine.add_work(prompt - told - decision.uncached, self.now())
        learned = self._learned.get(member.name)
        if belief is not None and learned is not None:
            learned.correct(belief, decision.cached, told)

    def timed(self, member: Member, rate: float) -> None:
        """An upstream computed prompt tokens at this rate, in tokens per second."""
        member.engine.timed(rate)
        settle_rates([one.engine for one in self._members])

    def measured(self, asked: Asked, prompt: int) -> None:
        """A prompt of known size made so many tokens."""
        if asked.size:
            seen = min(10.0, prompt / asked.size)
            self._tokens_per_byte[asked.model] = seen + 0.8 * (self._tokens_per_byte.get(asked.model, seen) - seen)

    def forget(self, member: Member) -> None:
        """An upstream was restarted or is gone: it holds nothing of what was believed."""
        self._told(member.name)
        self.exact.forget(member.name)

    def _told(self, name: str) -> None:
        """An upstream says itself what it holds: what was believed before is of no use any more."""
        if name in self._learned:
            self._learned[name].clear()

    def told_of(self) -> dict[str, Any]:
        """For the vitals: what was decided and what came of it."""
        return {
            "decisions": self.decisions,
            "seconds": self.seconds,
            "blocks": len(self.index),
            "expected": self.expected,
            "told": self.told,
            "events": self.exact.counts(),
        }


def _by_slot(members: Sequence[Member]) -> tuple[Mapping[int, Member], int]:
    """Members by their slots, and the bits of all."""
    return {member.slot: member for member in members}, reduce(or_, (member.bit for member in members), 0)


def _able(members: Sequence[Member], now: float) -> Sequence[Member]:
    """Those known to serve the model before those that may; among these the healthy, if there are any."""
    known = [member for member in members if member.known_models is not None] or members
    return [member for member in known if member.health.available(now)] or known


def _held(found: list[_Found], members: Sequence[Member], prompt: int) -> Held:
    held: dict[int, Sequence[Share]] = {}
    for tiers, tokens_each in found:
        for i, member in enumerate(members):
            bit, shares, above = member.bit, [], 0.0
            for tier, depths in enumerate(tiers):
                for depth, bits in depths:
                    if bits & bit:
                        tokens = min(depth * tokens_each, prompt)
                        if tokens > above:
                            shares.append((int(tokens - above), FETCH[tier] / member.engine.prefill_rate))
                            above = tokens
                        break
            if shares:
                held[i] = shares
    return held
