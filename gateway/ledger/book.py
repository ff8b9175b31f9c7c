"""The ledger's open pages: counters in memory, by minute and group, until they are written away."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import floor

from gateway.ledger import counters as c
from gateway.ledger.labels import NAME, PROMPT, Labels, clean
from gateway.ledger.rows import SAVED, Call, Row
from gateway.ledger.schema import MINUTE
from gateway.ledger.tally import Tally
from gateway.ledger.worth import Worth
from policies.pricing import PriceTable, tokens
from policies.slo import Slo

Group = tuple[str, str, str, str, str, bool]
"""Tenant, model, endpoint, upstream, outcome, stream."""

HITS_KEPT, OTHERS_KEPT = 20, 500
"""Rows of hits, and of all others, that are kept each second for a look."""
ROWS_PENDING = 20_000
"""Rows that wait to be written at most, the newest ones."""
GROUPS_PENDING = 20_000
"""Counters of groups that wait to be written at most; of older minutes nothing is kept beyond that."""


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
    """Counts rows, hits and calls. ``dropped``: requests whose counters had to be given up, since nothing could be
    written for too long. ``kept`` is told of each row that is kept for a look.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.kept: Callable[[Row], None] | None = None
        self._labels = Labels()
        self._worth = Worth(PriceTable(), {})
        self._pages = Pages()
        self._open: dict[Group, c.Counters] = {}
        self._begin = self._end = 0.0
        self._tallies: list[Tally] = []  # with hits of this minute
        self._hits_kept = self._others_kept = 0

    def apply(self, prices: PriceTable, slos: Mapping[str, Slo]) -> None:
        """Takes prices and service levels (by the model's name sent upstream) into use."""
        self._worth = Worth(prices, slos)

    def record(self, row: Row) -> None:
        """Counts a request that has ended, in the minute in which it ended."""
        self._turn_to(row.at + row.latency)
        group = self._group(row)
        count = self._counters(group)
        saved = row.outcome in SAVED
        used, row.cost = self._worth.of(row.usage, row.model)
        count[c.REQUESTS] += 1
        _time(count, c.LATENCY_US, c.FIRST_LATENCY, row.latency)
        if row.ttft is not None:
            _time(count, c.TTFT_US, c.FIRST_TTFT, row.ttft)
        if used is not None:
            count[c.SERVED_PROMPT] += used.prompt
            count[c.SERVED_OUTPUT] += used.output
        elif row.status == 200 and row.outcome != "error":
            count[c.UNKNOWN_SERVED] += 1
        if saved:
            _add_or_note(count, row.cost, c.SAVED_PICO, c.UNKNOWN_SAVED)
        if row.held_out:
            count[c.HELD_OUT] += 1
            count[c.HELD_OUT_JUDGED] += row.held_out != "unjudged"
            count[c.HELD_OUT_AGREED] += row.held_out == "agrees"
        output = used.output if used is not None else None
        met = self._worth.in_time(row, output)
        if met is not None:
            count[c.SLO_JUDGED] += 1
            count[c.SLO_MET] += met
            count[c.SLO_MET_TOKENS] += (output or 0) * met
        if row.reason:
            key = (int(self._begin), group, self._labels.reason(row.reason))
            self._pages.reasons[key] = self._pages.reasons.get(key, 0) + 1
        if not saved:
            self._keep_other(row)
        elif self._hits_kept < HITS_KEPT:
            self._hits_kept += 1
            self._keep(row)

    def tally(self, row: Row) -> Tally:
        """A counter for hits of one answer, which all look like ``row``."""
        used, row.cost = self._worth.of(row.usage, row.model)
        return Tally(row, used, self._worth.slo(row.model))

    def hit(self, tally: Tally, at: float, latency: float, request_id: str) -> None:
        """Counts one hit. This is on the path of every one, so it does as little as can be done."""
        if not self._begin <= at < self._end:
            self._turn_to(at)
        if not tally.hits:
            self._tallies.append(tally)
        tally.hit(latency)
        if self._hits_kept < HITS_KEPT:
            self._hits_kept += 1
            self._keep(replace(tally.row, at=at, latency=latency, ttft=latency, request_id=request_id))

    def spent(self, call: Call) -> int | None:
        """Counts an upstream call that has ended; what it cost in pico-dollars, None where unknown."""
        self._turn_to(call.at)
        count = self._counters(self._group(call))
        used, cost = self._worth.of(call.usage, call.model)
        count[c.CALLS] += 1
        _add_or_note(count, cost, c.COST_PICO, c.UNKNOWN_COST)
        if used is None:
            count[c.UNKNOWN_USAGE] += 1
            return cost
        count[c.OUTPUT] += used.output
        count[c.CACHE_WRITE] += used.cache_write
        if used.cached is None:
            count[c.UNSPLIT] += used.prompt
        else:
            count[c.CACHED] += used.cached
            count[c.COMPUTED] += used.prompt - used.cached
        return cost

    def tear_off(self) -> Pages:
        """All that has been counted since the last time; it is the caller's now."""
        self._close_page()
        pages, self._pages = self._pages, Pages()
        self._hits_kept = self._others_kept = 0
        return pages

    def put_back(self, pages: Pages) -> None:
        """Takes pages back that could not be written; within bounds, the newest first."""
        self._close_page()
        later, self._pages = self._pages, pages
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

    def _turn_to(self, moment: float) -> None:
        """Opens the page of a minute; a clock that is set back opens an old one again."""
        if self._begin <= moment < self._end:
            return
        self._close_page()
        minute = floor(moment / MINUTE) * MINUTE
        self._begin, self._end = float(minute), float(minute + MINUTE)
        self._open = self._pages.minutes.setdefault(minute, {})

    def _close_page(self) -> None:
        for tally in self._tallies:
            tally.add_to(self._counters(self._group(tally.row)))
        self._tallies.clear()
        self._open = {}
        self._begin = self._end = 0.0

    def _group(self, counted: Row | Call) -> Group:
        model = self._labels.model(counted.model)
        return counted.tenant, model, counted.endpoint, counted.upstream, counted.outcome, counted.stream

    def _counters(self, group: Group) -> c.Counters:
        count = self._open.get(group)
        if count is None:
            count = self._open[group] = c.counters()
        return count

    def _keep_other(self, row: Row) -> None:
        if self._others_kept < OTHERS_KEPT:
            self._others_kept += 1
            self._keep(row)
        elif self.kept is not None:
            self.kept(row)

    def _keep(self, row: Row) -> None:
        if self.kept is not None:
            self.kept(row)
        if len(self._pages.rows) < ROWS_PENDING:
            self._pages.rows.append(row)


def reports_of(rows: Iterable[Row]) -> list[tuple[object, ...]]:
    """Rows as they are written (`gateway.ledger.schema.ROW`)."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        used = tokens(row.usage)
        counts = (used.prompt, used.cached, used.output) if used is not None else (None, None, None)
        names = (row.tenant, clean(row.model, NAME), row.endpoint, row.upstream, row.outcome)
        times = (row.stream, row.status, row.latency, row.ttft)
        texts = (clean(row.reason, NAME), row.request_id, clean(row.prompt, PROMPT), row.held_out, row.cost)
        lines.append((row.at + row.latency, *names, *times, *counts, *texts))
    return lines


def _time(count: c.Counters, total: int, first: int, seconds: float) -> None:
    count[total] += int(seconds * 1e6 + 0.5)
    count[first + bisect_left(c.BOUNDS, seconds)] += 1


def _add_or_note(count: c.Counters, value: int | None, total: int, unknown: int) -> None:
    if value is None:
        count[unknown] += 1
    else:
        count[total] += value
