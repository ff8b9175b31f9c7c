"""A thread that works off a line of calls in batches, and tells the event loop of a whole batch with one wake-up."""

from __future__ import annotations

import queue
import threading
import time
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Outcome = tuple["Future[Any]", Any]  # a future and its result; an exception is raised in whoever awaits it


class Lane(Generic[T]):
    """Calls `work` in its own daemon thread with everything that is in line, oldest first.

    A batch waits up to `linger` seconds for more to come, unless `urgent` says of an item that it cannot wait.
    After `idle` seconds without items, `work` is called with an empty batch.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[list[T]], list[Outcome]],
        *,
        linger: float = 0.0,
        urgent: Callable[[T], bool] = lambda item: False,
        idle: float | None = None,
    ) -> None:
        self._work = work
        self._linger = linger
        self._urgent = urgent
        self._idle = idle
        self._line: queue.SimpleQueue[T | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        self._line.put(item)

    def end(self) -> None:
        """Work off what is in line, then stop."""
        self._line.put(None)

    def join(self, timeout: float) -> bool:
        """Whether the thread ended within `timeout` seconds. Blocks."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._take()
            _tell(self._work(batch))

    def _take(self) -> tuple[list[T], bool]:
        batch: list[T] = []
        try:
            item = self._line.get(timeout=self._idle)
            until = time.monotonic() + self._linger
            while item is not None:
                batch.append(item)
                if self._urgent(item):
                    until = 0.0
                item = self._line.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return batch, False
        return batch, True


def attempt(run: Callable[[], Any]) -> Any:
    """What `run` returns or the exception it raises, to be told in the event loop."""
    try:
        return run()
    except Exception as error:
        return error


def _tell(outcomes: list[Outcome]) -> None:
    by_loop: dict[AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].get_loop(), []).append(outcome)
    for loop, told in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, told)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more


def _resolve(outcomes: list[Outcome]) -> None:
    for future, result in outcomes:
        if future.done():
            continue  # it timed out or its caller left
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
