"""KV events as a router hears them: what was stored, what was removed, in order, and again by replay."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from engine.core import EngineCore
from engine.errors import ModelError
from engine.events import KVEvents
from tests.engine import tiny
from tests.engine.drive import run
from tests.engine.test_prefix import job, prompt


class Router:
    """A subscriber that binds, and an index of blocks built from what it hears."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"kv-events")
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.replay_endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.held: dict[int, dict[str, Any]] = {}
        self.numbers: list[int] = []

    def hear(self) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []
        while self._socket.poll(500 if not heard else 50):
            _, number, payload = self._socket.recv_multipart()
            self.numbers.append(struct.unpack(">q", number)[0])
            heard += msgpack.unpackb(payload)["events"]
        for event in heard:
            self._apply(event)
        return heard

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                size, parent = event["block_size"], event["parent_block_hash"]
                for i, name in enumerate(event["block_hashes"]):
                    tokens = event["token_ids"][i * size : (i + 1) * size]
                    self.held[name] = {"parent": parent, "tokens": tokens, "extra": event["extra_keys"][i]}
                    parent = name
            case "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.held[name]
            case "AllBlocksCleared":
                self.held.clear()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


@pytest.fixture
def core(router: Router) -> Iterator[EngineCore]:
    events = KVEvents(router.endpoint, router.replay_endpoint, block_size=4)
    core = tiny.core(blocks=16, events=events)
    core.reset_prefix_cache()
    while not router.hear():  # the connection stands once the first event is heard
        core.reset_prefix_cache()
    yield core
    events.close()


def test_a_router_can_rebuild_the_index(router: Router, core: EngineCore) -> None:
    ids = prompt(20)
    run(core, job("a", ids, salt=b"T1"))
    [first, second] = router.hear()
    assert first["block_hashes"] == list(router.held)[:2]
    assert first["parent_block_hash"] is None
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert [token for block in router.held.values() for token in block["tokens"]] == ids[:16]
    assert [block["extra"] for block in router.held.values()] == [["T1"], None, None, None]


def test_evictions_and_resets_are_heard(router: Router, core: EngineCore) -> None:
    for seed in range(6):
        run(core, job(str(seed), prompt(20, seed)))
    router.hear()
    assert len(router.held) == len(core.manager.indexed())
    core.reset_prefix_cache()
    router.hear()
    assert router.held == {}
    assert router.numbers == list(range(router.numbers[0], router.numbers[0] + len(router.numbers)))


def test_missed_batches_are_replayed(router: Router, core: EngineCore) -> None:
    run(core, job("a", prompt(30)))
    router.hear()
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.set(zmq.RCVTIMEO, 3000)
    dealer.connect(router.replay_endpoint)
    dealer.send_multipart([b"", struct.pack(">q", router.numbers[-2])])
    replayed: list[int] = []
    while (number := struct.unpack(">q", dealer.recv_multipart()[-2])[0]) != -1:
        replayed.append(number)
    dealer.send_multipart([b"", b"bad"])  # ignored
    dealer.send_multipart([b"", struct.pack(">q", 10**6)])
    assert struct.unpack(">q", dealer.recv_multipart()[-2])[0] == -1
    dealer.close(linger=0)
    assert replayed == router.numbers[-2:]


def test_nobody_listening_stops_nothing() -> None:
    events = KVEvents("tcp://127.0.0.1:9", "", block_size=4)
    core = tiny.core(blocks=16, events=events)
    assert run(core, job("a", prompt(20))).reason == "length"
    events.close()


def test_a_bad_endpoint_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="nonsense"):
        KVEvents("nonsense", "", block_size=4)
