"""One deadline for many futures with one timer: a timer for each would cost a good part of a cheap call."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Any

from cache.stores.base import StoreError

LATE = 0.005  # seconds; a timer that is later than this shows that the loop was held up
GRACE = 0.005  # seconds that it then has to send and read what that delayed


class Deadlines:
    """Fails each watched future with StoreError("timeout") unless it is done `seconds` after it was watched.

    All have the same limit, so the first watched is the first to expire and only the head needs a timer.
    `on_expire` is called once per future that ran out of time.
    """

    def __init__(self, seconds: float, on_expire: Callable[[], None] | None = None) -> None:
        self.seconds = seconds
        self._on_expire = on_expire
        self._queue: deque[tuple[float, Future[Any]]] = deque()
        self._timer: TimerHandle | None = None
        self._spared = 0.0  # when a grace was last given: those that were due by then have had theirs
        self._loop: AbstractEventLoop | None = None

    def watch(self, future: Future[Any]) -> None:
        loop = future.get_loop()
        if loop is not self._loop:  # first use, or another process or loop after a fork: the old timer is void
            self._loop, self._timer = loop, None
            self._queue.clear()
        queue = self._queue
        while queue and queue[0][1].done():  # let go of results early; most calls end long before their deadline
            queue.popleft()
        when = loop.time() + self.seconds
        queue.append((when, future))
        if self._timer is None:
            self._timer = loop.call_at(when, self._due, when)

    def _due(self, when: float) -> None:
        """The timer set for `when`. A loop that was held up itself is given a grace, once for each call."""
        assert self._loop is not None
        queue, now = self._queue, self._loop.time()
        late = now - when > LATE
        while queue and (queue[0][1].done() or queue[0][0] <= now):
            due, future = queue[0]
            if not future.done():
                if late and due > self._spared:
                    self._spared = now
                    self._timer = self._loop.call_at(now + GRACE, self._due, now + GRACE)
                    return
                future.set_exception(StoreError("timeout", f"no answer within {self.seconds * 1000:g} ms"))
                if self._on_expire is not None:
                    self._on_expire()
            queue.popleft()
        self._timer = self._loop.call_at(queue[0][0], self._due, queue[0][0]) if queue else None
