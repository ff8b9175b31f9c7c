"""Where a request goes: to the engine on which it is expected to be answered soonest, and which it burdens least.

Costs are in seconds. An engine that holds a prompt's beginning computes less of it, so the same rule that keeps queues
short also brings a conversation back to where it was; no threshold switches between the two. After consistent hashing
with bounded loads (Mirrokni et al. 2018) and the power of two choices (Mitzenmacher 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Literal, Protocol
from zlib import crc32

Reason = Literal["only", "prefix", "session", "load", "bound", "round_robin", "sticky"]
Share = tuple[int, float]
"""(prompt tokens held on one tier, seconds to fetch one of them from there), next after those of the tier before."""
Held = Mapping[int, Sequence[Share]]
"""What engines hold of a prompt, by position; who holds nothing need not be named."""
Sample = Callable[[int], int]
"""A random number from 0 to below its argument (`random.Random.randrange`)."""

HALF_LIFE = 120.0
"""Seconds in which past work comes to count half."""
BUSY = 45.0
"""Seconds of past prefill (of at most `HALF_LIFE` / ln 2) below which past work is no reason to turn a request away."""
SLACK = 4
"""Requests that any engine may have beyond the bound: among few, a ratio says little."""
DECODE_TOKENS = 16.0
"""A running request delays a new one as much as so many prompt tokens would: its decoding shares the engine's steps."""
COMPUTE = 4.0
"""What it costs to compute a token against waiting for one: whoever comes later waits for it too, and it drives out of
the cache another that would have been asked for again. (Found on traces: at 1, half the reuse is lost under load.)
Not so a beginning that many sessions share: once computed, it is held there as well, for all of them; else whoever had
it first would get every new session.
"""
BALANCE = 2.0
"""How much an engine that was given more than its share of late is avoided; times half of the prompt at most."""
SESSION = 0.2
"""What the session's own engine is favoured by, as a share of the prompt."""
PRIOR = 32.0
"""Measurements of its own that an engine must have for them to count for as much as what its fellows show: one may be
far off, and whoever is taken for slow is sent nothing that would show otherwise.
"""
NEWEST, MOST_TIMED = 0.02, 128.0
"""What a new measurement weighs at least against all before it, and how many of these count."""
TIE = 0.01
"""Costs that differ by less than this share of the prompt are alike."""


@dataclass(slots=True, eq=False)
class Engine:
    """What is known of one upstream when a request is to be routed.

    Attributes:
        weight: its share of the traffic against that of others.
        prefill_rate: prompt tokens per second.
        pending: prompt tokens it has still to compute before it comes to a new request.
        running: requests decided for it and not ended, those queued there included.
    """

    name: str
    weight: float = 1.0
    prefill_rate: float = 5000.0
    pending: float = 0.0
    running: int = 0
    _log_rate: float = 0.0
    _timed: float = 0.0
    _work: float = 0.0
    _worked_at: float = 0.0
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = crc32(self.name.encode()) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF

    def work(self, now: float) -> float:
        """Prompt tokens that it was given to compute of late, the recent ones counting more."""
        return self._work * 0.5 ** ((now - self._worked_at) / HALF_LIFE) if now > self._worked_at else self._work

    def timed(self, rate: float) -> None:
        """It was seen to compute a prompt at this rate; `settle_rates` says what that means."""
        self._log_rate += max(NEWEST, 1.0 / (self._timed + 1.0)) * (log(rate) - self._log_rate)
        self._timed = min(MOST_TIMED, self._timed + 1.0)

    def add_work(self, tokens: float, now: float) -> None:
        """Takes note of prompt tokens given to it (or, negative, of tokens that proved to be held)."""
        self._work = max(0.0, self.work(now) + tokens)
        self._worked_at = max(now, self._worked_at)


def settle_rates(engines: Sequence[Engine]) -> None:
    """Sets the prefill rates by what was measured: an engine's own mean, drawn towards that of all until it has enough
    of its own (the means are geometric, since rates are off by factors).
    """
    measured = sum(engine._timed for engine in engines)
    if measured:
        common = sum(engine._timed * engine._log_rate for engine in engines) / measured
        for engine in engines:
            own = engine._timed / (engine._timed + PRIOR)
            engine.prefill_rate = exp(common + own * (engine._log_rate - common) if own else common)


@dataclass(slots=True)
class Ask:
    """A request to be routed: its ``prompt`` tokens, what engines hold of it, and its session (0: none known).
    ``shared``: leading tokens that are not its session's alone (tools, a system prompt).
    """

    prompt: int
    held: Held = field(default_factory=dict)
    session: int = 0
    shared: int = 0


@dataclass(slots=True)
class Decision:
    """The ``index`` of the engine chosen, why, and how many prompt tokens it is expected to hold and to compute."""

    index: int
    reason: Reason
    cached: int
    uncached: int


class Policy(Protocol):
    """Chooses among engines (at least one). The same calls in the same order give the same choices."""

    def choose(self, engines: Sequence[Engine], ask: Ask, now: float) -> Decision: ...


class PrefixPolicy:
    """The lowest expected cost: wait + what is not held, computed or fetched + decoding beside it + cache pressure.

    No engine gets more than ``max_load_ratio`` times its share of the running requests (and `SLACK`) or of the recent
    work, unless all have, or it has next to nothing to do. Near-equal costs are settled between two picked at random.
    """

    def __init__(self, sample: Sample, max_load_ratio: float = 1.3) -> None:
        self._sample = sample
        self._ratio = max_load_ratio

    def choose(self, engines: Sequence[Engine], ask: Ask, now: float) -> Decision:
        if len(engines) == 1:
            return _decision(ask, 0, "only")
        works: list[float] = []
        weights, running = 0.0, 1
        for engine in engines:
            works.append(engine.work(now))
            weights += engine.weight
            running += engine.running
        fair_work = sum(works) / weights
        home = home_of(engines, ask.session) if ask.session else -1
        costs = expected_costs(engines, ask, works, fair_work, home)
        most_work, most_running = fair_work * self._ratio, running / weights * self._ratio
        allowed = [
            i
            for i, engine in enumerate(engines)
            if engine.running <= most_running * engine.weight + SLACK
            and works[i] <= max(most_work * engine.weight, engine.prefill_rate * BUSY)
        ] or range(len(engines))
        best = costs.index(min(costs))
        least = best if best in allowed else min(allowed, key=costs.__getitem__)
        near = costs[least] + TIE * max(1, ask.prompt) / engines[least].prefill_rate
        alike = [i for i in allowed if costs[i] <= near]
        chosen = least if len(alike) == 1 else _lighter(engines, works, *_two(alike, self._sample))
        if best != least:
            return _decision(ask, chosen, "bound")
        return _decision(ask, chosen, "prefix" if ask.held.get(chosen) else "session" if chosen == home else "load")


def expected_costs(
    engines: Sequence[Engine], ask: Ask, works: Sequence[float], fair_work: float, home: int = -1
) -> list[float]:
    """What a request is expected to cost on each engine, in seconds. ``works``: their recent work; ``fair_work``: that
    for a weight of 1, if all had their share; ``home``: the session's own engine. Finite for all that is finite.
    """
    prompt, held = max(1, ask.prompt), ask.held
    costs: list[float] = []
    for i, engine in enumerate(engines):
        rate, weight, work = engine.prefill_rate, engine.weight, works[i]
        tokens = (engine.pending + engine.running * DECODE_TOKENS) / weight + prompt * COMPUTE
        if fair_work > 0:
            tokens += prompt * BALANCE * (work / (work + fair_work * weight) - 0.5)
        if i == home:
            tokens -= prompt * SESSION
        cost = tokens / rate
        if i in held:
            common = ask.shared
            for count, fetch in held[i]:
                of_all = min(count, common)
                common -= of_all
                cost -= max(0.0, (of_all + (count - of_all) * COMPUTE) / rate - count * fetch)
        costs.append(cost)
    return costs


class LoadPolicy:
    """The least loaded, whatever it holds; for comparison."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def choose(self, engines: Sequence[Engine], ask: Ask, now: float) -> Decision:
        loads = [
            (engine.pending / engine.prefill_rate, (engine.running + 1) / engine.weight, engine.work(now))
            for engine in engines
        ]
        least = min(loads)
        alike = [i for i, load in enumerate(loads) if load == least]
        return _decision(ask, alike[self._sample(len(alike))], "load")


class RoundRobinPolicy:
    """One after the other; for comparison."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, engines: Sequence[Engine], ask: Ask, now: float) -> Decision:
        self._next += 1
        return _decision(ask, (self._next - 1) % len(engines), "round_robin")


class StickyPolicy:
    """A session always to the same engine (by rendezvous hashing), whatever its load; for comparison."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def choose(self, engines: Sequence[Engine], ask: Ask, now: float) -> Decision:
        index = home_of(engines, ask.session) if ask.session else self._sample(len(engines))
        return _decision(ask, index, "sticky")


def make_policy(name: str, sample: Sample, max_load_ratio: float = 1.3) -> Policy:
    """The policy called ``prefix``, ``load``, ``round_robin`` or ``sticky``."""
    made: dict[str, Callable[[], Policy]] = {
        "prefix": lambda: PrefixPolicy(sample, max_load_ratio),
        "load": lambda: LoadPolicy(sample),
        "round_robin": RoundRobinPolicy,
        "sticky": lambda: StickyPolicy(sample),
    }
    return made[name]()


def _decision(ask: Ask, index: int, reason: Reason) -> Decision:
    cached = 0
    for count, _ in ask.held.get(index, ()):
        cached += count
    cached = min(cached, ask.prompt)
    return Decision(index, reason, cached, ask.prompt - cached)


def _two(alike: Sequence[int], sample: Sample) -> tuple[int, int]:
    """Two different ones of at least two."""
    first = sample(len(alike))
    second = sample(len(alike) - 1)
    return alike[first], alike[second + (second >= first)]


def _lighter(engines: Sequence[Engine], works: Sequence[float], a: int, b: int) -> int:
    load_a = ((engines[a].running + 1) / engines[a].weight, works[a] / engines[a].weight)
    load_b = ((engines[b].running + 1) / engines[b].weight, works[b] / engines[b].weight)
    return a if load_a <= load_b else b


def home_of(engines: Sequence[Engine], session: int) -> int:
    """The session's engine: the same for every gateway, and for all but a few sessions when engines come or go."""
    best, home = -1, 0
    for i, engine in enumerate(engines):
        mixed = (session ^ engine.seed) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 29) * 0x94D049BB133111EB >> 20 & 0xFFFFFFFF
        if mixed > best:
            best, home = mixed, i
    return home
