"""What the engine can be told: one frozen record, made from the command line (`__main__.py`) or in tests."""

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.errors import ModelError


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine process; sizes in bytes or tokens as named.

    Attributes:
        model: a bundled model's name or a path (see `model/weights.py`).
        served_model_name: the name clients use; default: the `model` as given, without folder and suffix.
        device: `auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:N`.
        dtype: `auto` (float32 on the CPU, bfloat16 on CUDA), `float32`, `bfloat16`.
        block_size: tokens in one KV block.
        prefill_chunk: tokens of one prefill pass, a multiple of `block_size`; prefix hits are cut to it.
        kv_bytes: size of the KV pool; 0 takes a quarter of the free memory (at most 4 GiB on the CPU).
        kv_host_bytes: host memory for KV blocks that leave the device; 0: none.
        kv_remote: `redis://…`, `rediss://…`, `unix://…` or `lmcache://host:port` behind it; empty: none.
        kv_host_quota: bytes of host memory that one tenant (one `cache_salt`) may hold; 0: no limit.
        kv_remote_quota: bytes that one tenant may hold in the remote tier (Redis only); 0: no limit.
        write_through_uses: prompts that must have used a block before it is stored remotely at once; 1: every block.
        max_context: longest prompt plus answer; 0 takes the model's own.
        step_tokens: most prompt tokens that one step computes, beside the decodes.
        max_running: sequences that may run at once.
        threads: of a prefill's matrix products; 0 takes all cores. Decode on the CPU has one.
        kv_transfer: `host:port` at which other engines fetch prompts computed for them (see `pd/`), and may be told to
            fetch from others; empty: neither.
        kv_transfer_lease: seconds that a prompt computed for another engine is kept for it.
        kv_transfer_patience: seconds that fetching a prompt may take before the rest of it is computed.
        kv_transfer_peers: hosts to fetch from, beside this one.
        kv_events: ZMQ endpoint for KV events (see `events.py`); empty: none.
        kv_events_replay: ZMQ endpoint to replay them from; empty: none.
        int8_decode: whether decode uses int8 copies of the weights: faster, a little less exact; on the CPU only.
        prefix_reuse: whether known prefixes are taken from the cache at all.
        speculate: `auto`: guess tokens and verify several at once, where that does not change a bit; `off`.
    """

    model: str = "smollm2-135m-instruct"
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 9001
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 32
    prefill_chunk: int = 128
    kv_bytes: int = 0
    max_context: int = 0
    step_tokens: int = 128
    max_running: int = 16
    threads: int = 0
    kv_host_bytes: int = 0
    kv_remote: str = ""
    kv_host_quota: int = 0
    kv_remote_quota: int = 0
    write_through_uses: int = 2
    kv_transfer: str = ""
    kv_transfer_lease: float = 60.0
    kv_transfer_patience: float = 5.0
    kv_transfer_peers: tuple[str, ...] = ()
    kv_events: str = ""
    kv_events_replay: str = ""
    int8_decode: bool = False
    prefix_reuse: bool = True
    speculate: str = "auto"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.prefill_chunk < 1 or self.prefill_chunk % self.block_size:
            raise ModelError(
                f"the prefill chunk ({self.prefill_chunk}) must be a multiple of the block size ({self.block_size})"
            )
        if (
            min(self.kv_bytes, self.kv_host_bytes, self.kv_host_quota, self.kv_remote_quota) < 0
            or min(self.max_context, self.threads) < 0
            or min(self.step_tokens, self.max_running, self.write_through_uses) < 1
        ):
            raise ModelError("sizes and counts must not be negative, and at least one token and sequence must fit")
        if not (self.kv_transfer_lease > 0 and self.kv_transfer_patience > 0):
            raise ModelError("the lease and the patience of KV transfers must be longer than nothing")
        if self.kv_transfer and not self.prefix_reuse:
            raise ModelError("a KV transfer is a prefix reused: it cannot go without prefix reuse")

    @property
    def name(self) -> str:
        """What `/v1/models` calls the model."""
        base = os.path.basename(self.model.rstrip("/"))  # noqa: PTH119 - a name, not a path that must exist
        return self.served_model_name or base.removesuffix(".gguf")
