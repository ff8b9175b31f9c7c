"""One generation in progress: its tokens, its blocks, how far its keys and values are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from cache.prefix.blocks import Block
from engine.output import Output
from engine.sampling import Sampler

if TYPE_CHECKING:
    from engine.kv.lower import Fetch
    from engine.pd.pulls import Pull
    from engine.speculate.drafter import Drafting


class State(Enum):
    """Where a sequence stands. Only RUNNING ones own blocks."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt, then output. KV exists for the first `computed` tokens, in `blocks`.

    `draft` is what the step in progress guesses to follow; its KV lies behind `computed` until it is verified.

    `chain` names the prompt's full blocks. Only prompt blocks from whole prefill chunks are ever shared: they are
    bitwise what any other run computes, while decoded tokens' KV has other last bits than a prefill's. After a
    preemption, output tokens are replayed through decode, so the result does not depend on having been preempted.

    `offered`: its prompt is computed for another engine. `pull`: what another engine computed of it, on its way.
    """

    id: str
    prompt_length: int
    tokens: list[int]
    sampler: Sampler
    output: Output
    chain: list[Block]
    max_tokens: int
    salt: bytes = b""
    priority: int = 0
    arrival: int = 0
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    cached_by: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    fetch: Fetch | None = None
    offered: bool = False
    pull: Pull | None = None
    draft: list[int] = field(default_factory=list)
    drafting: Drafting | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """The order of service: lower is sooner."""
        return self.priority, self.arrival

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_length

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length
