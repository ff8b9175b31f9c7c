"""Listening to KV events: to the embedded engine's publisher, and to one that loses, repeats, restarts and dies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from cache.prefix.blocks import chain as engine_chain
from engine.events import KVEvents
from gateway.upstreams.kv_blocks import Changes, block_chain, block_root
from gateway.upstreams.kv_events import KvListener, Source
from tests.gateway.upstreams.test_kv_blocks import pack, stored

CHAIN = block_chain(range(1000), 4, block_root([]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ear:
    """A listener to one source, and what is held by all that it delivered."""

    def __init__(self, **source: Any) -> None:
        self.held: set[int] = set()
        self.clears = 0
        given = {"bind": None, "connect": None, "replay": None, "max_blocks": 1000, "patience": 0.4, **source}
        self.listener = KvListener([Source("u", **given)], self._deliver)
        self.listener.start()

    def _deliver(self, name: str, changes: Changes) -> None:
        if changes.cleared:
            self.held.clear()
            self.clears += 1
        for _, names, added in changes.steps:
            (self.held.update if added else self.held.difference_update)(names)

    def count(self, what: str) -> int:
        return self.listener.counts()["u"].get(what, 0)

    def until(self, true: Callable[[], bool], timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline, (self.listener.counts(), len(self.held))
            time.sleep(0.005)

    def until_held(self, blocks: int) -> None:
        self.until(lambda: self.held == set(CHAIN[:blocks]))


class Publisher:
    """A publisher made by hand: it sends what it is told, under the number it is told, and replays what it kept, as
    vLLM does or (``old``) as it once did.
    """

    def __init__(self, endpoint: str, replay: str | None = None, *, epoch: float = 1.0, old: bool = False) -> None:
        self.kept: dict[int, bytes] = {}
        self._old = old
        self.deaf = False
        self.endless = False  # a replay repeats the first batch for ever
        self._epoch = epoch
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._live.set(zmq.LINGER, 0)
        self._live.connect(endpoint)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(replay,)) if replay else None
        if self._thread:
            self._thread.start()

    def payload(self, number: int, *events: Any) -> bytes:
        return pack({"ts": self._epoch + number, "events": list(events)})

    def send(self, number: int, *events: Any, keep: bool = True, lost: bool = False) -> None:
        payload = self.payload(number, *events)
        if keep:
            self.kept[number] = payload
        if not lost:
            self.raw(b"kv-events", number.to_bytes(8, "big"), payload)

    def raw(self, *parts: bytes) -> None:
        self._live.send_multipart(parts)

    def close(self) -> None:
        self._ending.set()
        if self._thread:
            self._thread.join()
        self._live.close()
        self._context.destroy(linger=0)

    def _serve(self, endpoint: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        router.bind(endpoint)
        while not self._ending.is_set():
            if router.poll(20):
                client, _, first = router.recv_multipart()
                if self.deaf:
                    continue
                while self.endless and not self._ending.is_set():
                    router.send_multipart([client, b"", b"kv-events", bytes(8), self.kept[0]])
                for number, payload in sorted(self.kept.items()):
                    if number >= int.from_bytes(first, "big", signed=True):
                        topic = [] if self._old else [b"kv-events"]
                        router.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
                topic = [] if self._old else [b""]
                router.send_multipart([client, b"", *topic, (-1).to_bytes(8, "big", signed=True), b""])
        router.close()


@contextmanager
def scene(*, replay: bool = True, silence: float = 60.0) -> Iterator[tuple[Ear, Callable[..., Publisher]]]:
    """An ear that binds, and a way to start publishers that connect to it."""
    live, again = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    ear = Ear(bind=live, replay=again if replay else None, silence=silence)
    open_: list[Publisher] = []

    def start(**more: Any) -> Publisher:
        open_.append(Publisher(live, again if replay else None, **more))
        time.sleep(0.1)  # ZMQ tells nobody when a subscriber has arrived
        return open_[-1]

    try:
        yield ear, start
    finally:
        for one in open_:
            one.close()
        ear.listener.stop()


def block(n: int) -> dict[str, Any]:
    return stored(n, 1, parent=100 + n - 1 if n else None)


def test_the_embedded_engine_is_understood():
    live, again = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    ear = Ear(bind=live, replay=again)
    events = KVEvents(live, again, block_size=4)
    try:
        blocks = engine_chain(list(range(40)), 4)
        salted = engine_chain(list(range(8)), 4, salt=b"tenant")
        for one in (*blocks, *salted):
            events.stored(one)
        events.flush()
        events.removed(blocks[-1])
        events.flush()
        want = {*CHAIN[:9], *block_chain(range(9), 4, block_root(["tenant"]))}
        ear.until(lambda: ear.held == want)  # also if the first messages were lost before the connection stood
        events.cleared()
        events.flush()
        ear.until(lambda: not ear.held)
    finally:
        events.close()
        ear.listener.stop()


@pytest.mark.parametrize("old", [False, True])
def test_a_listener_that_comes_late_learns_what_came_before(old: bool):
    with scene() as (ear, start):
        publisher = start(old=old)
        for n in range(5):
            publisher.send(n, block(n), lost=True)
        publisher.send(5, block(5))
        ear.until_held(6)
        assert not ear.count("malformed messages")


def test_without_replay_it_begins_with_what_comes():
    with scene(replay=False) as (ear, start):
        start().send(7, stored(0, 2))
        ear.until_held(2)


def test_a_lost_message_is_seen_and_fetched():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.send(1, block(1), lost=True)
        publisher.send(2, block(2))
        ear.until_held(3)
        assert ear.count("gaps") == 1


def test_a_lost_message_without_replay_ends_the_credit():
    with scene(replay=False) as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.send(2, stored(0, 1, lora_name="x"))
        ear.until(lambda: ear.count("losses") == 1 and len(ear.held) == 1)
        assert CHAIN[0] not in ear.held


def test_two_out_of_order_and_one_twice_change_nothing():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.kept[1] = publisher.payload(1, block(1))
        publisher.send(2, block(2))
        publisher.send(1, block(1))
        publisher.send(2, block(2))
        ear.until(lambda: ear.count("duplicates") == 2)
        ear.until_held(3)
        assert ear.clears == 0


def test_a_restart_ends_the_credit():
    with scene() as (ear, start):
        first = start()
        for n in range(4):
            first.send(n, block(n))
        ear.until_held(4)
        first.close()
        start(epoch=1000.0).send(0, stored(0, 2))
        ear.until_held(2)
        assert ear.count("restarts") == 1


def test_a_restart_that_nobody_announced_is_found_out_by_asking():
    with scene(silence=0.2) as (ear, start):
        first = start()
        for n in range(4):
            first.send(n, block(n))
        ear.until_held(4)
        first.close()
        second = start(epoch=1000.0)
        second.kept[0] = second.payload(0, block(0))
        ear.until_held(1)


def test_silence_of_a_living_engine_costs_nothing():
    with scene(silence=0.1) as (ear, start):
        publisher = start()
        for n in range(3):
            publisher.send(n, block(n))
        ear.until_held(3)
        time.sleep(0.6)
        assert (ear.held, ear.clears) == (set(CHAIN[:3]), 0)


def test_a_message_lost_at_the_end_is_found_by_asking():
    with scene(silence=0.1) as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.send(1, block(1), lost=True)
        ear.until_held(2)


def test_a_dead_engine_loses_its_credit():
    with scene(silence=0.2) as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.close()
        ear.until(lambda: not ear.held)
        assert ear.count("silences") == 1


def test_an_engine_that_never_replays_is_taken_as_it_comes():
    with scene() as (ear, start):
        publisher = start()
        publisher.deaf = True
        publisher.send(5, block(0))
        ear.until(lambda: ear.count("replays failed") == 1)
        publisher.send(6, block(0))
        publisher.send(7, block(1))
        ear.until_held(2)


def test_history_that_is_no_longer_kept_is_done_without():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.kept.clear()
        publisher.send(5, stored(0, 1, lora_name="x"))
        ear.until(lambda: len(ear.held) == 1 and CHAIN[0] not in ear.held)


def test_a_replay_that_does_not_bring_what_was_missed_ends_the_credit():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.send(5, block(1), keep=False)
        ear.until(lambda: not ear.held)
        publisher.send(6, stored(0, 2), keep=False)
        ear.until_held(2)
        assert ear.count("losses") == 1


def test_an_engine_that_keeps_nothing_to_replay_is_taken_as_it_comes():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(5, block(0), keep=False)
        ear.until(lambda: ear.count("replays") == 1)
        publisher.send(6, block(0), keep=False)
        publisher.send(7, block(1), keep=False)
        ear.until_held(2)


def test_a_replay_that_never_ends_is_given_up():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.endless = True
        publisher.send(2, block(2))
        ear.until(lambda: ear.count("replays failed") == 1 and not ear.held)
        publisher.send(3, stored(0, 2))
        ear.until_held(2)


def test_numbers_that_cannot_be_are_not_taken_from_a_replay():
    with scene() as (ear, start):
        publisher = start()
        publisher.kept[(1 << 63) - 1] = publisher.payload(1, block(1))
        publisher.send(0, block(0))
        ear.until_held(1)
        publisher.send(2, block(2), lost=True)
        publisher.kept[1] = publisher.payload(1, block(1))
        publisher.send(3, block(3))
        ear.until_held(4)
        publisher.send(4, block(4))
        ear.until_held(5)
        assert ear.count("malformed messages") == 1


def test_hostile_messages_are_counted_and_the_rest_is_heard():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        publisher.raw(b"kv-events")
        publisher.raw(b"kv-events", b"short", b"")
        publisher.raw(b"kv-events", (1 << 62).to_bytes(8, "big"), publisher.payload(1))
        publisher.raw(b"kv-events", (1).to_bytes(8, "big"), b"\xc1garbage")
        publisher.kept[1] = publisher.payload(1)
        publisher.send(2, block(1))
        ear.until_held(2)
        assert ear.count("malformed messages") == 3
        assert ear.count("not msgpack") == 1


def test_forgetting_on_other_evidence_begins_anew():
    with scene() as (ear, start):
        publisher = start()
        publisher.send(0, block(0))
        ear.until_held(1)
        ear.listener.forget("u")
        ear.until(lambda: not ear.held)
        publisher.send(1, block(1))
        ear.until_held(2)  # by a replay


def test_two_workers_share_one_endpoint_and_one_takes_over():
    live = f"tcp://127.0.0.1:{free_port()}"
    first, second = Ear(bind=live, bind_every=0.1), Ear(bind=live, bind_every=0.1)
    publisher = Publisher(live)
    try:
        time.sleep(0.2)
        publisher.send(0, block(0))
        first.until_held(1)
        second.until_held(1)
        first.listener.stop()
        second.until(lambda: second.listener._feeds["u"].bound)
        deadline = time.monotonic() + 5
        number = 1
        while second.held != set(CHAIN[:2]) and time.monotonic() < deadline:
            publisher.send(number, stored(0, 2))
            number += 1
            time.sleep(0.05)
        second.until_held(2)
    finally:
        publisher.close()
        for ear in (first, second):
            ear.listener.stop()


@pytest.mark.parametrize("where", [{"bind": "tcp://256.0.0.1:1"}, {"connect": "tcp://nowhere"}])
def test_an_impossible_endpoint_is_reported_and_stops_nobody(where, caplog):
    Ear(**where).listener.stop()
    assert "KV events cannot be read" in caplog.text
