"""Continuous batching: which tokens of which sequences the next forward passes compute.

A step is all sequences that decode (one token each), and prefill chunks within a token budget. Chunks lie at fixed
absolute positions (multiples of `chunk`), and a prefix hit is cut to such a position: so a hit and a cold run do
exactly the same arithmetic, bit for bit. When blocks run out, the sequence served last is preempted and later
recomputed; the first in rank always proceeds. Sequences that need a chunk which another computes in this very step
wait for it instead of computing it twice.

After vLLM's scheduler (Kwon et al., SOSP 2023) and Sarathi's chunked prefill (Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from engine.kv.lower import LowerTiers
from engine.kv.manager import BlockManager
from engine.pd.pulls import Pulls
from engine.sequence import Sequence, State
from engine.speculate.drafter import Drafter


class Chunk(NamedTuple):
    """Prompt positions start … end - 1 of one sequence, computed in one forward pass."""

    sequence: Sequence
    start: int
    end: int


@dataclass
class Step:
    """What to compute now: one token of each of `decodes` and its draft, and chunks. Empty when nothing can run.

    `handed`: prompts that came computed, with the logits behind.
    """

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    handed: list[tuple[Sequence, Tensor]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills or self.handed)


class Scheduler:
    """Owns the queue and the running set. Call `schedule`, run the step, then `commit` it; `cancel` in between."""

    def __init__(
        self,
        manager: BlockManager,
        *,
        block_size: int,
        chunk: int,
        step_tokens: int,
        max_running: int,
        reuse: bool = True,
        lower: LowerTiers | None = None,
        pulls: Pulls | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if chunk % block_size:
            raise ValueError(f"the prefill chunk ({chunk}) must be a multiple of the block size ({block_size})")
        self._manager, self._block_size, self._chunk = manager, block_size, chunk
        self._step_tokens, self._max_running, self._reuse = max(step_tokens, chunk), max_running, reuse
        self._lower, self._pulls, self._drafter = lower, pulls, drafter
        self._arrivals = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._computing: set[bytes] = set()
        self._preempted: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence behind those of its priority."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._enqueue(sequence)
        if self._lower is not None and sequence.pull is None:
            self._lower.want(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Drops a sequence wherever it stands and frees its blocks; also the way a finished one leaves."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
            self._abandon(sequence)
        elif sequence.state is State.RUNNING:
            self._stop(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> Step:
        """Decides the next step, taking the blocks it needs."""
        step = Step()
        self._computing.clear()
        self._preempted.clear()
        for sequence in sorted(self.running, key=lambda s: s.rank):
            if sequence.state is State.RUNNING and not sequence.prefilling and self._room(sequence, 1):
                step.decodes.append(sequence)
        budget = self._step_tokens
        for sequence in sorted(self.running, key=lambda s: s.rank):
            if sequence.state is State.RUNNING and sequence.prefilling:
                budget = self._prefill(sequence, step, budget)
        while self.waiting and budget > 0 and not self._preempted and self._admissible(self.waiting[0]):
            sequence = self.waiting.pop(0)
            sequence.state = State.RUNNING
            insort(self.running, sequence, key=lambda s: s.rank)
            budget = self._prefill(sequence, step, budget)
        # A later allocation in this very step may have preempted a sequence that was already in it.
        step.decodes = [s for s in step.decodes if s not in self._preempted]
        step.prefills = [c for c in step.prefills if c.sequence not in self._preempted]
        step.handed = [(s, logits) for s, logits in step.handed if s not in self._preempted]
        if self._drafter is not None:
            self._draft(step.decodes, self._drafter)
        return step

    def commit(self, step: Step) -> None:
        """Notes that a step's KV has been written, and publishes the prompt blocks of whole chunks."""
        for sequence in step.decodes:
            sequence.computed += 1
        for sequence, start, end in step.prefills:
            sequence.computed = end
            if self._reuse and end - start == self._chunk:
                for at in range(start // self._block_size, end // self._block_size):
                    block, content = sequence.blocks[at], sequence.chain[at]
                    if self._manager.publish(block, content, sequence.salt) and self._lower is not None:
                        self._lower.published(block, content)

    def _prefill(self, sequence: Sequence, step: Step, budget: int) -> int:
        """Adds this sequence's next chunk if it fits; returns the budget left."""
        self._take_cached(sequence)
        if self._pulls is not None and sequence.pull is not None and not self._take_handed(self._pulls, sequence, step):
            return budget
        if self._lower is not None and not self._lower.ready(sequence):
            return budget
        start = sequence.computed
        end = min(start - start % self._chunk + self._chunk, sequence.prompt_length)
        if self._shared_elsewhere(sequence, start, end) or (step.prefills and end - start > budget):
            return budget
        if budget <= 0 or not self._room(sequence, end - start):
            return budget
        self._computing.update(self._names(sequence, start, end))
        step.prefills.append(Chunk(sequence, start, end))
        return budget - (end - start)

    def _take_handed(self, pulls: Pulls, sequence: Sequence, step: Step) -> bool:
        """Takes up what another engine has computed; whether what then comes next is to be computed here."""
        if not pulls.arrived(sequence):
            return False
        tokens = pulls.portion(sequence, beside_decodes=bool(step.decodes))
        if not tokens:
            pulls.abandon(sequence)
            return True
        if not self._room(sequence, tokens):
            return False
        if self._lower is not None:
            self._lower.save_evicted()
        logits = pulls.take_up(sequence, tokens)
        if logits is not None:
            step.handed.append((sequence, logits))
        return False

    def _draft(self, decodes: list[Sequence], drafter: Drafter) -> None:
        """Lets sequences try several tokens at once, in blocks that nobody else needs now."""
        room = drafter.room(len(decodes))
        for sequence in decodes:
            if sequence.computed + 1 < len(sequence.tokens):
                continue  # replays what it said before it was preempted
            draft = drafter.draft(sequence, len(decodes), room)
            missing = self._blocks_for(sequence.computed + 1 + len(draft)) - len(sequence.blocks)
            if missing > 0:
                taken = self._manager.allocate(missing, after=sequence.blocks[-1]) or []
                sequence.blocks += taken
            sequence.draft = draft[: len(sequence.blocks) * self._block_size - sequence.computed - 1]
            room -= len(sequence.draft)

    def _names(self, sequence: Sequence, start: int, end: int) -> list[bytes]:
        """Chain digests of a whole chunk's blocks; empty for a part of a chunk, which is never shared."""
        if not self._reuse or end - start != self._chunk:
            return []
        return [block.digest for block in sequence.chain[start // self._block_size : end // self._block_size]]

    def _shared_elsewhere(self, sequence: Sequence, start: int, end: int) -> bool:
        """Whether this chunk is being computed for another sequence in this step (and could be taken over)."""
        names = self._names(sequence, start, end) if end < sequence.prompt_length else []
        return bool(names) and self._computing.issuperset(names)

    def _take_cached(self, sequence: Sequence) -> None:
        """Takes up whole chunks from the index, as far as they go; the last prompt token is always computed."""
        if not self._reuse or (sequence.fetch is not None and sequence.fetch.transfer is not None):
            return
        while sequence.computed % self._chunk == 0 and sequence.computed + self._chunk < sequence.prompt_length:
            first = sequence.computed // self._block_size
            wanted = sequence.chain[first : first + self._chunk // self._block_size]
            found = [block for block in map(self._manager.find, wanted) if block is not None]
            if len(found) < len(wanted):
                return
            self._manager.hold(found)
            if self._lower is not None:
                self._lower.used(found, sequence)
            sequence.blocks += found
            sequence.computed += self._chunk
            if not sequence.preemptions:
                sequence.cached += self._chunk
                sequence.cached_by["device"] = sequence.cached_by.get("device", 0) + self._chunk

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _room(self, sequence: Sequence, tokens: int) -> bool:
        """Makes sure that `tokens` more can be written, preempting sequences of lower rank if need be."""
        missing = self._blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        while (
            taken := self._manager.allocate(missing, after=sequence.blocks[-1] if sequence.blocks else None)
        ) is None:
            victim = max(self.running, key=lambda s: s.rank)
            if victim is sequence:
                others_run = len(self.running) > 1
                if others_run and sequence.blocks and not sequence.prefilling:
                    self._preempt(sequence)
                return False
            self._preempt(victim)
        sequence.blocks += taken
        return True

    def _admissible(self, sequence: Sequence) -> bool:
        """Whether the whole prompt fits beside what the running sequences still need for theirs."""
        if len(self.running) >= self._max_running:
            return False
        if not self.running:
            return True
        owed = sum(max(0, self._blocks_for(s.prompt_length + 1) - len(s.blocks)) for s in self.running if s.prefilling)
        shared = 0
        if self._reuse:
            for block in map(self._manager.find, sequence.chain):
                if block is None or not self._manager.is_held(block):
                    break
                shared += 1
        return self._blocks_for(len(sequence.tokens) + 1) - shared + owed <= self._manager.free

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self._preempted.add(sequence)
        self._enqueue(sequence)
        if self._lower is not None:
            self._lower.want(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._abandon(sequence)
        self._manager.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.draft = []

    def _abandon(self, sequence: Sequence) -> None:
        if self._lower is not None:
            self._lower.abandon(sequence)
        if self._pulls is not None:
            self._pulls.abandon(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.rank)
