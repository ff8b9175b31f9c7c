"""KV events read and mirrored: what an engine says it holds, as changes for the prefix index.

The format is vLLM's (`vllm/distributed/kv_events.py`): a batch `{ts, events, data_parallel_rank}` of `BlockStored`,
`BlockRemoved` and `AllBlocksCleared`, each a map with a `type`, or in older versions arrays in the order of the fields.
An engine's own hashes name its blocks to us only to find parents and removals; ours are made from the token ids, so
that all engines with one block size and salt agree. Whatever comes is untrusted: bounded, checked, and counted if bad.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgpack

from gateway.upstreams.prefix_index import TIERS
from gateway.upstreams.prompt import chain, root_of

MAX_PAYLOAD = 16 * 1024 * 1024
MAX_EVENTS = 100_000
MAX_BLOCK_SIZE = 65_536
MAX_NAME = 256
_MAX_TIME = 1e11

Theirs = int | bytes
"""An engine's own name for a block."""

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_MEDIA = {None: 0, "": 0, "GPU": 0, "DEVICE": 0, "CPU": 1, "HOST": 1}


class BadEvent(ValueError):
    """Bytes that are no batch of events, or an event that makes no sense; the message says what is wrong, in a few
    words that are the same for every such case.
    """


@dataclass(frozen=True, slots=True)
class Batch:
    """One message: the engine's clock (unix seconds), and its events as (kind, fields)."""

    at: float
    events: list[tuple[str, Mapping[str, Any]]]


@dataclass(slots=True)
class Changes:
    """What a batch means for the index, in order: (tier, hashes added or removed, added?). ``cleared``: drop
    everything first. ``block_size``: tokens in a block, where any were added.
    """

    cleared: bool = False
    block_size: int = 0
    steps: list[tuple[int, list[int], bool]] = field(default_factory=list)


def read_batch(payload: bytes) -> Batch:
    """Reads a message; raises `BadEvent`."""
    if len(payload) > MAX_PAYLOAD:
        raise BadEvent("too large")
    try:
        value = msgpack.unpackb(payload, strict_map_key=False)
    except Exception as error:  # the library raises many kinds, and bare ValueError for hostile nesting
        raise BadEvent("not msgpack") from error
    if isinstance(value, Mapping):
        at, events = value.get("ts"), value.get("events")
    elif isinstance(value, list) and len(value) >= 2:
        at, events = value[0], value[1]
    else:
        raise BadEvent("not a batch")
    if (
        not isinstance(at, int | float)
        or isinstance(at, bool)
        or not 0 <= at < _MAX_TIME
        or not isinstance(events, list)
    ):
        raise BadEvent("not a batch")
    if len(events) > MAX_EVENTS:
        raise BadEvent("too many events")
    return Batch(float(at), list(_events(events)))


def _events(events: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for event in events:
        if isinstance(event, Mapping):
            yield str(event.get("type")), event
        elif isinstance(event, list) and event:
            kind = str(event[0])
            yield kind, dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))
        else:
            yield "?", {}


class Mirror:
    """What one engine holds, by its own names, at most ``max_blocks`` a tier. ``only_size``: tokens in the blocks that
    are taken. ``bad`` counts what could not be used, by reason; ``orphans``: blocks whose parent is unknown, so that
    something was missed.
    """

    def __init__(self, max_blocks: int, only_size: int | None = None) -> None:
        self._most, self._only_size = max_blocks, only_size
        self._held: list[dict[Theirs, int]] = [{} for _ in range(TIERS)]
        self.bad: Counter[str] = Counter()
        self.orphans = 0
        self.block_size = 0

    def __len__(self) -> int:
        return sum(map(len, self._held))

    def clear(self) -> None:
        """Forgets everything."""
        self._held = [{} for _ in range(TIERS)]

    def apply(self, batch: Batch) -> Changes:
        """Takes a batch; what is bad in it is counted and left out."""
        changes = Changes(block_size=self.block_size)
        for kind, event in batch.events:
            try:
                if kind == "BlockStored":
                    self._stored(event, changes)
                elif kind == "BlockRemoved":
                    self._removed(event, changes)
                elif kind == "AllBlocksCleared":
                    self.clear()
                    changes.cleared, changes.steps = True, []
                else:
                    raise BadEvent("unknown kind")
            except BadEvent as error:
                self.bad[str(error)] += 1
        return changes

    def _stored(self, event: Mapping[str, Any], changes: Changes) -> None:
        names, tokens, size = _names(event), event.get("token_ids"), event.get("block_size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MAX_BLOCK_SIZE:
            raise BadEvent("bad block size")
        if self._only_size is not None and size != self._only_size:
            raise BadEvent("another block size")
        if not isinstance(tokens, list) or len(tokens) != size * len(names):
            raise BadEvent("tokens do not fit the blocks")
        try:
            packed = array("I", tokens).tobytes()
        except (TypeError, OverflowError):
            raise BadEvent("bad token ids") from None
        extra = event.get("extra_keys")
        extra = extra if isinstance(extra, list) and len(extra) == len(names) else [None] * len(names)
        parent = event.get("parent_block_hash")
        previous = self._root(event, extra[0]) if parent is None else self._find(parent)
        if previous is None:
            self.orphans += 1
            raise BadEvent("unknown parent")
        self.block_size = changes.block_size = size
        tier = _tier(event)
        held, ours = self._held[tier], []
        for i in range(len(names)):
            if i and extra[i]:
                previous ^= root_of(str(extra[i]))
            (previous,) = chain(packed[i * size * 4 : (i + 1) * size * 4], previous, size * 4)
            ours.append(previous)
        new = dict(zip(names, ours, strict=True))
        renamed = [held[name] for name in new.keys() & held.keys() if held[name] != new[name]]
        if renamed:
            changes.steps.append((tier, renamed, False))
        held |= new
        changes.steps.append((tier, list(new.values()), True))
        if len(held) > self._most:
            dropped = list(islice(held, len(held) - self._most + self._most // 64))
            changes.steps.append((tier, [held.pop(name) for name in dropped], False))

    def _removed(self, event: Mapping[str, Any], changes: Changes) -> None:
        tier = _tier(event)
        held = self._held[tier]
        gone = [held.pop(name) for name in _names(event) if name in held]
        if gone:
            changes.steps.append((tier, gone, False))

    def _find(self, parent: object) -> int | None:
        if isinstance(parent, int | bytes):
            return next((held[parent] for held in self._held if parent in held), None)
        return None

    @staticmethod
    def _root(event: Mapping[str, Any], extra: object) -> int:
        adapter = event.get("lora_name") or event.get("lora_id")
        return block_root(_texts(extra), "" if adapter is None else str(adapter))


def block_root(extra: Sequence[str], adapter: str = "") -> int:
    """Where chains of blocks begin: by the first block's extra keys (the salt among them) and the adapter."""
    return root_of("kv", adapter, *extra)


def block_chain(tokens: Sequence[int], size: int, root: int) -> list[int]:
    """Names the full blocks of a prompt as `Mirror` does. The last token is always computed, so its block is left out
    where it would complete one.
    """
    return chain(array("I", tokens[: max(0, len(tokens) - 1)]).tobytes(), root, size * 4)


def _names(event: Mapping[str, Any]) -> list[Theirs]:
    names = event.get("block_hashes")
    if not isinstance(names, list) or not names or not all(map(_is_name, names)):
        raise BadEvent("bad block hashes")
    return names


def _is_name(name: object) -> bool:
    return isinstance(name, int) or (isinstance(name, bytes) and len(name) <= MAX_NAME)


def _tier(event: Mapping[str, Any]) -> int:
    medium = event.get("medium")
    return _MEDIA.get(medium.upper() if isinstance(medium, str) else None, TIERS - 1)


def _texts(extra: object) -> list[str]:
    return [str(item) for item in extra] if isinstance(extra, list | tuple) else []
