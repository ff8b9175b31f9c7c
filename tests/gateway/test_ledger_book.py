"""Counting in memory: exact, in the minute in which it ended, within bounds whatever callers send."""

from __future__ import annotations

import pytest

from gateway.ledger import OUTCOMES, Call, Outcome, Row, labels
from gateway.ledger import book as book_module
from gateway.ledger import counters as c
from gateway.ledger.book import Book, Pages
from gateway.ledger.labels import OTHER
from policies.pricing import PriceTable, parse_prices
from policies.slo import Slo

NOON = 1_796_040_000.0
PRICES = parse_prices({"models": {"m1": {"input": 1, "cached_input": 0.5, "output": 2}}})


def row(outcome: Outcome = "miss", **more: object) -> Row:
    made = Row(at=NOON, tenant="t", model="m1", endpoint="/v1/chat/completions", outcome=outcome, status=200)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def call(usage: dict[str, int] | None, **more: object) -> Call:
    made = Call(NOON, "t", "m1", "/v1/chat/completions", "u", "miss", False, usage)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def book(prices: PriceTable = PRICES, **slos: Slo) -> Book:
    made = Book()
    made.apply(prices, slos)
    return made


def added(pages: Pages) -> c.Counters:
    total = c.counters()
    for groups in pages.minutes.values():
        for count in groups.values():
            c.add(total, count)
    return total


def test_each_outcome_is_a_group_of_its_own_and_they_sum_to_the_requests() -> None:
    counted = book()
    for outcome in OUTCOMES:
        counted.record(row(outcome))
    counted.record(row("exact", stream=True))
    pages = counted.tear_off()
    groups = pages.minutes[int(NOON)]
    assert len(groups) == len(OUTCOMES) + 1
    assert added(pages)[c.REQUESTS] == len(OUTCOMES) + 1


def test_the_minute_is_the_one_in_which_the_request_ended() -> None:
    counted = book()
    counted.record(row(at=NOON + 59.5, latency=0.4))
    counted.record(row(at=NOON + 59.5, latency=0.5))
    counted.record(row(at=NOON - 0.001))
    assert sorted(counted.tear_off().minutes) == [NOON - 60, NOON, NOON + 60]


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    counted = book()
    for at in (NOON, NOON - 3600, NOON + 1, NOON - 3600):
        counted.record(row(at=at))
    minutes = counted.tear_off().minutes
    assert {minute: added(Pages({minute: groups}))[c.REQUESTS] for minute, groups in minutes.items()} == {
        NOON: 2,
        NOON - 3600: 2,
    }


def test_tokens_and_money_of_a_hit_are_saved_and_of_a_call_are_spent() -> None:
    counted = book()
    usage = {"prompt": 100, "output": 10, "cached": 40}
    counted.spent(call(usage))
    counted.record(row("miss", usage=usage))
    for _ in range(3):
        counted.record(row("exact", usage=usage))
    total = added(counted.tear_off())
    price = (60 * 2 + 40 * 1 + 10 * 4) * 10**6 // 2
    assert (total[c.CALLS], total[c.CACHED], total[c.COMPUTED], total[c.OUTPUT]) == (1, 40, 60, 10)
    assert (total[c.SERVED_PROMPT], total[c.SERVED_OUTPUT]) == (400, 40)
    assert (total[c.COST_PICO], total[c.SAVED_PICO]) == (price, 3 * price)
    assert (total[c.UNKNOWN_COST], total[c.UNKNOWN_SAVED], total[c.UNKNOWN_USAGE]) == (0, 0, 0)


def test_unknown_is_counted_and_not_taken_for_zero() -> None:
    counted = book()
    counted.spent(call(None))
    counted.spent(call({"prompt": 5, "output": 5}))  # cached or not, it does not say, and the price depends on it
    counted.spent(call({"prompt": 5, "output": 5, "cached": 0}, model="unpriced"))
    counted.spent(call({"prompt": 10**15, "output": 5}))
    counted.record(row("faq"))
    counted.record(row("error", status=502))
    total = added(counted.tear_off())
    assert (total[c.CALLS], total[c.UNKNOWN_USAGE], total[c.UNSPLIT], total[c.COMPUTED]) == (4, 2, 5, 5)
    assert (total[c.UNKNOWN_COST], total[c.COST_PICO]) == (4, 0)
    assert (total[c.UNKNOWN_SAVED], total[c.UNKNOWN_SERVED]) == (1, 1)


def test_latency_and_ttft_have_exact_histograms() -> None:
    counted = book()
    for latency, ttft in ((0.0001, 0.0001), (0.0002, None), (0.7, 0.03), (1000.0, 2.5)):
        counted.record(row(latency=latency, ttft=ttft, stream=True))
    total = added(counted.tear_off())
    latencies, ttfts = total[c.FIRST_LATENCY : c.FIRST_TTFT], total[c.FIRST_TTFT :]
    upper = [*c.BOUNDS, float("inf")]
    assert {upper[i]: n for i, n in enumerate(latencies) if n} == {0.0001: 1, 0.00025: 1, 1.0: 1, float("inf"): 1}
    assert {upper[i]: n for i, n in enumerate(ttfts) if n} == {0.0001: 1, 0.05: 1, 2.5: 1}
    assert (total[c.LATENCY_US], total[c.TTFT_US]) == (1_000_700_300, 2_530_100)


@pytest.mark.parametrize(
    ("share", "counts", "seconds"),
    [
        (0.5, {1.0: 100}, 0.75),
        (0.95, {0.1: 95, 10.0: 5}, 0.1),
        (0.96, {0.1: 95, 10.0: 5}, 6.0),
        (0.5, {float("inf"): 1}, c.BOUNDS[-1]),
        (0.5, {}, None),
    ],
)
def test_quantiles_are_interpolated_within_a_bucket(
    share: float, counts: dict[float, int], seconds: float | None
) -> None:
    buckets = [counts.get(bound, 0) for bound in [*c.BOUNDS, float("inf")]]
    assert c.quantile(share, buckets) == (None if seconds is None else pytest.approx(seconds))


def test_goodput_counts_what_came_in_time() -> None:
    counted = book(m1=Slo(ttft=0.5, total=2))
    usage = {"prompt": 1, "output": 7, "cached": 0}
    counted.record(row(stream=True, ttft=0.4, latency=1.0, usage=usage))
    counted.record(row(stream=True, ttft=0.6, latency=1.0, usage=usage))
    counted.record(row("error", status=502, latency=0.1))  # ours to answer, and not answered
    counted.record(row("error", status=429, latency=0.1))  # the caller's own doing
    counted.record(row("error", status=499, latency=0.1))
    counted.record(row(model="no-slo", latency=9.0))
    total = added(counted.tear_off())
    assert (total[c.SLO_JUDGED], total[c.SLO_MET], total[c.SLO_MET_TOKENS]) == (3, 1, 7)


def test_reasons_are_counted_without_their_particulars() -> None:
    counted = book()
    for reason in ("connect: refused 10.0.0.1", "connect: refused 10.0.0.2", "temperature", ""):
        counted.record(row("error", reason=reason))
    pages = counted.tear_off()
    assert {key[2]: times for key, times in pages.reasons.items()} == {"connect": 2, "temperature": 1}


@pytest.mark.parametrize("slos", [{}, {"m1": Slo(total=0.5)}])
@pytest.mark.parametrize("usage", [{"prompt": 9, "output": 4, "cached": 2}, {"prompt": 9, "output": 4}, None])
def test_hits_by_tally_are_counted_as_rows_are(usage: dict[str, int] | None, slos: dict[str, Slo]) -> None:
    by_row, by_tally = book(PRICES, **slos), book(PRICES, **slos)
    tally = by_tally.tally(row("exact", usage=usage))
    for number, latency in enumerate((0.00002, 0.0003, 0.7, 1000.0) * 20):
        at = NOON + 2 * number
        by_row.record(row("exact", at=at, latency=latency, ttft=latency, usage=usage))
        by_tally.hit(tally, at + latency, latency, "id")
    one, other = by_row.tear_off(), by_tally.tear_off()
    assert one.minutes == other.minutes
    assert len(one.rows) == len(other.rows)
    assert {kept.request_id for kept in other.rows} == {"id"}
    assert [kept.cost for kept in one.rows] == [kept.cost for kept in other.rows]
    by_tally.hit(tally, NOON, 0.1, "id")
    assert added(by_tally.tear_off())[c.REQUESTS] == 1


def test_made_up_models_are_counted_together_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MODELS", 3)
    counted = book()
    for number in range(10):
        counted.record(row(model=f"made-up-{number}"))
    groups = counted.tear_off().minutes[int(NOON)]
    assert len(groups) == 4
    assert {group[1]: count[c.REQUESTS] for group, count in groups.items()}[OTHER] == 7


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a\x00b", "\ud83d", "x" * 10_000, "'; DROP TABLE rows"])
def test_hostile_names_are_kept_as_text_that_can_be_written(name: str) -> None:
    counted = book()
    counted.record(row(model=name, reason=name))
    (group,) = counted.tear_off().minutes[int(NOON)]
    group[1].encode()
    assert len(group[1]) <= 200


def test_rows_of_hits_are_a_sample_and_of_all_others_are_kept() -> None:
    counted = book()
    for _ in range(100):
        counted.record(row("exact"))
        counted.record(row("miss"))
    kept = [kept.outcome for kept in counted.tear_off().rows]
    assert kept.count("miss") == 100
    assert 0 < kept.count("exact") < 100


def test_what_could_not_be_written_is_taken_back_and_nothing_is_counted_twice() -> None:
    counted = book()
    counted.record(row("error", reason="x"))
    pages = counted.tear_off()
    counted.record(row("error", reason="x"))
    counted.record(row(at=NOON + 60))
    counted.put_back(pages)
    counted.record(row("error", reason="x"))
    whole = counted.tear_off()
    assert added(whole)[c.REQUESTS] == 4
    assert sum(whole.reasons.values()) == 3
    assert len(whole.rows) == 4
    assert not counted.tear_off()


def test_what_waits_is_bounded_the_oldest_minutes_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "GROUPS_PENDING", 3)
    monkeypatch.setattr(book_module, "ROWS_PENDING", 4)
    counted = book()
    for minute in range(10):
        counted.record(row("error", at=NOON + 60 * minute, reason="x"))
        counted.put_back(counted.tear_off())
    whole = counted.tear_off()
    assert sorted(whole.minutes) == [NOON + 60 * minute for minute in (7, 8, 9)]
    assert counted.dropped == 7
    assert len(whole.rows) == 4
    assert len(whole.reasons) == 3
