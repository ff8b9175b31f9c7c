"""`/metrics`: the engine's state at the time of asking, under vLLM's names where vLLM has a counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.prefix.stack import TierStack
from engine.core import EngineCore
from engine.pd.link import Link


class EngineCollector(Collector):
    """Reads the core's counters; integers read without a lock are at worst one step old."""

    def __init__(self, core: EngineCore, model: str) -> None:
        self._core, self._model = core, model

    def collect(self) -> Iterator[Metric]:
        core, scheduler, manager = self._core, self._core.scheduler, self._core.manager
        total, counters = manager.total, core.counters

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            return family

        yield gauge("vllm:num_requests_running", "Sequences being computed.", len(scheduler.running))
        yield gauge("vllm:num_requests_waiting", "Sequences in the queue.", len(scheduler.waiting))
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", 1 - manager.free / total)
        yield counter("vllm:num_preemptions", "Sequences sent back to the queue.", scheduler.preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens of all requests.", counters.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", counters.generated_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", counters.prompt_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", counters.cached_tokens)
        yield counter("vllm:external_prefix_cache_hits", "Prompt tokens loaded from below.", counters.loaded_tokens)
        if (drafter := core.drafter) is not None:
            yield counter("vllm:spec_decode_num_drafts", "Drafts verified.", drafter.drafts)
            yield counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", drafter.drafted)
            yield counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right.", drafter.accepted)
        yield counter("warmgate_engine_prefill_tokens", "Prompt tokens really computed.", counters.computed_tokens)
        yield counter("warmgate_engine_block_evictions", "Known blocks given up for space.", manager.evictions)
        yield counter("warmgate_engine_hash_collisions", "Hashes equal, blocks not.", manager.collisions)
        if core.lower is not None:
            yield from self._tiers(core.lower.stack)
        if core.link is not None:
            yield self._transfers(core.link)
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished generations by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in dict(counters.finished).items():
            finished.add_metric([self._model, reason], count)
        yield finished

    def _transfers(self, link: Link) -> Metric:
        family = CounterMetricFamily(
            "warmgate_engine_transfers",
            "Prompts computed for another engine, or by one, and what became of them.",
            labels=["model_name", "side", "event"],
        )
        for side, counts in link.counts().items():
            for event, count in counts.copy().items():
                family.add_metric([self._model, side, event], count)
        return family

    def _tiers(self, stack: TierStack) -> Iterator[Metric]:
        blocks = CounterMetricFamily(
            "warmgate_engine_tier_blocks",
            "Blocks by tier and by what was done.",
            labels=["model_name", "tier", "event"],
        )
        for tier, counts in stack.stats().items():
            for event, count in counts.items():
                blocks.add_metric([self._model, tier, event], count)
        yield blocks
        decisions = CounterMetricFamily(
            "warmgate_engine_tier_decisions", "Fetch or recompute, by reason.", labels=["model_name", "reason"]
        )
        for reason, count in dict(stack.decisions).items():
            decisions.add_metric([self._model, reason], count)
        yield decisions


def render(core: EngineCore, model: str) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(core, model))
    return generate_latest(registry)
