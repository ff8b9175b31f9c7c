"""The thread that loads the model and runs it, and the bridge between it and the event loop.

Only this thread touches the `EngineCore`. Requests come in through a queue, deltas go out to the event loop in one
call per step. While there is nothing to do the thread sleeps in the queue; the worker takes no processor time.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable

import torch
from tqdm import tqdm

from engine.config import EngineConfig
from engine.core import EngineCore, Generation
from engine.errors import ModelError, RequestError
from engine.events import KVEvents
from engine.guide import Grammars
from engine.model.chat import ChatTemplate
from engine.model.weights import ModelFiles, open_model
from engine.output import Delta

log = logging.getLogger("engine")

Command = Callable[[], None]

_LOAD_POLL = 0.02
"""Seconds between two looks at loads that have not announced their end."""


class Worker:
    """Owns the engine thread. `start`, then `generate` from the event loop once `ready`; `stop` at the end."""

    core: EngineCore
    template: ChatTemplate
    grammars: Grammars

    def __init__(
        self,
        config: EngineConfig,
        *,
        opener: Callable[[str], ModelFiles] = open_model,
    ) -> None:
        self.config = config
        self._open = opener
        self.ready = False
        self.failure: str | None = None
        self.broken = False
        """Not even giving up a step's requests worked: the process must end, and another take its place."""
        self._events: KVEvents | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self, *, on_ready: Command = lambda: None, on_failure: Command = lambda: None) -> None:
        """Starts loading in the background; one of the two is called in the event loop when that has ended.

        `on_failure` is called later, too, if the engine is `broken`.
        """
        self._loop = asyncio.get_running_loop()
        self._on_ready, self._on_failure = on_ready, on_failure
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        self._stopping = True
        self._commands.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        if self._events is not None:
            self._events.close()

    async def generate(self, job: Generation) -> AsyncGenerator[Delta, None]:
        """Runs one generation; leaving the iteration early cancels it. Raises `RequestError` if the engine fails."""
        stream: asyncio.Queue[Delta] = asyncio.Queue()
        self._streams[job.id] = stream
        self._commands.put(lambda: self._add(job))
        finished = False
        try:
            while not finished:
                delta = await stream.get()
                finished = delta.finish_reason is not None
                if delta.error is not None:
                    finished = True
                    raise RequestError(delta.error, status=500, code="engine_error")
                yield delta
        finally:
            del self._streams[job.id]
            if not finished:
                self._commands.put(lambda: self.core.cancel(job.id))

    async def ask(self, command: Command) -> None:
        """Runs a command in the engine thread between two steps, and waits for it."""
        done = self._loop.create_future()

        def run() -> None:
            try:
                command()
            finally:
                self._loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

        self._commands.put(run)
        await done

    def _main(self) -> None:
        try:
            self._load()
        except ModelError as error:
            self.failure = str(error)
        except MemoryError:
            self.failure = "there is not enough memory for the model and its KV cache"
        except Exception as error:  # a broken file can fail in ways no reader foresees: still one sentence
            log.debug("loading failed", exc_info=True)
            self.failure = f"the model {self.config.model!r} cannot be loaded: {type(error).__name__}: {error}"
        if self.failure is not None:
            self._loop.call_soon_threadsafe(self._on_failure)
            return
        self.ready = True
        self._loop.call_soon_threadsafe(self._on_ready)
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            if self._loop.is_closed():  # the process ends in the middle of a step
                return
            log.exception("the engine cannot go on; a new process can")
            self._loop.call_soon_threadsafe(self._break_down)
            return
        self.core.close()

    def _load(self) -> None:
        began = time.monotonic()
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        if self.config.kv_events:
            self._events = KVEvents(
                self.config.kv_events, self.config.kv_events_replay, block_size=self.config.block_size
            )
        log.info("reading model %s", self.config.model)
        files = self._open(self.config.model)
        with tqdm(total=files.spec.layers, desc="loading layers", unit="layer", disable=not sys.stderr.isatty()) as bar:
            self.core = EngineCore(
                self.config,
                files,
                events=self._events,
                progress=lambda _: (bar.update(), None)[1],
                wake=lambda: self._commands.put(lambda: None),
            )
        self.template = ChatTemplate(files.tokenizer)
        self.grammars = Grammars(files.tokenizer, files.spec.vocab)
        pool = self.core.pool
        log.info(
            "ready in %.1f s: %s, %s on %s, context %d, KV pool %d blocks of %d tokens",
            time.monotonic() - began,
            files.spec.name,
            self.core.layout.dtype,
            self.core.model.device,
            self.core.context,
            pool.blocks,
            pool.block_size,
        )

    def _turn(self) -> None:
        """Obeys all waiting commands, then runs one step; sleeps if there is neither."""
        while not self.core.busy and self._commands.empty() and self.core.rest():
            pass
        try:
            command = self._commands.get(block=not self.core.busy or self.core.stalled, timeout=self._patience())
            while True:
                self._obey(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass
        if not self.core.busy:
            return
        try:
            deltas = self.core.step()
        except Exception:
            log.exception("a step failed; its requests are given up")
            deltas = [(job, Delta(error="the engine failed on this request")) for job in self.core.jobs()]
            for job, _ in deltas:
                self.core.cancel(job, "error")
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _break_down(self) -> None:
        self.ready, self.broken = False, True
        self._deliver([(job, Delta(error="the engine failed")) for job in self._streams])
        self._on_failure()

    def _patience(self) -> float | None:
        """How long to sleep: for ever when idle; while loads are under way, no longer than a deadline may be off."""
        return _LOAD_POLL if self.core.busy else None

    def _add(self, job: Generation) -> None:
        try:
            self.core.add(job)
        except Exception:
            log.exception("a request could not be taken in; it is given up")
            lost = [(job.id, Delta(error="the engine failed on this request"))]
            self._loop.call_soon_threadsafe(self._deliver, lost)

    def _obey(self, command: Command) -> None:
        try:
            command()
        except Exception:
            log.exception("a command to the engine failed")

    def _deliver(self, deltas: list[tuple[str, Delta]]) -> None:
        for job, delta in deltas:
            if (stream := self._streams.get(job)) is not None:
                stream.put_nowait(delta)
