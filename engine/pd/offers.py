"""The prefill side: keeps the blocks of a computed prompt for the engine that will decode, under a lease.

An offer is good for one fetch. Its blocks are held in the pool, so that nothing is written over them, until they have
been sent, the fetching side is gone, or the lease is over.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.prefix.blocks import Block, remainder
from cache.prefix.codec import Codec
from cache.prefix.tiers import copy
from engine.errors import ModelError
from engine.kv.manager import BlockManager
from engine.kv.pool import KVPool
from engine.pd.wire import GREETING, MAGIC, NAME_BYTES, VERSION, Codecs, Wires
from engine.sequence import Sequence

WINDOW = 8
"""Blocks copied out of the pool at a time."""
GREETING_SECONDS = 5.0


@dataclass(eq=False)
class Offer:
    """A computed prompt: its blocks in the pool, what they are, and the logits behind its last token."""

    name: bytes
    blocks: list[int]
    identity: list[Block]
    tenant: bytes
    logits: Tensor
    lapse: asyncio.TimerHandle | None = None


class Offers:
    """`offer`, `reap` and `held` belong to the engine thread; `wake` is called from another.

    Args:
        address: (host, port) to listen on, and as other engines reach it; port 0: any free one.
        lease: seconds that an offer is kept.

    Raises `ModelError` if the address cannot be had.
    """

    def __init__(
        self,
        pool: KVPool,
        manager: BlockManager,
        codecs: Codecs,
        wires: Wires,
        *,
        address: tuple[str, int],
        lease: float,
        wake: Callable[[], None],
    ) -> None:
        self._pool, self._manager, self._codecs, self._wires = pool, manager, codecs, wires
        self._lease, self._wake = lease, wake
        self.counts: Counter[str] = Counter()
        self._id = f"warmgate-{secrets.token_hex(8)}"
        self._held: dict[bytes, Offer] = {}
        self._ended: queue.SimpleQueue[Offer] = queue.SimpleQueue()
        self._open: dict[bytes, Offer] = {}  # the wires' thread's own
        try:
            listener = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot offer KV at {address[0]}:{address[1]}: {why}") from error
        self.address: tuple[str, int] = listener.getsockname()[:2]
        wires.call(lambda: wires.start(self._listen(listener)))

    def offer(self, sequence: Sequence, logits: Tensor) -> dict[str, Any]:
        """Keeps a sequence's prompt, all of which is computed; returns the parameters by which it can be had.

        logits: float32 [vocab], of the token behind the prompt.
        """
        size = self._pool.block_size
        blocks = sequence.blocks[: -(-sequence.prompt_length // size)]
        rest = remainder(sequence.tokens[: sequence.prompt_length], size, sequence.chain, salt=sequence.salt)
        identity = [*sequence.chain, *([rest] if rest else [])]
        made = Offer(secrets.token_bytes(NAME_BYTES), blocks, identity, sequence.salt, logits)
        self._manager.hold(blocks)
        self._held[made.name] = made
        self._wires.call(lambda: self._publish(made))
        self.counts["offered"] += 1
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._id,
            "remote_request_id": made.name.hex(),
            "remote_block_ids": blocks,
            "remote_host": self.address[0],
            "remote_port": self.address[1],
            "tp_size": 1,
        }

    def reap(self) -> None:
        """Gives the blocks of ended offers back to the pool."""
        while True:
            try:
                ended = self._ended.get_nowait()
            except queue.Empty:
                return
            del self._held[ended.name]
            self._manager.release(ended.blocks)

    def held(self) -> Iterable[list[int]]:
        """The blocks that each offer holds."""
        return [offer.blocks for offer in self._held.values()]

    # What follows runs on the wires' thread.

    def _publish(self, offer: Offer) -> None:
        self._open[offer.name] = offer
        offer.lapse = self._wires.loop.call_later(self._lease, self._lapsed, offer)

    def _lapsed(self, offer: Offer) -> None:
        if self._open.pop(offer.name, None) is not None:
            self._end(offer, "expired")

    def _end(self, offer: Offer, what: str) -> None:
        self.counts[what] += 1
        self._ended.put(offer)
        self._wake()

    async def _listen(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                magic, version, _, name, first = GREETING.unpack(await reader.readexactly(GREETING.size))
            offer = self._open.pop(name, None) if (magic, version) == (MAGIC, VERSION) else None
            if offer is None:
                self.counts["unknown"] += 1
            else:
                await self._send(offer, first, writer)
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _send(self, offer: Offer, first: int, writer: asyncio.StreamWriter) -> None:
        assert offer.lapse is not None
        offer.lapse.cancel()
        sent = False
        try:
            async with asyncio.timeout(self._lease):
                for start in range(first, len(offer.blocks), WINDOW):
                    payload = self._pool.export(offer.blocks[start : start + WINDOW]).cpu()
                    for block, row in zip(offer.identity[start : start + WINDOW], payload, strict=True):
                        writer.write(_record(self._codecs.blocks, block, offer.tenant, row))
                    await writer.drain()
                writer.write(_record(self._codecs.logits, offer.identity[-1], offer.tenant, offer.logits))
                await writer.drain()
            sent = True
        finally:
            self._end(offer, "sent" if sent else "broken off")


def _record(codec: Codec, block: Block, tenant: bytes, payload: Tensor) -> bytearray:
    record, view = codec.allocate(block, tenant)
    rows: Any = payload.reshape(-1).view(torch.uint8).numpy()
    copy(view, memoryview(rows))
    codec.seal(record)
    return record
