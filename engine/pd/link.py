"""Both sides of an engine's part in split requests, as the core holds them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from cache.prefix.blocks import LayoutId
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.manager import BlockManager
from engine.kv.pool import KVPool
from engine.model.spec import ModelSpec
from engine.pd.offers import Offers
from engine.pd.pulls import Pulls
from engine.pd.wire import Codecs, Wires


class Link:
    """Its parts belong to the engine thread; `wake` is called from another. Raises `ModelError` for a bad address."""

    def __init__(
        self,
        config: EngineConfig,
        layout: LayoutId,
        spec: ModelSpec,
        pool: KVPool,
        manager: BlockManager,
        wake: Callable[[], None],
    ) -> None:
        size = KVPool.block_bytes(spec, pool.block_size, pool.dtype)
        codecs = Codecs.of(layout.digest, size, spec.vocab)
        self._wires = Wires()
        try:
            self.offers = Offers(
                pool,
                manager,
                codecs,
                self._wires,
                address=_address(config.kv_transfer),
                lease=config.kv_transfer_lease,
                wake=wake,
            )
        except ModelError:
            self._wires.close()
            raise
        self.pulls = Pulls(
            pool,
            manager,
            codecs,
            self._wires,
            chunk_blocks=config.prefill_chunk // config.block_size,
            peers=frozenset(config.kv_transfer_peers),
            patience=config.kv_transfer_patience,
            wake=wake,
        )

    def counts(self) -> dict[str, Counter[str]]:
        """What became of offers and of pulls."""
        return {"prefill": self.offers.counts, "decode": self.pulls.counts}

    def close(self) -> None:
        """Ends what is under way."""
        self._wires.close()


def _address(text: str) -> tuple[str, int]:
    """`host:port`, an IPv6 address in brackets. Raises `ModelError` for anything that other engines could not reach."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/]+)):(\d{1,5})", text)
    if not found or int(found[3]) >= 1 << 16:
        raise ModelError(f"the KV transfer address {text!r} is not of the form host:port")
    host = found[1] or found[2]
    if host in ("0.0.0.0", "::", "*"):
        raise ModelError(f"the KV transfer address {text!r} must name the host as other engines reach it")
    return host, int(found[3])
