"""What passes between two engines that share a prompt, and the thread on which it does.

The fetching side sends a greeting: magic "WGPD" · version u16 · reserved u16 · name of the offer (16 bytes) · first
block wanted u32. It is answered with records (`cache.prefix.codec`), one per block from there on and one with the
logits, back to back: whoever knows the prompt knows the length of each. An offer that is gone is answered by the
connection's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop

from cache.prefix.codec import Codec

GREETING = struct.Struct("<4sHH16sI")
MAGIC, VERSION = b"WGPD", 1
NAME_BYTES = 16


@dataclass(frozen=True)
class Codecs:
    """The stored forms of a block and of the logits behind a prompt."""

    blocks: Codec
    logits: Codec

    @classmethod
    def of(cls, layout: bytes, block_bytes: int, vocab: int) -> Codecs:
        """For one layout; logits are float32."""
        return cls(Codec(layout, block_bytes), Codec(layout + b" logits", 4 * vocab))


@dataclass(frozen=True)
class Source:
    """Where a prompt's blocks can be fetched, and under which name."""

    host: str
    port: int
    name: bytes


def is_trusted(host: str, peers: frozenset[str]) -> bool:
    """Whether to fetch from there: a block's name can be proven, but not that its bytes are what the model makes."""
    if host in peers:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Wires:
    """One thread with one event loop, for everything that waits for another engine."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="kv-wires", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], object]) -> None:
        """Runs something on the thread, soon; nothing once it has ended, and with it all that it did."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(work)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """For this thread: begins a task; it is cancelled when the thread ends."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Ends all tasks, and the thread; may be called twice."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.stop()

        self.call(lambda: self.loop.create_task(end()))
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
