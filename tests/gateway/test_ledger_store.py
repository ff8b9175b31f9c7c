"""The ledger's file: one for all workers, bounded, and never a reason for a request to fail."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.ledger import Ledger, LedgerClosed, Row, query
from gateway.ledger import counters as c
from gateway.ledger import store as store_module
from gateway.ledger.book import Book, Pages
from gateway.ledger.ledger import HOLD_OFF, JUMP
from gateway.ledger.query import Scope
from gateway.ledger.store import Store, size
from tests.harness import FakeClock

NOON = 1_796_040_000.0
HOUR = 3600


def row(at: float = NOON, tenant: str = "t", **more: object) -> Row:
    made = Row(at=at, tenant=tenant, model="m1", endpoint="/v1/chat/completions", outcome="miss", status=200)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def pages(*rows: Row) -> Pages:
    book = Book()
    for item in rows:
        book.record(item)
    return book.tear_off()


def requests(store: Store, scope: Scope | None = None) -> int:
    sums = store.read(lambda connection: query.sums(connection, scope or Scope()))
    return sums[0].counts[c.REQUESTS] if sums else 0


@asynccontextmanager
async def ledger(path: Path | None, clock: FakeClock | None = None, **settings: Any) -> AsyncIterator[Ledger]:
    made = Ledger(config.Ledger(path=path, **settings) if path else None, clock or FakeClock())
    try:
        yield made
    finally:
        await made.close()


async def count(book: Ledger) -> int:
    sums = await book.read(lambda connection: query.sums(connection, Scope()))
    return sums[0].counts[c.REQUESTS] if sums else 0


def set_aside(folder: Path) -> list[Path]:
    return [file for file in folder.glob("ledger.db.aside-*") if file.suffix.rpartition("-")[2].isdigit()]


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    Path(f"{path}-wal").write_bytes(b"")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def test_sums_over_minutes_and_hours_are_exact_at_every_edge(tmp_path: Path) -> None:
    store = Store(tmp_path / "ledger.db")
    minutes = [NOON + 60 * number for number in range(-90, 90, 7)]
    store.add(pages(*map(row, minutes)), "w", NOON, "{}")
    for since in range(int(NOON) - 2 * HOUR, int(NOON) + 2 * HOUR, 1260):
        for until in range(since, int(NOON) + 2 * HOUR, 2340):
            expected = sum(since // 60 * 60 <= at < -(-until // 60) * 60 for at in minutes)
            assert requests(store, Scope(since, until)) == expected
    assert requests(store) == len(minutes)
    steps = store.read(lambda connection: query.sums(connection, Scope(), step=HOUR))
    assert [(line.at, line.counts[c.REQUESTS]) for line in steps] == [
        (at, sum(at <= minute < at + HOUR for minute in minutes))
        for at in range(int(NOON) - 2 * HOUR, int(NOON) + 2 * HOUR, HOUR)
    ]
    store.close()


def test_every_counter_survives_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "ledger.db")
    group = ("t", "m1", "/v1", "u", "exact", True)
    counters = [(index + 1) * 10**11 for index in range(len(c.COLUMNS))]
    for _ in range(3):
        store.add(Pages({int(NOON): {group: list(counters)}}), "w", NOON, "{}")
    (line,) = store.read(lambda connection: query.sums(connection, Scope(), ("tenant", "outcome", "stream")))
    (total,) = store.read(query.totals)
    assert line.key == ("t", "exact", 1)
    assert line.counts == total.counts == [3 * count for count in counters]
    store.close()


def test_sums_of_money_beyond_64_bits_stay_exact(tmp_path: Path) -> None:
    store = Store(tmp_path / "ledger.db")
    for minute in range(4):
        counters = c.counters()
        counters[c.COST_PICO] = 2**62 + 1
        store.add(Pages({int(NOON) + 60 * minute: {("t", "m", "e", "u", "miss", False): counters}}), "w", NOON, "{}")
    (line,) = store.read(lambda connection: query.sums(connection, Scope(0, int(NOON) + 240)))
    assert line.counts[c.COST_PICO] == 4 * (2**62 + 1)
    store.close()


def _worker(path: Path, number: int) -> None:
    store = Store(path)
    for turn in range(20):
        for _ in range(100):
            try:
                store.add(pages(*(row(NOON + 60 * turn, f"t{number}") for _ in range(5))), f"w{number}", NOON, "{}")
                break
            except sqlite3.OperationalError:  # busy for two seconds: as the ledger does, once more
                continue
    store.close()


def test_workers_add_to_one_file_and_all_see_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "ledger.db"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_worker, args=(path, number)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    store = Store(path)
    store.add(Pages(), "me", NOON, "{}")
    assert requests(store) == 2 * 20 * 5
    assert requests(store, Scope(where={"tenant": "t0"})) == 20 * 5
    assert len(store.read(lambda connection: query.vitals(connection, NOON))) == 3
    assert path.stat().st_mode & 0o077 == 0  # it names tenants
    store.close()


@pytest.mark.parametrize("damage", [b"not a database at all, but text" * 400, None])
async def test_a_corrupt_file_is_set_aside_and_a_new_one_begun(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "ledger.db"
    if damage is None:  # a real one, with its pages overwritten
        store = Store(path)
        store.add(pages(*(row(NOON + 60 * n, f"t{n}") for n in range(500))), "w", NOON, "{}")
        store.close()
        content = bytearray(path.read_bytes())
        content[100:8000] = b"\xff" * 7900
        path.write_bytes(content)
    else:
        path.write_bytes(damage)
    async with ledger(path) as book:
        book.record(row())
        await book.flush()
        await book.flush()
        assert book.problem == ""
        assert await count(book) == 1
    assert set_aside(tmp_path)


async def test_a_file_of_another_version_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    async with ledger(path) as book:
        book.record(row())
        assert await count(book) == 1
    assert len(set_aside(tmp_path)) == 1


async def test_a_file_that_turns_corrupt_while_in_use_costs_no_later_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with ledger(path) as book, ledger(path) as other:
        book.record(row())
        await book.flush()
        await other.flush()
        overwrite(path)
        for number in range(3):
            book.record(row(NOON + number))
            other.record(row(NOON + number))
            await book.flush()
            await other.flush()
        assert book.problem == other.problem == ""
        assert await count(book) == await count(other) == 6
    assert len(set_aside(tmp_path)) == 1


async def test_damage_that_only_a_question_meets_is_found_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with ledger(path) as book:
        for number in range(3000):
            book.record(row(NOON, f"t{number}", reason="z" * 70))
        await book.flush()
        await book.prune()
        await book.read(lambda connection: query.names(connection, "tenant", {}))
        store = book._store
        assert store._writer is not None
        root = store._writer.execute("SELECT rootpage FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
        store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.close()
        with path.open("r+b") as file:
            file.seek((root - 1) * 4096)
            file.write(b"\xff" * 4096)
        with pytest.raises(LedgerClosed):
            await count(book)
        book.record(row())
        assert await count(book) == 1
    assert len(set_aside(tmp_path)) == 1


async def test_a_file_removed_under_us_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with ledger(path) as book:
        book.record(row())
        await book.flush()
        empty(tmp_path)
        book.record(row())
        assert await count(book) == 1


async def test_a_full_disk_stops_the_ledger_and_loses_no_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with ledger(path) as book:
        book.record(row())
        await book.flush()
        writer = book._store._writer
        assert writer is not None
        pages_now = writer.execute("PRAGMA page_count").fetchone()[0]
        writer.execute(f"PRAGMA max_page_count = {pages_now}")
        for number in range(200):
            book.record(row(NOON + 60 * number, f"tenant-{number}"))
        await book.flush()
        assert book.problem == "database or disk is full"
        book.record(row())
        writer.execute("PRAGMA max_page_count = 1000000")
        assert await count(book) == 202
        assert book.problem == ""
        assert book.dropped == 0


async def test_a_folder_that_cannot_be_made_stops_the_ledger_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with ledger(tmp_path / "file" / "ledger.db") as book:
        book.record(row())
        await book.flush()
        assert book.problem
        with pytest.raises(LedgerClosed):
            await count(book)
        (tmp_path / "file").unlink()
        assert await count(book) == 1


async def test_without_a_file_the_ledger_counts_in_memory() -> None:
    async with ledger(None) as book:
        for number in range(3):
            book.record(row(NOON + number))
        assert await count(book) == 3
        assert not book.shared


async def test_what_is_counted_while_a_write_is_cancelled_is_written_once(tmp_path: Path) -> None:
    async with ledger(tmp_path / "ledger.db") as book:
        for _ in range(20):
            book.record(row())
            flush = asyncio.create_task(book.flush())
            await asyncio.sleep(0)
            flush.cancel()
        assert await count(book) == 20


async def test_what_is_older_than_keep_is_forgotten(tmp_path: Path) -> None:
    clock = FakeClock()
    async with ledger(tmp_path / "ledger.db", clock, keep=86_400.0) as book:
        now = clock.time()
        for age in (0, HOUR, 23 * HOUR, 26 * HOUR, 400 * HOUR):
            book.record(row(now - age, reason="x"))
        assert await count(book) == 5
        clock.advance(HOLD_OFF)
        await book.flush()
        await book.prune()
        assert await count(book) == 3
        kept = await book.read(lambda connection: query.rows(connection, Scope(), 10))
        assert len(kept) == 3
        assert sum(line["count"] for line in await book.read(lambda db: query.reasons(db, Scope()))) == 3
        (total,) = await book.read(query.totals)  # what Prometheus reads never goes down
        assert total.counts[c.REQUESTS] == 5


async def test_a_jump_of_the_clock_forgets_nothing(tmp_path: Path) -> None:
    clock = FakeClock()
    async with ledger(tmp_path / "ledger.db", clock, keep=86_400.0) as book:
        book.record(row(clock.time()))
        clock.advance(HOLD_OFF)
        clock._time += 10 * 365 * 86_400  # a bad time server
        await book.flush()
        await book.prune()
        clock.advance(120)
        clock._time -= 10 * 365 * 86_400  # set right again
        await book.prune()
        clock.advance(JUMP + HOLD_OFF)
        await book.prune()
        assert await count(book) == 1


async def test_the_file_stays_within_its_bound_the_oldest_goes_first(tmp_path: Path) -> None:
    clock = FakeClock()
    most = 400 << 10
    async with ledger(tmp_path / "ledger.db", clock, max_bytes=most) as book:
        now = clock.time()
        for day in range(20, 0, -1):
            for minute in range(60):
                for tenant in range(4):
                    book.record(row(now - day * 86_400 + 60 * minute, f"t{tenant}", reason="y" * 60))
        before = await count(book)
        clock.advance(60)
        await book.prune()
        used = await book.read(size)
        assert used <= most
        sums = await book.read(lambda connection: query.sums(connection, Scope(), step=86_400))
        assert 0 < sum(line.counts[c.REQUESTS] for line in sums) < before
        assert sums[-1].at == int(now - 86_400) // 86_400 * 86_400 or sums[-1].at > now - 2 * 86_400


def test_rows_are_bounded_and_hits_make_way_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ROWS_KEPT", 50)
    monkeypatch.setattr(store_module, "HITS_KEPT", 5)
    store = Store(tmp_path / "ledger.db")
    for number in range(40):
        store.add(pages(row(NOON + number, outcome="exact"), row(NOON + number)), "w", NOON, "{}")
    store.prune(0.0, 1 << 30, NOON)
    kept = store.read(lambda connection: query.rows(connection, Scope(), 1000))
    assert [line["outcome"] for line in kept].count("exact") == 5
    assert 20 <= [line["outcome"] for line in kept].count("miss") <= 50
    assert kept[0]["ended"] == NOON + 39
    store.close()


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a\x00b", "\ud83d\ude00", "'; DROP TABLE groups; --"])
async def test_hostile_names_are_written_and_found_again(tmp_path: Path, name: str) -> None:
    async with ledger(tmp_path / "ledger.db") as book:
        book.record(row(model=name, reason=name, prompt=name, request_id="r"))
        (line,) = await book.read(lambda connection: query.rows(connection, Scope(), 10))
        where = {"model": line["model"]}
        sums = await book.read(lambda connection: query.sums(connection, Scope(where=where)))
        assert sums[0].counts[c.REQUESTS] == 1
        assert book.problem == ""
