"""The ledger's open pages: counters in memory, by minute and group, until they are written away.

`Book.record` is on the path of every hit, so it does as little as can be done: one lookup, a dozen additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import floor

from gateway.ledger import counters as c
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

_BOUNDS = c.BOUNDS
_BY_OUTCOME = {outcome: outcome in SAVED for outcome in OUTCOMES}


@dataclass(slots=True)
class Pages:
    """What has been counted and not yet written: counters by minute (unix seconds of its begin) and group, how often
    each reason was given, and rows.
    """

    minutes: dict[int, dict[Group, c.Counters]] = field(default_factory=dict)
    reasons: dict[tuple[int, Group, str], int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.minutes or self.rows)

    @property
    def groups(self) -> int:
        """Counters held."""
        return sum(map(len, self.minutes.values()))


class Book:
    """Counts rows and calls. ``dropped``: requests whose counters had to be given up, since nothing could be written
    for too long.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._pages = Pages()
        self._open: dict[Group, c.Counters] = {}
        self._begin = self._end = 0.0
        self._hits_kept = 0
        self._models: set[str] = set()
        self._reasons: set[str] = set()
        self._prices: dict[str, Price | None] = {}
        self._table = PriceTable()
        self._slos: dict[str, Slo] = {}
        self._usages: dict[int, tuple[dict[str, int], str, Tokens | None, int | None]] = {}

    def apply(self, prices: PriceTable, slos: Mapping[str, Slo]) -> None:
        """Takes prices and service levels (by the model's name sent upstream) into use."""
        self._table, self._slos = prices, dict(slos)
        self._prices.clear()
        self._usages.clear()

    def record(self, row: Row) -> None:
        """Counts a request that has ended, in the minute in which it ended."""
        latency, ttft, saved = row.latency, row.ttft, _BY_OUTCOME[row.outcome]
        ended = row.at + latency
        if not self._begin <= ended < self._end:
            self._turn(ended)
        group = (row.tenant, row.model, row.endpoint, row.upstream, row.outcome, row.stream)
        count = self._open.get(group)
        if count is None:
            count = self._counters(group)
        count[c.REQUESTS] += 1
        count[c.LATENCY_US] += int(latency * 1e6 + 0.5)
        count[c.FIRST_LATENCY + bisect_left(_BOUNDS, latency)] += 1
        if ttft is not None:
            count[c.TTFT_US] += int(ttft * 1e6 + 0.5)
            count[c.FIRST_TTFT + bisect_left(_BOUNDS, ttft)] += 1
        used, cost = self._valued(row.usage, row.model)
        if used is not None:
            count[c.SERVED_PROMPT] += used.prompt
            count[c.SERVED_OUTPUT] += used.output
        elif row.status == 200 and row.outcome != "error":
            count[c.UNKNOWN_SERVED] += 1
        if saved:
            if cost is None:
                count[c.UNKNOWN_SAVED] += 1
            else:
                count[c.SAVED_PICO] += cost
        if self._slos:
            self._judge(row, used, count)
        if row.reason:
            key = (int(self._begin), self._known(group), self._reason(row.reason))
            self._pages.reasons[key] = self._pages.reasons.get(key, 0) + 1
        if not saved or self._hits_kept < HITS_KEPT:
            self._keep(row, saved)

    def spent(self, call: Call) -> None:
        """Counts an upstream call that has ended."""
        if not self._begin <= call.at < self._end:
            self._turn(call.at)
        count = self._counters((call.tenant, call.model, call.endpoint, call.upstream, call.outcome, call.stream))
        count[c.CALLS] += 1
        used, cost = self._valued(call.usage, call.model)
        if used is None:
            count[c.UNKNOWN_USAGE] += 1
        else:
            count[c.OUTPUT] += used.output
            count[c.CACHE_WRITE] += used.cache_write
            if used.cached is None:
                count[c.UNSPLIT] += used.prompt
            else:
                count[c.CACHED] += used.cached
                count[c.COMPUTED] += used.prompt - used.cached
        if cost is None:
            count[c.UNKNOWN_COST] += 1
        else:
            count[c.COST_PICO] += cost

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
                c.add(page.setdefault(group, c.counters()), more)
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
        self.dropped += sum(count[c.REQUESTS] for page in pages.minutes.values() for count in page.values())

    def _turn(self, moment: float) -> None:
        minute = floor(moment / MINUTE) * MINUTE
        self._begin, self._end = float(minute), float(minute + MINUTE)
        self._open = self._pages.minutes.setdefault(minute, {})

    def _counters(self, group: Group) -> c.Counters:
        known = self._known(group)
        count = self._open.get(known)
        if count is None:
            count = self._open[known] = c.counters()
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

    def _valued(self, usage: dict[str, int] | None, model: str) -> tuple[Tokens | None, int | None]:
        """Tokens and pico-dollars of a usage report. The same report comes again with every hit of an entry."""
        if not usage:
            return None, None
        seen = self._usages.get(id(usage))
        if seen is not None and seen[0] is usage and seen[1] == model:
            return seen[2], seen[3]
        if model not in self._prices:
            if len(self._prices) >= MODELS:
                self._prices.clear()
            self._prices[model] = self._table.price(model)
        used, price = tokens(usage), self._prices[model]
        cost = price.of(used) if used is not None and price is not None else None
        if len(self._usages) >= MODELS:
            self._usages.clear()
        self._usages[id(usage)] = (usage, model, used, cost)
        return used, cost

    def _judge(self, row: Row, used: Tokens | None, count: c.Counters) -> None:
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
        count[c.SLO_JUDGED] += 1
        if met:
            count[c.SLO_MET] += 1
            count[c.SLO_MET_TOKENS] += output or 0

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
        texts = (clean(row.reason, _LABEL), row.request_id, clean(row.prompt, _PROMPT))
        lines.append((row.at + row.latency, *names, *times, *counts, *texts))
    return lines
