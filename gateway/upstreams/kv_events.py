"""Listens to KV events over ZMQ: numbered messages `[topic, number, payload]`, gaps filled by asking for a replay,
which comes as `["", topic, number, payload]` (from older engines without the topic).

One thread serves all sources of a process, so that reading and hashing stay off the event loop. vLLM *connects* its
publisher to a `tcp://` endpoint, so we bind; where several gateway workers share one endpoint, the one that could bind
passes messages on to the others. An engine that restarts (numbers begin anew), falls silent or lost its history loses
its credit: it is then taken to hold nothing until it says otherwise.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from gateway.upstreams.kv_blocks import MAX_PAYLOAD, BadEvent, Batch, Changes, Mirror, read_batch

log = logging.getLogger(__name__)

_NUMBER = struct.Struct(">q")
_END = -1
RESYNC_EVERY = 60.0
"""Seconds between two fresh starts because of blocks whose parents are unknown."""
_MOST_AHEAD = 1 << 40

Deliver = Callable[[str, Changes], None]
"""Takes the changes of an upstream (by name), in the listening thread."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one upstream's events come from: an endpoint to bind or to connect to, and one to ask for replays."""

    name: str
    bind: str | None
    connect: str | None
    replay: str | None
    max_blocks: int
    block_size: int | None = None  # tokens in a block; others are left out
    silence: float = 10.0  # seconds after which it is asked whether it is still the same
    patience: float = 2.0  # seconds that a replay may take to go on
    bind_every: float = 5.0  # seconds between attempts to bind what another worker has bound


@dataclass(slots=True)
class _Feed:
    """The state of one source. ``expected``: the next number; None: nothing is known of it."""

    source: Source
    mirror: Mirror
    live: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    relay: zmq.Socket[bytes] | None = None
    bound: bool = True
    bind_again: float = 0.0
    expected: int | None = None
    newest: float = 0.0  # the engine's own clock in the last batch
    last: bytes = b""  # digest of the last payload
    heard: float = 0.0
    asked: float = 0.0  # when a replay was asked for; 0: none is under way
    wanted: int = -1  # the live message for which it was asked for must come with it, or be done without
    checking: bool = False  # the replay begins with the last batch, to see that it is the same engine still
    blind: bool = False  # replays bring nothing: what comes is taken as it comes
    resync_at: float = 0.0  # not before then
    counts: Counter[str] = field(default_factory=Counter)


class KvListener:
    """Reads all sources in a thread between `start` and `stop`, and delivers what changes."""

    def __init__(
        self, sources: Sequence[Source], deliver: Deliver, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._deliver = deliver
        self._clock = clock
        self._context: zmq.Context[Any] = zmq.Context()
        self._stopping = threading.Event()
        self._forget: set[str] = set()
        self._feeds: dict[str, _Feed] = {}
        for source in sources:
            try:
                self._feeds[source.name] = self._open(source)
            except zmq.ZMQError as error:
                log.error("upstream %s: its KV events cannot be read: %s", source.name, error.strerror)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the sockets."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._context.destroy(linger=0)

    def forget(self, name: str) -> None:
        """Something else has shown that this upstream was restarted or is gone: its credit ends."""
        self._forget.add(name)

    def counts(self) -> dict[str, dict[str, int]]:
        """What happened, per upstream: batches, gaps, replays, restarts, silences, duplicates, and bad events."""
        return {name: {**feed.counts, **feed.mirror.bad} for name, feed in list(self._feeds.items())}

    def _open(self, source: Source) -> _Feed:
        live: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        live.set(zmq.MAXMSGSIZE, MAX_PAYLOAD)
        live.set(zmq.RCVHWM, 10_000)
        live.set(zmq.SUBSCRIBE, b"")
        try:
            replay = self._replay_socket(source)
            feed = _Feed(source, Mirror(source.max_blocks, source.block_size), live, replay, heard=self._clock())
            if source.connect is not None:
                live.connect(source.connect)
            if source.bind is not None:
                self._bind(feed)
        except zmq.ZMQError:
            live.close()
            raise
        return feed

    def _replay_socket(self, source: Source) -> zmq.Socket[bytes] | None:
        if source.replay is None:
            return None
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.set(zmq.MAXMSGSIZE, MAX_PAYLOAD)
        socket.connect(source.replay)
        return socket

    def _bind(self, feed: _Feed) -> None:
        """Binds, or listens to the worker that already has."""
        assert feed.source.bind is not None
        shared = f"ipc://@warmgate-kv-{hashlib.sha256(feed.source.bind.encode()).hexdigest()[:16]}"
        first, feed.bind_again = feed.bound, self._clock() + feed.source.bind_every
        try:
            feed.live.bind(feed.source.bind)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            if first:
                feed.bound = False
                feed.live.connect(shared)
            return
        if not first:
            feed.live.disconnect(shared)
        feed.bound = True
        try:
            relay: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
            relay.bind(shared)
            feed.relay = relay
        except zmq.ZMQError:
            pass  # no such sockets here, or its last owner is just going: only one worker is told

    def _run(self) -> None:
        while not self._stopping.is_set():
            poller = zmq.Poller()
            for feed in self._feeds.values():
                waits = feed.replay if feed.asked else feed.live
                poller.register(waits or feed.live, zmq.POLLIN)
            ready = {socket for socket, _ in poller.poll(100)}
            for feed in self._feeds.values():
                try:
                    self._serve(feed, ready)
                except Exception:  # whatever one engine sends, the others are still listened to
                    log.exception("upstream %s: its KV events could not be read", feed.source.name)
                    self._lose(feed, "failures")

    def _serve(self, feed: _Feed, ready: set[Any]) -> None:
        now = self._clock()
        if feed.source.name in self._forget:
            self._forget.discard(feed.source.name)
            self._lose(feed, "forgotten")
        if feed.asked:
            if feed.replay in ready:
                self._drain(feed, feed.replay, self._replayed)
            if feed.asked and now - feed.asked > feed.source.patience:
                feed.asked, feed.blind = 0.0, not feed.checking
                self._drop_replay(feed)
                self._lose(feed, "silences" if feed.checking else "replays failed")
        elif feed.live in ready:
            self._drain(feed, feed.live, self._heard)
        elif feed.replay is not None and now - feed.heard > feed.source.silence:
            feed.heard = now
            self._ask(feed, checking=feed.expected is not None)
        if not feed.bound and now > feed.bind_again:
            self._bind(feed)

    def _drain(self, feed: _Feed, socket: zmq.Socket[bytes] | None, take: Callable[[_Feed, int, bytes], None]) -> None:
        replaying = bool(feed.asked)
        for _ in range(1000):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK) if socket is not None else []
            except zmq.Again:
                return
            if len(parts) not in ((3, 4) if replaying else (3,)) or len(parts[-2]) != _NUMBER.size:
                feed.counts["malformed messages"] += 1
                continue
            if feed.relay is not None and not replaying:
                feed.relay.send_multipart(parts, zmq.NOBLOCK)
            take(feed, _NUMBER.unpack(parts[-2])[0], parts[-1])
            if bool(feed.asked) != replaying or (replaying and socket is not feed.replay):
                return

    def _heard(self, feed: _Feed, number: int, payload: bytes) -> None:
        """A live message."""
        feed.heard = self._clock()
        if not 0 <= number < _MOST_AHEAD:
            feed.counts["malformed messages"] += 1
            return
        batch = self._read(feed, payload)
        if batch is None:
            feed.expected = number + 1 if number == feed.expected else feed.expected
            return
        if feed.expected is None:
            if number > 0 and feed.replay is not None and not feed.blind:
                self._ask(feed, wanted=number)
                return
        elif number < feed.expected:
            if batch.at <= feed.newest:
                feed.counts["duplicates"] += 1
                return
            self._lose(feed, "restarts")
            if number > 0 and feed.replay is not None:
                self._ask(feed, wanted=number)
                return
        elif number > feed.expected:
            feed.counts["gaps"] += 1
            if feed.replay is not None:
                self._ask(feed, wanted=number)
                return
            self._lose(feed, "losses")
        self._take(feed, number, payload, batch)
        if feed.mirror.orphans and feed.replay is not None and self._clock() >= feed.resync_at:
            feed.resync_at = self._clock() + RESYNC_EVERY  # something was missed unseen: begin anew
            self._lose(feed, "resyncs")
            self._ask(feed)

    def _ask(self, feed: _Feed, *, wanted: int = -1, checking: bool = False) -> None:
        """Asks for a replay from what is expected next (``checking``: from the last batch that was taken)."""
        assert feed.replay is not None
        first = (feed.expected or 0) - checking
        feed.asked, feed.wanted, feed.checking = self._clock(), wanted, checking
        feed.counts["replays"] += not checking
        try:
            feed.replay.send_multipart([b"", _NUMBER.pack(first)], zmq.NOBLOCK)
        except zmq.Again:
            feed.counts["replays failed"] += 1

    def _replayed(self, feed: _Feed, number: int, payload: bytes) -> None:
        """A message of a replay."""
        feed.blind = False
        if number != _END and not 0 <= number < _MOST_AHEAD:
            feed.counts["malformed messages"] += 1
            return
        if feed.checking:
            feed.asked = self._clock()
            same = number != _END and feed.expected is not None and number == feed.expected - 1
            feed.checking = False
            if same and _digest(payload) == feed.last:
                return
            self._lose(feed, "restarts")
            if number == _END or number > 0:
                feed.asked = 0.0
                self._drop_replay(feed)
                self._ask(feed)
                return
        if number == _END:
            feed.asked, feed.heard = 0.0, self._clock()
            feed.mirror.orphans = 0  # of a history that is no longer whole: there is nothing more to be had
            if feed.wanted >= (feed.expected or 0):
                feed.blind = True
                self._lose(feed, "losses")
            return
        if feed.expected is not None and number < feed.expected:
            return
        batch = self._read(feed, payload)
        if feed.expected is not None and number > feed.expected:
            self._lose(feed, "losses")
        if batch is not None:
            feed.asked = self._clock()  # only what is new prolongs it
            self._take(feed, number, payload, batch)

    def _drop_replay(self, feed: _Feed) -> None:
        """What is still to come of a replay must not be taken for part of the next: a new socket asks."""
        assert feed.replay is not None
        feed.replay.close(linger=0)
        feed.replay = self._replay_socket(feed.source)

    def _take(self, feed: _Feed, number: int, payload: bytes, batch: Batch) -> None:
        feed.expected, feed.newest, feed.last = number + 1, batch.at, _digest(payload)
        feed.counts["batches"] += 1
        changes = feed.mirror.apply(batch)
        if changes.cleared or changes.steps:
            self._deliver(feed.source.name, changes)

    def _read(self, feed: _Feed, payload: bytes) -> Batch | None:
        try:
            return read_batch(payload)
        except BadEvent as error:
            feed.mirror.bad[str(error)] += 1
            return None

    def _lose(self, feed: _Feed, why: str) -> None:
        """The engine's credit ends."""
        feed.counts[why] += 1
        feed.expected = None
        if len(feed.mirror):
            log.warning("upstream %s: what it holds is no longer known (%s)", feed.source.name, why)
        feed.mirror.clear()
        self._deliver(feed.source.name, Changes(cleared=True))


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
