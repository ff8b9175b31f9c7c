"""Which upstreams hold which beginnings of prompts: one table from the hash of a beginning to a bit per upstream.

Two sources fill it. *Told*: KV events say exactly which blocks an upstream holds (`gateway.upstreams.kv_blocks`).
*Learned*: where nothing is told, what was sent to an upstream is believed to be held for a while, and its reports of
cached tokens say for how long (the characteristic time of its cache, Che et al. 2002). Wrong beliefs cost recomputes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

TIERS = 3
"""Device, host and remote memory, in this order: what is not held on one is looked for on the next."""
Depths = list[tuple[int, int]]
"""How many leading links of a chain are held, rising, and the bits of the slots that hold exactly so many."""

FIRST_LIFETIME = 600.0
"""Seconds that an upstream is believed to keep what it was sent, until it has shown how long."""
SHORTEST, LONGEST = 5.0, 3600.0


class PrefixIndex:
    """The table. An upstream is known by its ``slot``, a small number; `slot` and `free` hand them out."""

    def __init__(self) -> None:
        self._tiers: list[dict[int, int]] = [{} for _ in range(TIERS)]
        self._slots: dict[str, int] = {}
        self._spare: deque[int] = deque()

    def __len__(self) -> int:
        """Beginnings known, each counted once per tier."""
        return sum(map(len, self._tiers))

    def slot(self, name: str) -> int:
        """The slot of an upstream, a new one where it has none."""
        found = self._slots.get(name)
        if found is None:
            found = self._slots[name] = self._spare.popleft() if self._spare else len(self._slots)
        return found

    def names(self) -> set[str]:
        """Who has a slot."""
        return set(self._slots)

    def free(self, name: str) -> None:
        """Gives a slot back; nothing may be held under it any more."""
        if name in self._slots:
            self._spare.append(self._slots.pop(name))

    def add(self, slot: int, hashes: Iterable[int], tier: int = 0) -> None:
        """An upstream holds these beginnings."""
        table, bit = self._tiers[tier], 1 << slot
        for name in hashes:
            held = table.get(name)
            table[name] = bit if held is None else held | bit  # the same object for all, near at hand

    def discard(self, slot: int, hashes: Iterable[int], tier: int = 0) -> None:
        """An upstream does not hold these any more."""
        table, keep = self._tiers[tier], ~(1 << slot)
        for name in hashes:
            left = table.get(name, 0) & keep
            if left:
                table[name] = left
            else:
                table.pop(name, None)

    def match(self, chain: Sequence[int], slots: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """How many leading ones of ``chain`` each of ``slots`` holds: on the first tier, on the first two together, and
        so on (as far as anything lies below). Slots that hold nothing are left out.
        """
        among = 0
        for slot in slots:
            among |= 1 << slot
        down_to = [dict(_expanded(depths)) for depths in self.holders(chain, among)]
        return {slot: tuple(depths.get(slot, 0) for depths in down_to) for slot in (down_to[-1] if down_to else ())}

    def holders(self, chain: Sequence[int], among: int) -> list[Depths]:
        """The same for all slots whose bits are set in ``among``, not yet told apart."""
        return [_depths(self._tiers[: i + 1], chain, among) for i in range(TIERS) if any(self._tiers[i:])]


def deepest(depths: Depths, most: int) -> list[int]:
    """The slots that hold most, at most so many; those of equal depth all or none, as long as that leaves any."""
    found: list[int] = []
    for _, bits in reversed(depths):
        if len(found) + bits.bit_count() > most:
            return found or _slots(bits)[:most]
        found += _slots(bits)
    return found


def _depths(tables: list[dict[int, int]], chain: Sequence[int], alive: int) -> Depths:
    """Those of ``alive`` that hold the first of ``chain`` in any table, by how many leading ones they hold. Whoever
    holds a block holds those before it, so halving finds where some end: each look into a large table is slow.
    """

    def in_any(name: int, _: int) -> int:
        holders = 0
        for table in tables:
            holders |= table.get(name, 0)
        return holders

    get: Callable[[int, int], int] = tables[0].get if len(tables) == 1 else in_any

    depths: Depths = []
    if not chain:
        return depths
    alive &= get(chain[0], 0)
    held, ahead = 1, [(len(chain), get(chain[-1], 0))]
    while alive and ahead:
        upto, holders = ahead[-1]
        left = alive & holders
        if left != alive and upto > held + 1:
            middle = (held + upto) // 2
            ahead.append((middle, get(chain[middle - 1], 0)))
            continue
        if left != alive:
            depths.append((held, alive ^ left))
        alive, held = left, upto
        ahead.pop()
    if alive:
        depths.append((held, alive))
    return depths


def _slots(bits: int) -> list[int]:
    slots: list[int] = []
    while bits:
        low = bits & -bits
        slots.append(low.bit_length() - 1)
        bits ^= low
    return slots


def _expanded(depths: Depths) -> Iterator[tuple[int, int]]:
    return ((slot, depth) for depth, bits in depths for slot in _slots(bits))


@dataclass(frozen=True, slots=True)
class Belief:
    """What was believed of an upstream when a prompt was sent to it: leading chunks held, the last of them for
    ``age`` seconds.
    """

    depth: int
    age: float


class Learned:
    """What one upstream is believed to hold, because it was sent there: bounded, the oldest forgotten first."""

    def __init__(self, index: PrefixIndex, slot: int, max_chunks: int) -> None:
        self._index, self._slot = index, slot
        self._most = max_chunks
        self._sent: dict[int, float] = {}  # oldest first
        self.lifetime = FIRST_LIFETIME

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, chain: Sequence[int], now: float) -> Belief:
        """A prompt goes there, so that it will hold it. Heads are noted last, so that they outlive their tails."""
        sent = self._sent
        depth = 0
        for name in chain:
            if name not in sent:
                break
            depth += 1
        belief = Belief(depth, now - sent[chain[depth - 1]] if depth else 0.0)
        for name in reversed(chain[: self._most]):
            sent.pop(name, None)
            sent[name] = now
        self._index.add(self._slot, chain[: self._most])
        self._forget(now)
        return belief

    def correct(self, belief: Belief, expected: float, told: float) -> None:
        """It reports how many tokens of a prompt it had ``told``, where ``expected`` were believed: too few show that
        its cache does not keep as long as was believed, enough that it keeps at least so long.
        """
        if belief.depth == 0 or belief.age < SHORTEST:  # what is being computed just now is not held yet
            return
        if told < expected / 2:
            self.lifetime = max(SHORTEST, min(self.lifetime, belief.age))
        elif belief.age * 2 > self.lifetime:
            self.lifetime = min(LONGEST, belief.age * 2)

    def clear(self) -> None:
        """It has lost everything (a restart, a failure)."""
        self._index.discard(self._slot, self._sent)
        self._sent = {}

    def _forget(self, now: float) -> None:
        """Drops what is too old or too much, the oldest first; a few at once, since the first are slow to find."""
        over = len(self._sent) - self._most
        oldest = next(iter(self._sent.values()), now)
        if over <= 0 and now - oldest <= self.lifetime * 1.1:
            return
        gone: list[int] = []
        for name, at in self._sent.items():
            if at >= now - self.lifetime and len(gone) >= over:
                break
            gone.append(name)
        gone += islice(self._sent, len(gone), len(gone) + len(self._sent) // 64) if over > 0 else ()
        self._index.discard(self._slot, gone)
        for name in gone:
            del self._sent[name]
