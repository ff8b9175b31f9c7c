"""The ledger's open pages: counters in memory, by minute and group, until they are written away.

`Book.record` is on the path of every hit, so it does as little as can be done: one lookup, a dozen additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import floor

from gateway.ledger.counters import (
    BOUNDS,
    CACHE_WRITE,
    CACHED,
    CALLS,
    COMPUTED,
    COST_PICO,
    FIRST_LATENCY,
    FIRST_TTFT,
    HELD_OUT,
    HELD_OUT_AGREED,
    HELD_OUT_JUDGED,
    LATENCY_US,
    OUTPUT,
    REQUESTS,
    SAVED_PICO,
    SERVED_OUTPUT,
    SERVED_PROMPT,
    SLO_JUDGED,
    SLO_MET,
    SLO_MET_TOKENS,
    TTFT_US,
    UNKNOWN_COST,
    UNKNOWN_SAVED,
    UNKNOWN_SERVED,
    UNKNOWN_USAGE,
    UNSPLIT,
    Counters,
    add,
    counters,
)
from gateway.ledger.rows import OUTCOMES, SAVED, Call, Row
from gateway.ledger.schema import MINUTE
from policies.pricing import Price, PriceTable, Tokens, tokens
from policies.slo import Slo

Group = tuple[str, str, str, str, str, bool]
"""Tenant, model, endpoint, upstream, outcome, stream."""

HITS_KEPT = 20
"""Rows of hits that are kept each second for a look; those of all others are kept anyway."""
ROWS_PENDING = 20_000
"""Rows that wait to be written at most, the newest ones."""
GROUPS_PENDING = 20_000
"""Counters of groups that wait to be written at most; of older minutes nothing is kept beyond that."""
MODELS = 1_000
"""Models told apart; a caller that makes names up must not fill the ledger."""
OTHER = "(other)"
_LABEL = 200  # characters of a name
_REASON = 80
_PROMPT = 2_000
_REASONS = 300  # reasons told apart

_IS_SAVED = {outcome: outcome in SAVED for outcome in OUTCOMES}


@dataclass(slots=True)
class Pages:
    """What has been counted and not yet written: counters by minute (unix seconds of its begin) and group, how often
    each reason was given, and rows.
    """

    minutes: dict[int, dict[Group, Counters]] = field(default_factory=dict)
    reasons: dict[tuple[int, Group, str], int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.minutes or self.rows)

    @property
    def groups(self) -> int:
        """Counters held."""
        return sum(map(len, self.minutes.values()))


@dataclass(slots=True)
class _Value:
    """What a usage report is worth: tokens, and pico-dollars at the price of its model."""

    usage: dict[str, int] | None
    tokens: Tokens | None
    cost: int | None


class Book:
    """Counts rows and calls. ``dropped``: requests whose counters had to be given up, since nothing could be written
    for too long.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._pages = Pages()
        self._open: dict[Group, Counters] = {}
        self._begin = self._end = 0.0
        self._hits_kept = 0
        self._models: set[str] = set()
        self._reasons: set[str] = set()
        self._prices: dict[str, Price | None] = {}
        self._table = PriceTable()
        self._slos: dict[str, Slo] = {}
        self._values: dict[int, _Value] = {}

    def apply(self, prices: PriceTable, slos: Mapping[str, Slo]) -> None:
        """Takes prices and service levels (by the model's name sent upstream) into use."""
        self._table, self._slos = prices, dict(slos)
        self._prices.clear()
        self._values.clear()

    def record(self, row: Row) -> None:
        """Counts a request that has ended, in the minute in which it ended."""
        latency, ttft, saved = row.latency, row.ttft, _IS_SAVED[row.outcome]
        ended = row.at + latency
        if not self._begin <= ended < self._end:
            self._turn(ended)
        group = (row.tenant, row.model, row.endpoint, row.upstream, row.outcome, row.stream)
        count = self._open.get(group)
        if count is None:
            count = self._counters(group)
        micros, bucket = int(latency * 1e6 + 0.5), bisect_left(BOUNDS, latency)
        count[REQUESTS] += 1
        count[LATENCY_US] += micros
        count[FIRST_LATENCY + bucket] += 1
        if ttft is not None:
            if ttft != latency:
                micros, bucket = int(ttft * 1e6 + 0.5), bisect_left(BOUNDS, ttft)
            count[TTFT_US] += micros
            count[FIRST_TTFT + bucket] += 1
        usage = row.usage
        value = self._values.get(id(usage))
        if value is None or value.usage is not usage:
            value = self._remembered(usage, row.model)
        used, cost = value.tokens, value.cost
        if used is not None:
            count[SERVED_PROMPT] += used.prompt
            count[SERVED_OUTPUT] += used.output
        elif row.status == 200 and row.outcome != "error":
            count[UNKNOWN_SERVED] += 1
        if saved:
            if cost is None:
                count[UNKNOWN_SAVED] += 1
            else:
                count[SAVED_PICO] += cost
        if row.held_out:
            count[HELD_OUT] += 1
            count[HELD_OUT_JUDGED] += row.held_out != "unjudged"
            count[HELD_OUT_AGREED] += row.held_out == "agrees"
        if self._slos:
            self._judge(row, used, count)
        if row.reason:
            key = (int(self._begin), self._known(group), self._reason(row.reason))
            self._pages.reasons[key] = self._pages.reasons.get(key, 0) + 1
        if not saved or self._hits_kept < HITS_KEPT:
            row.cost = cost
            self._keep(row, saved)

    def spent(self, call: Call) -> None:
        """Counts an upstream call that has ended."""
        if not self._begin <= call.at < self._end:
            self._turn(call.at)
        count = self._counters((call.tenant, call.model, call.endpoint, call.upstream, call.outcome, call.stream))
        count[CALLS] += 1
        value = self._value(call.usage, call.model)
        used, cost = value.tokens, value.cost
        if used is None:
            count[UNKNOWN_USAGE] += 1
        else:
            count[OUTPUT] += used.output
            count[CACHE_WRITE] += used.cache_write
            if used.cached is None:
                count[UNSPLIT] += used.prompt
            else:
                count[CACHED] += used.cached
                count[COMPUTED] += used.prompt - used.cached
        if cost is None:
            count[UNKNOWN_COST] += 1
        else:
            count[COST_PICO] += cost

    def tear_off(self) -> Pages:
        """All that has been counted since the last time; it is the caller's now."""
        pages, self._pages = self._pages, Pages()
        self._open = {}
        self._begin = self._end = 0.0
        self._hits_kept = 0
        return pages

    def put_back(self, pages: Pages) -> None:
        """Takes pages back that could not be written; within bounds, the newest first."""
        later, self._pages = self._pages, pages
        self._begin = self._end = 0.0
        for minute, groups in later.minutes.items():
            page = pages.minutes.setdefault(minute, {})
            for group, more in groups.items():
                add(page.setdefault(group, counters()), more)
        for key, times in later.reasons.items():
            pages.reasons[key] = pages.reasons.get(key, 0) + times
        pages.rows = [*pages.rows, *later.rows][-ROWS_PENDING:]
        oldest = iter(sorted(pages.minutes))
        while pages.groups > GROUPS_PENDING:
            minute = next(oldest)
            self.give_up(Pages({minute: pages.minutes.pop(minute)}))
            pages.reasons = {key: times for key, times in pages.reasons.items() if key[0] != minute}

    def give_up(self, pages: Pages) -> None:
        """Notes that these pages will never be written."""
        self.dropped += sum(count[REQUESTS] for page in pages.minutes.values() for count in page.values())

    def _turn(self, moment: float) -> None:
        minute = floor(moment / MINUTE) * MINUTE
        self._begin, self._end = float(minute), float(minute + MINUTE)
        self._open = self._pages.minutes.setdefault(minute, {})

    def _counters(self, group: Group) -> Counters:
        known = self._known(group)
        count = self._open.get(known)
        if count is None:
            count = self._open[known] = counters()
        return count

    def _known(self, group: Group) -> Group:
        """The group a request is counted under: its own, unless its model is one name too many."""
        tenant, model, endpoint, upstream, outcome, stream = group
        if model not in self._models:
            model = clean(model, _LABEL)
            if len(self._models) >= MODELS and model not in self._models:
                model = OTHER
            self._models.add(model)
        return tenant, model, endpoint, upstream, outcome, stream

    def _reason(self, reason: str) -> str:
        """A reason as it is counted: without the particulars behind its colon."""
        label = clean(reason.split(":", 1)[0], _REASON)
        if label not in self._reasons:
            if len(self._reasons) >= _REASONS:
                return OTHER
            self._reasons.add(label)
        return label

    def _remembered(self, usage: dict[str, int] | None, model: str) -> _Value:
        """The value of a usage report that comes again with every hit of its entry."""
        if len(self._values) >= MODELS:
            self._values.clear()
        value = self._values[id(usage)] = self._value(usage, model)
        return value

    def _value(self, usage: dict[str, int] | None, model: str) -> _Value:
        if model not in self._prices:
            if len(self._prices) >= MODELS:
                self._prices.clear()
            self._prices[model] = self._table.price(model)
        used, price = tokens(usage), self._prices[model]
        return _Value(usage, used, price.of(used) if used is not None and price is not None else None)

    def _judge(self, row: Row, used: Tokens | None, count: Counters) -> None:
        """Goodput: of requests that were to be answered, those whose user had the answer in time."""
        slo = self._slos.get(row.model)
        if slo is None or not (row.status < 400 or row.status >= 500):
            return
        output = used.output if used is not None else None
        met = row.outcome != "error" and slo.met(
            latency=row.latency, ttft=row.ttft if row.stream else None, output=output
        )
        if met is None:
            return
        count[SLO_JUDGED] += 1
        if met:
            count[SLO_MET] += 1
            count[SLO_MET_TOKENS] += output or 0

    def _keep(self, row: Row, saved: bool) -> None:
        rows = self._pages.rows
        if len(rows) < ROWS_PENDING:
            rows.append(row)
            self._hits_kept += saved


def clean(text: str, length: int) -> str:
    """Text that can be written: at most ``length`` characters, none of them half a surrogate pair."""
    return text[:length].encode("utf-8", "replace").decode()


def reports_of(rows: Iterable[Row]) -> list[tuple[object, ...]]:
    """Rows as they are written (`gateway.ledger.schema.ROW`)."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        used = tokens(row.usage)
        counts = (used.prompt, used.cached, used.output) if used is not None else (None, None, None)
        names = (row.tenant, clean(row.model, _LABEL), row.endpoint, row.upstream, row.outcome)
        times = (row.stream, row.status, row.latency, row.ttft)
        texts = (clean(row.reason, _LABEL), row.request_id, clean(row.prompt, _PROMPT), row.held_out, row.cost)
        lines.append((row.at + row.latency, *names, *times, *counts, *texts))
    return lines
