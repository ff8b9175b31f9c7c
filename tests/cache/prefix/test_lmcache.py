"""The LMCache tier against the real `lmcache server`, with a second level in a real Redis (O-59, O-62, O-63)."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.prefix.codec import Codec
from cache.prefix.lmcache import LMCacheTier, LMCacheUnavailable
from cache.prefix.stack import TierStack
from cache.prefix.tiers import GuardedTier, Limits
from cache.stores.breaker import Breaker
from tests.cache.prefix.helpers import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LAYOUT,
    TENANT,
    fetch,
    look,
    make_blocks,
    payload,
)
from tests.cache.prefix.lmcache_server import LMCacheServer, installed, lmcache_server
from tests.services import freeze, thaw
from tests.waiting import wait_until

MakeStack = Callable[..., TierStack]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    with lmcache_server(tmp_path_factory.mktemp("lmcache"), BLOCK_TOKENS) as running:
        yield running


@pytest.fixture
def engine(server: LMCacheServer) -> Iterator[MakeStack]:
    stacks: list[TierStack] = []

    def make(*, layout: bytes = LAYOUT, limits: Limits | None = None, breaker: Breaker | None = None) -> TierStack:
        tier = LMCacheTier(server.url, Codec(layout, BLOCK_BYTES), BLOCK_TOKENS)
        remote = GuardedTier(tier, BLOCK_BYTES, limits=limits or Limits(10, 10, 10), breaker=breaker)
        stacks.append(TierStack(remote=remote, block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, load_timeout=20))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.close(timeout=2)


def store(stack: TierStack, blocks) -> None:
    before = stack.stats()["lmcache"]["stored"]
    assert stack.store(blocks, [payload(block) for block in blocks], TENANT) == len(blocks)
    wait_until(lambda: stack.stats()["lmcache"]["stored"] >= before + len(blocks))


@installed
@pytest.mark.slow
@pytest.mark.timeout(300)
class TestServer:
    def test_another_engine_reads_what_one_stored(self, engine):
        blocks = make_blocks(9, seed=1)
        store(engine(), blocks)
        assert fetch(engine(), blocks).by_tier == {"lmcache": 9}
        assert fetch(engine(), make_blocks(9, seed=2)).loaded == 0

    def test_a_load_may_begin_in_the_middle_of_a_prompt(self, engine):
        blocks, stack = make_blocks(9, seed=3), engine()
        store(stack, blocks[:7])
        assert fetch(stack, blocks[3:]).loaded == 4
        assert fetch(stack, blocks[7:]).loaded == 0

    def test_what_is_there_already_is_not_stored_again(self, engine):
        blocks, stack = make_blocks(5, seed=4), engine()
        store(stack, blocks[:3])
        stack.store(blocks, [payload(block) for block in blocks], TENANT)
        wait_until(lambda: stack.stats()["lmcache"]["stored"] == 5)
        assert fetch(stack, blocks).loaded == 5

    def test_other_layouts_and_tenants_share_no_block(self, engine):  # O-59
        blocks = make_blocks(3, seed=5)
        store(engine(), blocks)
        assert look(engine(layout=b"M" * 32), blocks).remote == 0
        assert look(engine(), make_blocks(3, seed=5, salt=b"other")).remote == 0
        lookup = (stack := engine()).lookup(blocks, b"other")
        wait_until(lambda: lookup.done)
        assert lookup.remote == 0 and stack.stats()["lmcache"]["failures"] == 0

    def test_a_damaged_block_is_refused(self, engine, server):  # O-62
        blocks = make_blocks(3, seed=6)
        store(engine(), blocks)
        memory = next(Path("/dev/shm").glob(f"*{server.memory}*"))
        with memory.open("r+b") as file:
            at = file.read().index(bytes(payload(blocks[1])))
            file.seek(at + 99)
            file.write(bytes([payload(blocks[1])[99] ^ 1]))
        stack = engine()
        assert fetch(stack, blocks).loaded == 1
        assert stack.stats()["lmcache"]["bad"] == 1

    def test_lookups_that_nobody_follows_up_leave_nothing_locked(self, engine, server):
        blocks, stack = make_blocks(3, seed=7), engine()
        store(stack, blocks)
        for _ in range(20):
            assert look(stack, blocks).remote == 3
        assert fetch(stack, blocks).loaded == 3
        look(stack, blocks)
        stack.close()
        wait_until(lambda: server.locks() == 0)

    def test_a_frozen_server_delays_nobody(self, engine, server):
        blocks = make_blocks(3, seed=8)
        stack = engine(limits=Limits(0.2, 0.2, 0.2))
        stack.remote._limits = Limits(10, 10, 10)
        store(stack, blocks)
        lookup = look(stack, blocks)
        stack.remote._limits = Limits(0.2, 0.2, 0.2)
        freeze(server.process.pid)
        try:
            started = time.monotonic()
            transfer = stack.load(lookup, stack.decide(lookup), [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks])
            wait_until(lambda: transfer.done)
            assert transfer.loaded == 0 and look(stack, make_blocks(2, seed=9)).remote == 0
            assert time.monotonic() - started < 5
        finally:
            thaw(server.process.pid)
        wait_until(lambda: look(stack, blocks).remote == 3, patience=30)

    def test_after_a_restart_blocks_come_from_the_second_level(self, engine, server):
        layout = b"R" * 32
        blocks, stack = make_blocks(40, seed=10), engine(layout=layout, breaker=Breaker(failures=10**9))
        store(stack, blocks)
        wait_until(lambda: server.second_level_keys(layout) == 40, patience=30)
        server.stop()
        assert fetch(stack, blocks).loaded == 0
        server.start()
        wait_until(lambda: look(stack, blocks).remote == 40, patience=30)
        assert fetch(stack, blocks).loaded == 40
        assert fetch(engine(layout=layout), blocks).loaded == 40


@installed
@pytest.mark.slow
def test_a_chunk_size_other_than_the_block_size_is_said_clearly(server, caplog):
    tier = LMCacheTier(server.url, Codec(LAYOUT, BLOCK_BYTES), 2 * BLOCK_TOKENS)
    stack = TierStack(
        remote=GuardedTier(tier, BLOCK_BYTES, limits=Limits(10, 10, 10), breaker=Breaker(failures=1)),
        block_bytes=BLOCK_BYTES,
        block_tokens=2 * BLOCK_TOKENS,
    )
    assert look(stack, make_blocks(2)).remote == 0
    assert "--chunk-size" in caplog.text
    stack.close()


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmcache.v1.multiprocess.custom_types", None)
    with pytest.raises(LMCacheUnavailable, match=r"pip install 'warmgate\[lmcache\]'"):
        LMCacheTier("lmcache://127.0.0.1:1", Codec(LAYOUT, BLOCK_BYTES), BLOCK_TOKENS)


@installed
def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("cache.prefix.lmcache.metadata.version", lambda name: "0.5.7")
    with pytest.raises(LMCacheUnavailable, match=r"LMCache 0\.5\.6 is needed, 0\.5\.7 is installed"):
        LMCacheTier("lmcache://127.0.0.1:1", Codec(LAYOUT, BLOCK_BYTES), BLOCK_TOKENS)
