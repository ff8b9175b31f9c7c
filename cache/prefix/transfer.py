"""What the engine holds while its tiers work: a `Lookup` and a `Transfer`, to be polled.

The I/O thread writes them, the engine's thread reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cache.prefix.blocks import Block
from cache.prefix.tiers import copy
from policies.tiering import Decision

Done = Callable[[], None]
"""Called once, on the I/O thread, when there is something new to see."""


def nobody() -> None:
    """Listens to nothing."""


class Lookup:
    """How many leading `blocks` host memory holds, and how many after those the remote tier does.

    Host memory is known at once, the remote tier when `done`; until then it counts as holding nothing.
    """

    def __init__(self, blocks: Sequence[Block], tenant: bytes, host: int, on_done: Done) -> None:
        self.blocks = blocks
        self.tenant = tenant
        self.host = host
        self.remote = 0
        self.done = False
        self.abandoned = False
        self._on_done = on_done

    def abandon(self) -> None:
        """Nobody waits for these blocks any more: stop fetching them."""
        self.abandoned = True

    def finish(self) -> None:
        """For the I/O thread: all that can be known is."""
        self.done = True
        self._on_done()


class Transfer:
    """A load under way: fills one buffer after the other.

    `done` turns true at the latest when the deadline passes. From then on, or when `abandon` has returned, no buffer is
    written to any more, whatever still arrives: the filled ones can be used and the others freed.
    """

    def __init__(
        self,
        lookup: Lookup,
        decision: Decision,
        buffers: Sequence[memoryview],
        deadline: float,
        clock: Callable[[], float],
        on_done: Done,
    ) -> None:
        self.blocks = lookup.blocks[: decision.blocks]
        self.tenant = lookup.tenant
        self.decision = decision
        self.deadline = deadline
        self.loaded = 0
        """Leading buffers that are filled."""
        self._buffers = buffers
        self._clock = clock
        self._on_done = on_done
        self._lock = threading.Lock()
        self._over = threading.Event()

    @property
    def by_tier(self) -> dict[str, int]:
        """The filled buffers by the tier that held them at the lookup (fetched ahead since then or not)."""
        split, left = {}, self.loaded
        for tier, count in self.decision.fetch:
            split[tier] = min(count, left)
            left -= split[tier]
        return split

    @property
    def done(self) -> bool:
        if not self._over.is_set() and self._clock() >= self.deadline:
            self.abandon()
        return self._over.is_set()

    def wait(self, timeout: float) -> bool:
        """Waits, no longer than `timeout` seconds nor past the deadline; whether it is done."""
        self._over.wait(max(0.0, min(timeout, self.deadline - self._clock())))
        return self.done

    def abandon(self) -> int:
        """Ends the load for the caller (within the copy of one block); returns how many leading buffers are filled."""
        with self._lock:
            self._over.set()
            return self.loaded

    def deposit(self, payload: memoryview) -> bool:
        """For the I/O thread: fills the next buffer; False if the load is over."""
        with self._lock:
            if self._over.is_set() or self.loaded == len(self.blocks):
                return False
            copy(self._buffers[self.loaded], payload)
            self.loaded += 1
            return True

    def finish(self) -> None:
        """For the I/O thread: nothing more will come."""
        self.abandon()
        self._on_done()
