"""Tells routers which prefixes this engine holds: KV events over ZMQ, in vLLM's format, with replay.

A message is [topic, sequence number (8 bytes, big-endian), msgpack]; a replay is of the same, each behind an empty
frame. The payload is a map {ts, events, data_parallel_rank}; an event is a map with a `type`: `BlockStored`
(block_hashes, parent_block_hash, token_ids, block_size, lora_id, lora_name, medium, extra_keys), `BlockRemoved`
(block_hashes, medium) or `AllBlocksCleared`.
Hashes are the low 64 bits of the chain digests; a first block's tenant salt is in its extra keys.

As in vLLM, a wildcard endpoint is bound and any other is connected to (the subscriber binds). The replay endpoint is a
ROUTER: a request [empty, first wanted number] is answered by [empty, topic, number, payload] for each kept batch, and
at last number -1.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq

from cache.prefix.blocks import Block
from engine.errors import ModelError

log = logging.getLogger("engine")

DEVICE = "GPU"
"""vLLM's word for the memory the engine computes in, whatever it is."""

KEPT_BATCHES = 10_000
_NUMBER = struct.Struct(">q")
_END = _NUMBER.pack(-1)


def wire_hash(digest: bytes) -> int:
    """The 64-bit form in which a chain digest is published."""
    return int.from_bytes(digest[-8:], "big")


class KVEvents:
    """Collects what the block index gains and loses; `flush` publishes it as one batch.

    Belongs to the engine thread, but for the replay socket, which a thread of its own serves.
    """

    def __init__(self, endpoint: str, replay: str, *, block_size: int, topic: str = "kv-events") -> None:
        self._block_size, self._topic = block_size, topic.encode()
        self._pending: list[dict[str, Any]] = []
        self._last: Block | None = None
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._lock = threading.Lock()
        self._closing = False
        self._packer = msgpack.Packer()
        self._context = zmq.Context()
        self._replay: threading.Thread | None = None
        try:
            self._publisher = self._open(zmq.PUB, endpoint)
            if replay:
                router = self._open(zmq.ROUTER, replay, bind=True)
                self._replay = threading.Thread(target=self._serve, args=(router,), name="kv-replay", daemon=True)
                self._replay.start()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ModelError(f"cannot open the KV event endpoint {endpoint or replay}: {error.strerror}") from error

    def _open(self, kind: int, endpoint: str, *, bind: bool = False) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        if bind or "*" in endpoint or "://[::]" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        return socket

    def stored(self, block: Block) -> None:
        """A block can be found from now on. Blocks that follow one another go into one event."""
        tokens = struct.unpack(f"<{len(block.tokens) // 4}I", block.tokens)
        if self._last is not None and block.parent == self._last.digest:
            event = self._pending[-1]
            event["block_hashes"].append(wire_hash(block.digest))
            event["token_ids"] += tokens
            event["extra_keys"].append(_extra_keys(block))
        else:
            event = {
                "type": "BlockStored",
                "block_hashes": [wire_hash(block.digest)],
                "parent_block_hash": None if block.parent is None else wire_hash(block.parent),
                "token_ids": list(tokens),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": DEVICE,
                "lora_name": None,
                "extra_keys": [_extra_keys(block)],
            }
            self._pending.append(event)
        self._last = block

    def removed(self, block: Block) -> None:
        """A block can no longer be found."""
        self._last = None
        if self._pending and self._pending[-1]["type"] == "BlockRemoved":
            self._pending[-1]["block_hashes"].append(wire_hash(block.digest))
        else:
            event = {"type": "BlockRemoved", "block_hashes": [wire_hash(block.digest)], "medium": DEVICE}
            self._pending.append(event)

    def cleared(self) -> None:
        """No block can be found any more."""
        self._last = None
        self._pending.append({"type": "AllBlocksCleared"})

    def flush(self) -> None:
        """Publishes what was collected, if anything. Never blocks: a slow subscriber loses batches, and replays."""
        if not self._pending:
            return
        batch = {"ts": time.time(), "events": self._pending, "data_parallel_rank": 0}
        payload: bytes = self._packer.pack(batch)
        self._pending, self._last = [], None
        with self._lock:
            number, self._number = self._number, self._number + 1
            self._kept.append((number, payload))
        self._publisher.send_multipart([self._topic, _NUMBER.pack(number), payload], flags=zmq.NOBLOCK)

    def close(self) -> None:
        """Closes the sockets; what is in flight is dropped."""
        self._closing = True
        if self._replay is not None:
            self._replay.join(timeout=2)
        self._publisher.close()
        self._context.destroy(linger=0)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._closing:
            if router.poll(timeout=200):
                self._answer(router, router.recv_multipart())
        router.close()

    def _answer(self, router: zmq.Socket[bytes], request: Sequence[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != _NUMBER.size:
            log.warning("a KV replay request of %d parts was ignored", len(request))
            return
        client, empty, first = request
        with self._lock:
            batches = [item for item in self._kept if item[0] >= _NUMBER.unpack(first)[0]]
        for number, payload in batches:
            router.send_multipart([client, empty, self._topic, _NUMBER.pack(number), payload])
        router.send_multipart([client, empty, b"", _END, b""])


def _extra_keys(block: Block) -> list[str] | None:
    """The tenant salt of a first block, as vLLM reports it; nothing for all others."""
    if not block.extra.startswith(b"s"):
        return None
    (length,) = struct.unpack_from("<I", block.extra, 1)
    return [block.extra[5 : 5 + length].decode("utf-8", "replace")]
