"""Blocks with known bytes, buffers with poison, a remote tier that fails to order, a Redis server to mistreat."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import redis

from cache.prefix.blocks import Block, chain
from cache.prefix.codec import BadBlock, Codec
from cache.prefix.host import HostTier
from cache.prefix.stack import TierStack
from cache.prefix.tiers import GuardedTier, Lease, Limits
from cache.prefix.transfer import Lookup, Transfer
from cache.stores.breaker import Breaker
from tests.services import freeze, thaw
from tests.waiting import wait_until

BLOCK_BYTES = 4096
BLOCK_TOKENS = 4
LAYOUT = b"L" * 32
TENANT = b"tenant"
POISON = b"\xee" * BLOCK_BYTES

Hook = Callable[[int], Awaitable[None]]
"""Called with the number of the call so far."""


def make_blocks(count: int, *, seed: int = 0, salt: bytes = TENANT, **options) -> list[Block]:
    """A chain of `count` blocks; another seed makes another prompt."""
    return chain([seed * 1_000_000 + i for i in range(count * BLOCK_TOKENS)], BLOCK_TOKENS, salt=salt, **options)


def payload(block: Block, size: int = BLOCK_BYTES) -> memoryview:
    """Bytes that only this block has."""
    return memoryview((block.digest * (size // len(block.digest) + 1))[:size])


def buffers(count: int) -> list[memoryview]:
    """Writable buffers, poisoned."""
    return [memoryview(bytearray(POISON)) for _ in range(count)]


class RedisServer:
    """A redis-server of one's own on a unix socket, to be stopped, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        wait_until(self._answers)

    def kill(self) -> None:
        self.process.kill()  # a stopped process dies of it as well
        self.process.wait()

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        thaw(self.process.pid)

    def block_keys(self) -> list[bytes]:
        """The keys that hold blocks."""
        return sorted(self.client.keys("wg:kv1:*"))  # type: ignore[arg-type]

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False


class FaultyTier:
    """A remote tier in a dictionary of codec records. Each `on_…` hook may raise, wait or spoil what passes through."""

    name = "remote"
    ttl = 3600.0
    limits = Limits(lookup=10.0, load=10.0, store=10.0)  # a busy machine is no fault
    window_bytes = 4 * 2**20

    def __init__(self, records: dict[bytes, bytes] | None = None) -> None:
        self.records = {} if records is None else records
        self.codec = Codec(LAYOUT, BLOCK_BYTES)
        self.calls: Counter[str] = Counter()
        self.open_leases = 0
        self.on_lookup: Hook | None = None
        self.on_load: Hook | None = None
        self.on_store: Hook | None = None
        self.on_record: Callable[[bytes], bytes | None] = bytes

    async def lookup(self, blocks, tenant):
        await self._call("lookup", self.on_lookup)
        return next((i for i, block in enumerate(blocks) if block.hash not in self.records), len(blocks))

    async def prepare_load(self, blocks, tenant):
        await self._call("load", self.on_load)
        lease = Lease()
        for block in blocks:
            if (record := self.records.get(block.hash)) is None:
                break
            try:
                lease.views.append(self.codec.decode(record, block, tenant))
            except BadBlock as error:
                lease.bad = error.reason
                break
            lease.blocks.append(block)
        self.open_leases += 1
        return lease

    async def complete_load(self, lease):
        self.open_leases -= 1

    async def prepare_store(self, blocks, tenant):
        lease = Lease([block for block in blocks if block.hash not in self.records], handle=[])
        for block in lease.blocks:
            record, view = self.codec.allocate(block, tenant)
            lease.handle.append(record)
            lease.views.append(view)
        self.open_leases += 1
        return lease

    async def complete_store(self, lease, ok):
        self.open_leases -= 1
        if not ok:
            return
        await self._call("store", self.on_store)
        for block, record in zip(lease.blocks, lease.handle, strict=True):
            self.codec.seal(record)
            stored = self.on_record(bytes(record))
            if stored is not None:
                self.records[block.hash] = stored

    async def touch(self, blocks, tenant):
        self.calls["touch"] += 1

    async def close(self):
        self.calls["close"] += 1

    async def _call(self, verb, hook):
        self.calls[verb] += 1
        if hook is not None:
            await hook(self.calls[verb])


class Bench:
    """Makes stacks and closes them."""

    def __init__(self) -> None:
        self.stacks: list[TierStack] = []

    def __call__(
        self,
        tier: FaultyTier | None = None,
        *,
        slots: int = 16,
        limits: Limits | None = None,
        breaker: Breaker | None = None,
        **options,
    ) -> TierStack:
        stack = TierStack(
            host=HostTier(slots * BLOCK_BYTES, BLOCK_BYTES) if slots else None,
            remote=GuardedTier(tier, BLOCK_BYTES, limits=limits, breaker=breaker) if tier else None,
            block_bytes=BLOCK_BYTES,
            block_tokens=BLOCK_TOKENS,
            **{"load_timeout": 20.0, **options},
        )
        self.stacks.append(stack)
        return stack


def store(stack: TierStack, blocks: Sequence[Block], **options) -> int:
    return stack.store(blocks, [payload(block) for block in blocks], TENANT, **options)


def look(stack: TierStack, blocks: Sequence[Block]) -> Lookup:
    lookup = stack.lookup(blocks, TENANT)
    wait_until(lambda: lookup.done)
    return lookup


def fetch(stack: TierStack, blocks: Sequence[Block]) -> Transfer:
    """Looks up, loads, and proves every filled buffer right and every other one untouched."""
    lookup = look(stack, blocks)
    decision = stack.decide(lookup)
    into = buffers(decision.blocks)
    transfer = stack.load(lookup, decision, into)
    wait_until(lambda: transfer.done)
    check(transfer, into)
    return transfer


def check(transfer: Transfer, into: Sequence[memoryview]) -> None:
    for position, buffer in enumerate(into):
        right = payload(transfer.blocks[position]) if position < transfer.loaded else POISON
        assert buffer == right, f"buffer {position} of {transfer.loaded} loaded"


def settled(stack: TierStack, stored: int) -> None:
    assert stack.remote is not None
    wait_until(lambda: stack.stats()["remote"]["stored"] + stack.stats()["remote"]["dropped"] >= stored)


async def hang(_: int) -> None:
    await asyncio.sleep(3600)


def stumble(*calls: int) -> Callable:
    async def hook(call: int) -> None:
        if call in calls or not calls:
            raise ConnectionError("injected")

    return hook
