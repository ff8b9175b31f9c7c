"""The decode side: fetches what another engine computed of a prompt, into staging memory, while others run on.

Each record is proven to be what was asked for before a byte of it is used: layout, tenant, position, parent and token
ids (`cache.prefix.codec`). What came before something went wrong is used in whole prefill chunks, as all hits are.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cache.prefix.blocks import Block, remainder
from cache.prefix.codec import BadBlock, Codec
from cache.prefix.tiers import copy
from engine.kv.manager import BlockManager
from engine.kv.pool import KVPool
from engine.pd.wire import GREETING, MAGIC, VERSION, Codecs, Source, Wires, is_trusted
from engine.sequence import Sequence

CONNECT_SECONDS = 2.0
BESIDE_DECODES = 16
"""Blocks put into the pool in one step while others decode: a few milliseconds, so that none of them notices."""


@dataclass(eq=False)
class Pull:
    """The blocks of one prompt on their way, for all sequences (the choices of one request) that begin with it.

    `loaded` of them, from block `first` on, are in `staging`; `logits` came last, if they came. Nothing changes any
    more once it is `done`.
    """

    source: Source
    identity: list[Block]
    tenant: bytes
    first: int
    staging: Tensor
    logits: Tensor | None = None
    loaded: int = 0
    done: bool = False
    started: bool = False
    users: set[Sequence] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class Pulls:
    """Belongs to the engine thread, but for what it says of itself; `wake` is called from another.

    Args:
        chunk_blocks: blocks of one prefill chunk.
        peers: hosts to fetch from, beside this one.
        patience: seconds that a fetch may take.
    """

    def __init__(
        self,
        pool: KVPool,
        manager: BlockManager,
        codecs: Codecs,
        wires: Wires,
        *,
        chunk_blocks: int,
        peers: frozenset[str],
        patience: float,
        wake: Callable[[], None],
    ) -> None:
        self._pool, self._manager, self._codecs, self._wires = pool, manager, codecs, wires
        self._chunk, self._peers, self._patience, self._wake = chunk_blocks, peers, patience, wake
        self._pulls: dict[bytes, Pull] = {}
        self._staged = 0
        self.counts: Counter[str] = Counter()

    def want(self, sequence: Sequence, source: Source) -> None:
        """Begins to fetch a waiting sequence's prompt, or joins those that do."""
        if not is_trusted(source.host, self._peers):
            self.counts["refused host"] += 1
            return
        size, length = self._pool.block_size, sequence.prompt_length
        rest = remainder(sequence.tokens[:length], size, sequence.chain, salt=sequence.salt)
        identity = [*sequence.chain, *([rest] if rest else [])]
        pull = self._pulls.get(source.name)
        if pull is None:
            known = 0
            while known < len(sequence.chain) and self._manager.find(sequence.chain[known]) is not None:
                known += 1
            first = min(known, (length - 1) // size) // self._chunk * self._chunk
            pull = Pull(source, identity, sequence.salt, first, torch.empty(0))
            self._pulls[source.name] = pull
        elif pull.identity != identity or pull.tenant != sequence.salt:
            return
        pull.users.add(sequence)
        sequence.pull = pull
        self._begin(pull)

    def arrived(self, sequence: Sequence) -> bool:
        """Whether all that will come for a sequence has come."""
        assert sequence.pull is not None
        self._begin(sequence.pull)
        return sequence.pull.done

    def portion(self, sequence: Sequence, *, beside_decodes: bool) -> int:
        """How many tokens to take up now, 0 if there are no more. The sequence stands on a chunk's border."""
        assert sequence.pull is not None
        pull, size, length = sequence.pull, self._pool.block_size, sequence.prompt_length
        end = pull.first + pull.loaded
        if pull.logits is None:
            end -= end % self._chunk
        start = sequence.computed // size
        if beside_decodes:
            end = min(end, start + max(self._chunk, BESIDE_DECODES // self._chunk * self._chunk))
        return max(0, min(end * size, length) - sequence.computed) if start >= pull.first else 0

    def take_up(self, sequence: Sequence, tokens: int) -> Tensor | None:
        """Copies a portion into the sequence's blocks, which must be there; gives the logits behind a whole prompt."""
        assert sequence.pull is not None
        pull, size = sequence.pull, self._pool.block_size
        start, end = sequence.computed // size, -(-(sequence.computed + tokens) // size)
        self._pool.load(sequence.blocks[start:end], pull.staging[start - pull.first : end - pull.first])
        in_whole_chunks = sequence.prompt_length // (self._chunk * size) * self._chunk
        for at in range(start, min(end, in_whole_chunks)):
            self._manager.publish(sequence.blocks[at], sequence.chain[at], sequence.salt)
        sequence.computed += tokens
        sequence.cached += tokens
        sequence.cached_by["transfer"] = sequence.cached_by.get("transfer", 0) + tokens
        if sequence.computed < sequence.prompt_length:
            return None
        self.abandon(sequence)
        return pull.logits

    def abandon(self, sequence: Sequence) -> None:
        """A sequence needs no more of its pull; the last of its users ends it."""
        pull, sequence.pull = sequence.pull, None
        if pull is None:
            return
        pull.users.discard(sequence)
        if not pull.users:
            del self._pulls[pull.source.name]
            self._staged -= len(pull.staging)
            self._wires.call(lambda: pull.task and pull.task.cancel())

    def _begin(self, pull: Pull) -> None:
        """Starts a pull as soon as there is room to stage it: for half as many blocks as the pool has, in all."""
        count = len(pull.identity) - pull.first
        if pull.started or (self._staged and self._staged + count > self._pool.blocks // 2):
            return
        pull.started = True
        pull.staging = self._pool.staging(count)
        self._staged += count
        self._wires.call(lambda: self._start(pull))

    # What follows runs on the wires' thread.

    def _start(self, pull: Pull) -> None:
        pull.task = self._wires.start(self._run(pull))

    async def _run(self, pull: Pull) -> None:
        why = "abandoned"
        try:
            async with asyncio.timeout(self._patience):
                await self._fetch(pull)
            why = "complete"
        except TimeoutError:
            why = "late"
        except BadBlock as error:
            why = f"refused: {error.reason}"
        except EOFError:
            why = "torn" if pull.loaded else "gone"
        except OSError:
            why = "unreachable"
        finally:
            self.counts[why] += 1
            pull.done = True
            self._wake()

    async def _fetch(self, pull: Pull) -> None:
        loop, source = self._wires.loop, pull.source
        found = await loop.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, GREETING.pack(MAGIC, VERSION, 0, source.name, pull.first))
            rows = pull.staging.view(torch.uint8).view(len(pull.staging), -1).numpy()
            for block, row in zip(pull.identity[pull.first :], rows, strict=True):
                copy(memoryview(row), await self._record(sock, self._codecs.blocks, block, pull.tenant))
                pull.loaded += 1
            logits = await self._record(sock, self._codecs.logits, pull.identity[-1], pull.tenant)
            pull.logits = torch.frombuffer(bytearray(logits), dtype=torch.float32)

    async def _record(self, sock: socket.socket, codec: Codec, block: Block, tenant: bytes) -> memoryview:
        record = memoryview(bytearray(codec.record_bytes(block, tenant)))
        left: Any = record
        while left:
            count = await self._wires.loop.sock_recv_into(sock, left)
            if not count:
                raise EOFError
            left = left[count:]
        return codec.decode(record, block, tenant)
