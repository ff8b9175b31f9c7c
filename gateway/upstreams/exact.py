"""Exact knowledge of what upstreams hold: KV events into the index, and prompts into chains of their token blocks.

Both need libraries that a gateway without such upstreams need not have; where they are missing, or a tokenizer cannot
be read, what upstreams hold is learned from what they were sent, as with any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.upstreams.prefix_index import TIERS, PrefixIndex

if TYPE_CHECKING:
    from gateway.upstreams.kv_blocks import Changes
    from gateway.upstreams.kv_events import KvListener, Source
    from gateway.upstreams.pool import Member
    from gateway.upstreams.tokens import PromptTokens

log = logging.getLogger(__name__)

MAX_BLOCKS = 2_000_000
"""Blocks told of, all upstreams together."""
PATIENCE = 0.1
"""Seconds that a request waits for its tokens; what takes longer is routed by its text, and remembered."""

_Key = tuple[Path, int, str]
"""What a chain of blocks depends on besides the prompt: tokenizer, tokens in a block, salt."""


class Told(NamedTuple):
    """The chain of a prompt's blocks, the tokens in one, and the bits of the upstreams that tell which they hold."""

    chain: Sequence[int]
    size: int
    slots: int


class ExactSource:
    """Keeps the index true for upstreams with ``kv_events`` and ``tokenizer``. `open` it in the event loop.

    ``told``: takes the name of an upstream that has begun to tell what it holds, or has said that it holds nothing.
    """

    def __init__(self, index: PrefixIndex, told: Callable[[str], None]) -> None:
        self._index, self._told = index, told
        self._held: dict[str, list[set[int]]] = {}
        self._sizes: dict[str, int] = {}  # tokens in a block, of those that have told something
        self._sources: list[Source] = []
        self._listener: KvListener | None = None
        self._tokenizers: dict[Path, PromptTokens | None] = {}
        self._of: dict[str, tuple[Path, bool]] = {}  # by upstream: its tokenizer, and whether it gets the tenant's salt
        self._thread = ThreadPoolExecutor(1, "tokenize")
        self._loop: asyncio.AbstractEventLoop | None = None

    def apply(self, members: Sequence[Member]) -> None:
        """Listens to these upstreams, as far as they tell anything."""
        telling = [m for m in members if m.config.kv_events is not None and m.config.tokenizer is not None]
        for member in members:
            if member.config.kv_events is not None and member.config.tokenizer is None:
                log.warning("upstreams.%s: kv_events need the upstream's 'tokenizer' to be of use", member.name)
        self._of = {m.name: (m.config.tokenizer, m.config.cache_salt) for m in telling if m.config.tokenizer}
        for name in self._held.keys() - self._of.keys():
            self._drop(name)
        sources = self._sources_of(telling)
        if sources != self._sources:
            self._sources = sources
            self._listen()
        for path in {path for path, _ in self._of.values()} - self._tokenizers.keys():
            self._tokenizers[path] = None
            self._thread.submit(self._load, path)

    def open(self) -> None:
        """Begins to listen, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._listen()

    async def close(self) -> None:
        """Stops listening."""
        self._loop = None
        listener, self._listener = self._listener, None
        if listener is not None:
            await asyncio.to_thread(listener.stop)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, path: str, body: Mapping[str, Any], salt: str, members: Sequence[Member]
    ) -> tuple[int, Sequence[Told]]:
        """The tokens of a prompt and its chains for the upstreams that tell what they hold; (0, []) if there is none,
        or it cannot be said.
        """
        slots: dict[_Key, int] = {}
        for member in members:
            if self._tells(member):
                tokenizer, salted = self._of[member.name]
                key = (tokenizer, self._sizes[member.name], salt if salted else "")
                slots[key] = slots.get(key, 0) | member.bit
        if not slots:
            return 0, []
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._read, path, body, set(slots))
        try:
            tokens, chains = await asyncio.wait_for(work, PATIENCE)  # cancels it if it has not begun
        except TimeoutError:
            return 0, []
        return tokens, [Told(chain, key[1], slots[key]) for key, chain in chains.items()]

    def tells(self, members: Sequence[Member]) -> bool:
        """Whether one of them tells what it holds, so that prompts for it are read."""
        return any(self._tells(member) for member in members)

    def _tells(self, member: Member) -> bool:
        return member.name in self._sizes and member.name in self._of

    def reads(self, name: str) -> bool:
        """Whether this upstream's tokenizer is there and could be read."""
        return name in self._of and self._tokenizers.get(self._of[name][0]) is not None

    def forget(self, name: str) -> None:
        """Something else has shown that this upstream lost what it held."""
        if self._listener is not None and name in self._of:
            self._listener.forget(name)

    def counts(self) -> dict[str, dict[str, int]]:
        """Per upstream: what the listener counted, and blocks held."""
        counted = self._listener.counts() if self._listener is not None else {}
        return {name: {**counts, "blocks": sum(map(len, self._held.get(name, ())))} for name, counts in counted.items()}

    def _read(self, path: str, body: Mapping[str, Any], wanted: set[_Key]) -> tuple[int, dict[_Key, list[int]]]:
        """In the tokenizing thread."""
        from gateway.upstreams.kv_blocks import block_chain, block_root
        from gateway.upstreams.tokens import Untold

        count, chains, ids = 0, {}, {}
        for tokenizer, size, salt in wanted:
            made = self._tokenizers.get(tokenizer)
            if made is None:
                continue
            try:
                if tokenizer not in ids:
                    ids[tokenizer] = made.ids(path, body)
                chains[tokenizer, size, salt] = block_chain(ids[tokenizer], size, block_root([salt] if salt else []))
            except (Untold, TypeError, OverflowError):
                continue
            count = max(count, len(ids[tokenizer]))
        return count, chains

    def _load(self, path: Path) -> None:
        """In the tokenizing thread."""
        try:
            from gateway.upstreams.tokens import PromptTokens, TokenizerError
        except ImportError as error:
            log.warning("exact prefix routing needs the package '%s'; install warmgate[routing]", error.name)
            return
        try:
            self._tokenizers[path] = PromptTokens(path)
        except TokenizerError as error:
            log.warning("exact prefix routing is not possible: %s", error)

    def _sources_of(self, telling: Sequence[Member]) -> list[Source]:
        if not telling:
            return []
        try:
            from gateway.upstreams.kv_events import Source
        except ImportError as error:
            log.warning("KV events need the package '%s'; install warmgate[routing]", error.name)
            return []
        share = MAX_BLOCKS // len(telling)
        return [
            Source(m.name, told.bind, told.connect, told.replay, share, told.block_size)
            for m in telling
            if (told := m.config.kv_events) is not None
        ]

    def _listen(self) -> None:
        """(Re)starts the listener where one is needed and a loop is there to take what it hears."""
        if self._loop is None:
            return
        old, self._listener = self._listener, None
        if old is not None:
            old.stop()
            for name in list(self._held):
                self._drop(name)
        if self._sources:
            from gateway.upstreams.kv_events import KvListener

            self._listener = KvListener(self._sources, self._deliver)
            self._listener.start()

    def _deliver(self, name: str, changes: Changes) -> None:
        """In the listening thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._take, name, changes)
            except RuntimeError:
                pass  # the loop has just ended

    def _take(self, name: str, changes: Changes) -> None:
        if changes.cleared:
            self._drop(name)
        if name not in self._sizes:
            self._told(name)
        if name not in self._of or not changes.steps:
            return
        slot = self._index.slot(name)
        held = self._held.setdefault(name, [set() for _ in range(TIERS)])
        self._sizes[name] = changes.block_size
        for tier, blocks, added in changes.steps:
            if added:
                self._index.add(slot, blocks, tier)
                held[tier].update(blocks)
            else:
                self._index.discard(slot, blocks, tier)
                held[tier].difference_update(blocks)

    def _drop(self, name: str) -> None:
        self._sizes.pop(name, None)
        for tier, blocks in enumerate(self._held.pop(name, ())):
            self._index.discard(self._index.slot(name), blocks, tier)
