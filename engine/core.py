"""The engine without a thread or a server: model, pool, scheduler and sampling, advanced one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

import torch

from cache.prefix.blocks import LayoutId, chain
from engine.attention import attention_kind
from engine.batch import Runner
from engine.config import EngineConfig
from engine.decoding import MakeDecoder, quickest_decoder
from engine.errors import ModelError, RequestError
from engine.guide import Guide
from engine.kv.lower import LowerTiers, build_stack
from engine.kv.manager import BlockEvents, BlockManager, NoEvents
from engine.kv.pool import KVPool
from engine.model.linear import packs
from engine.model.llama import Llama
from engine.model.weights import ModelFiles
from engine.output import Delta, Output
from engine.pd.link import Link
from engine.pd.wire import Source
from engine.sampling import Sampler, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.speculate.drafter import Drafter
from engine.speculate.exact import ExactRows

log = logging.getLogger("engine")

_LARGEST_CPU_POOL = 4 << 30


@dataclass(frozen=True)
class Generation:
    """One thing to generate, fully resolved: token ids in, at most `max_tokens` out.

    `offered`: the prompt is computed for another engine. `source`: another engine has computed it.
    """

    id: str
    prompt: Tokens[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: Tokens[str] = ()
    salt: bytes = b""
    priority: int = 0
    ignore_eos: bool = False
    guide: Guide | None = None
    offered: bool = False
    source: Source | None = None


@dataclass
class Counters:
    """Totals since start, read by the metrics."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """Everything between token ids and deltas. One owner thread; never blocks but to compute."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        *,
        events: BlockEvents | None = None,
        progress: Callable[[int], None] = lambda layer: None,
        wake: Callable[[], None] = lambda: None,
        make_decoder: MakeDecoder = quickest_decoder,
    ) -> None:
        context = min(config.max_context or files.spec.context, files.spec.context)
        files = replace(files, spec=replace(files.spec, context=context))  # no tables for what is never used
        self.config, self.spec, self.tokenizer = config, files.spec, files.tokenizer
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        self.model = Llama(
            files.spec, files.tensor, device=device, dtype=dtype, int8_decode=config.int8_decode, progress=progress
        )
        size = KVPool.block_bytes(files.spec, config.block_size, dtype)
        self.pool = KVPool(
            files.spec,
            _pool_blocks(config, size, device, files.spec.context),
            config.block_size,
            device=device,
            dtype=dtype,
        )
        self._events = events or NoEvents()
        self.manager = BlockManager(self.pool.blocks, self._events)
        self.layout = LayoutId(
            weights=files.digest,
            dtype=str(dtype).removeprefix("torch."),
            layers=files.spec.layers,
            kv_heads=files.spec.kv_heads,
            head_size=files.spec.head_dim,
            block_size=config.block_size,
            rope=files.spec.rope(),
            numerics=f"chunk={config.prefill_chunk} attention={attention_kind(device, dtype)}"
            f" packed={packs(device, dtype)}",
        )
        stack = build_stack(config, self.layout, size)
        self.lower = None
        if stack is not None:
            self.lower = LowerTiers(
                stack,
                self.pool,
                self.manager,
                chunk_blocks=config.prefill_chunk // config.block_size,
                eager=config.write_through_uses == 1,
                wake=wake,
            )
        self.link = Link(config, self.layout, files.spec, self.pool, self.manager, wake) if config.kv_transfer else None
        decoder = make_decoder(self.model, self.pool)
        self.runner = Runner(self.model, self.pool, decoder)
        self.drafter = None
        if config.speculate != "off":
            self.drafter = Drafter(ExactRows(self.model, decoder).most)
        self.scheduler = Scheduler(
            self.manager,
            block_size=config.block_size,
            chunk=config.prefill_chunk,
            step_tokens=config.step_tokens,
            max_running=config.max_running,
            reuse=config.prefix_reuse,
            lower=self.lower,
            pulls=self.link and self.link.pulls,
            drafter=self.drafter,
        )
        self.context = min(context, self.pool.blocks * config.block_size)
        self.counters = Counters()
        self.stalled = False
        """Whether the last step had nothing to compute, since what it needs is still being loaded."""
        self._sequences: dict[str, Sequence] = {}

    def check(self, prompt_length: int, max_tokens: int | None) -> int:
        """The token limit of an answer to such a prompt. Raises `RequestError` if the context cannot hold both."""
        wanted = prompt_length + (max_tokens or 1)
        if prompt_length == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if wanted > self.context:
            asked = f" and {max_tokens} of answer" if max_tokens is not None else ""
            raise RequestError(
                f"this model's context is {self.context} tokens, but the request has {prompt_length} of prompt{asked}",
                code="context_length_exceeded",
                param="messages",
            )
        return max_tokens or self.context - prompt_length

    def add(self, job: Generation) -> Sequence:
        """Queues a generation whose length `check` has accepted; the sequence is for looking at."""
        output = Output(self.tokenizer, job.stops, ignore_eos=job.ignore_eos, min_tokens=job.sampling.min_tokens)
        sequence = Sequence(
            id=job.id,
            prompt_length=len(job.prompt),
            tokens=list(job.prompt),
            sampler=Sampler(job.sampling, list(job.prompt), job.guide, output.ends),
            output=output,
            chain=chain(job.prompt, self.config.block_size, salt=job.salt) if self.config.prefix_reuse else [],
            max_tokens=job.max_tokens,
            salt=job.salt,
            priority=job.priority,
            offered=job.offered,
        )
        self._sequences[job.id] = sequence
        if self.link is not None and job.source is not None:
            self.link.pulls.want(sequence, job.source)
        self.scheduler.add(sequence)
        self.counters.prompt_tokens += sequence.prompt_length
        return sequence

    def cancel(self, job_id: str, reason: str = "abort") -> None:
        """Drops a generation at whatever point it is; unknown or finished ones are ignored."""
        sequence = self._sequences.pop(job_id, None)
        if sequence is not None:
            self.scheduler.cancel(sequence)
            self._count_finish(reason)

    def jobs(self) -> list[str]:
        """Ids of all unfinished generations."""
        return list(self._sequences)

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[tuple[str, Delta]]:
        """Advances every sequence that can be advanced, and returns what was generated, as (job id, delta)."""
        if self.link is not None:
            self.link.offers.reap()
        step = self.scheduler.schedule()
        if self.lower is not None:
            self.lower.save_evicted()  # before anything is written over it
        self.stalled = not step
        if not step:
            return []
        results = self.runner.run(step) + [(sequence, logits[None]) for sequence, logits in step.handed]
        self.scheduler.commit(step)
        self._events.flush()
        computed = sum(end - start for _, start, end in step.prefills)
        self.counters.computed_tokens += computed
        if self.lower is not None:
            if computed >= self.config.prefill_chunk:  # a few tokens at the end of a prompt say nothing about the rate
                self.lower.stack.observe_prefill(computed, self.runner.prefill_seconds)
            self.lower.save_pending()
        if self.drafter is not None and step.decodes:
            rows = sum(1 + len(sequence.draft) for sequence in step.decodes)
            self.drafter.timed(rows, self.runner.decode_seconds)
        return [(sequence.id, delta) for sequence, rows in results for delta in self._take(sequence, rows)]

    def _take(self, sequence: Sequence, rows: torch.Tensor) -> Iterator[Delta]:
        """Chooses the next token, and further ones as long as they are those that were guessed."""
        draft, sequence.draft = sequence.draft, []
        right = 0
        for logits in rows:
            delta = self._choose(sequence, logits)
            yield delta
            if right == len(draft) or delta.error is not None or sequence.tokens[-1] != draft[right]:
                break
            right += 1
            if delta.finish_reason:
                break
            sequence.computed += 1  # the guess was right, so its KV is there
        if self.drafter is not None and draft:
            self.drafter.verified(sequence, draft, right)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> Delta:
        try:
            token = sequence.sampler.choose(logits)
        except RequestError as error:
            return self._give_up(sequence, error.message)
        except Exception:  # whatever it is, it is this one request's: the others of the step go on
            log.exception("no token could be chosen; the request is given up")
            return self._give_up(sequence, "the engine failed on this request")
        report = sequence.sampler.report(logits, token)
        sequence.tokens.append(token)
        if sequence.output_length == 1:
            self.counters.cached_tokens += sequence.cached
            self.counters.loaded_tokens += sequence.cached - sequence.cached_by.get("device", 0)
        self.counters.generated_tokens += 1
        delta = sequence.output.push(token, report, last=sequence.output_length >= sequence.max_tokens)
        if sequence.offered and self.link is not None:
            delta.transfer = self.link.offers.offer(sequence, logits)
        delta.tokens, delta.cached_tokens, delta.cached_by = sequence.output_length, sequence.cached, sequence.cached_by
        if delta.finish_reason:
            self.scheduler.cancel(sequence)
            del self._sequences[sequence.id]
            self._count_finish(delta.finish_reason)
            if self.drafter is not None:
                self.drafter.remember(sequence)
        return delta

    def _give_up(self, sequence: Sequence, message: str) -> Delta:
        self.cancel(sequence.id, "error")
        return Delta(error=message)

    def _count_finish(self, reason: str) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def reset_prefix_cache(self) -> None:
        """Forgets every known prefix; running sequences keep their blocks."""
        self.manager.reset()
        self._events.flush()

    def rest(self) -> bool:
        """Does a little of what waits for a quiet moment; False when no more is left."""
        if self.lower is not None and self.lower.save_pending():
            return True
        if self.link is not None:
            self.link.offers.reap()
        self.check_integrity()
        return False

    def close(self) -> None:
        """Stores what still waits and lets the tiers go."""
        if self.lower is not None:
            self.lower.save_pending(limit=None)
            self.lower.stack.close()
        if self.link is not None:
            self.link.close()
            self.link.offers.reap()

    def check_integrity(self) -> None:
        """Raises `AssertionError` if any block is lost, held twice or wrongly counted."""
        running = [s.blocks for s in self._sequences.values() if s.state is State.RUNNING]
        self.manager.check_integrity([*running, *(self.link.offers.held() if self.link is not None else ())])


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that exists. Raises `ModelError` otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`, `float32` or `bfloat16` to a dtype. Raises `ModelError` for anything else."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ModelError(f"dtype {name!r} is unknown; use auto, float32 or bfloat16")
    return known[name]


def _pool_blocks(config: EngineConfig, block_bytes: int, device: torch.device, context: int) -> int:
    if config.kv_bytes:
        wanted = config.kv_bytes
    elif device.type == "cuda":
        wanted = torch.cuda.mem_get_info(device)[0] // 4 * 3
    else:
        wanted = min(_free_memory() // 4, _LARGEST_CPU_POOL)
    blocks = wanted // block_bytes
    if blocks * config.block_size < config.prefill_chunk:
        raise ModelError(
            f"a KV cache of {wanted} bytes is too small: {block_bytes} bytes hold {config.block_size} tokens"
        )
    return blocks


def _free_memory() -> int:
    """Bytes that can be had without swapping (Linux), or a careful guess."""
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2 << 30
