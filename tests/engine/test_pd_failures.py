"""Prompts from another engine that come late, torn, changed or not at all: computed again, nothing left behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.pd.wire import GREETING, NAME_BYTES, Source, is_trusted
from tests.engine import tiny
from tests.engine.drive import advance, submit
from tests.engine.split import Engine, at_rest, computed_elsewhere, counts, job, prompt, run, source, split
from tests.waiting import wait_until


class TestWhatIsNotProvenIsComputed:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"model": tiny.files(seed=1)}, "refused: foreign-layout"),
            ({"block_size": 8, "prefill_chunk": 8}, "refused: "),
            ({"prefill_chunk": 16, "step_tokens": 16}, "refused: foreign-layout"),
        ],
    )
    def test_of_another_layout(self, engine: Engine, changes: dict[str, Any], why: str) -> None:
        one, other = engine(**changes), engine()
        [result] = split(one, other, job(prompt(50)))
        assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
        assert any(event.startswith(why) or event == "torn" for event in counts(other))
        assert other.counters.computed_tokens == 50

    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ({"salt": b"a"}, {"salt": b"b"}),
            ({"tokens": prompt(50, 1)}, {}),
            ({"tokens": [*prompt(49), 0]}, {}),
        ],
    )
    def test_of_another_tenant_or_prompt(self, engine: Engine, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        one, other = engine(), engine()
        params = computed_elsewhere(one, job(**{"tokens": prompt(50), **theirs}))
        [result] = run(other, replace(job(prompt(50), **ours), source=source(params)))
        assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
        assert next(iter(counts(other))).startswith("refused: foreign-")

    def test_fetched_twice(self, engine: Engine) -> None:
        one, other = engine(), engine()
        params = computed_elsewhere(one, job(prompt(50)))
        for _ in range(2):
            [result] = run(other, job(prompt(50), source=source(params), salt=b""))
            assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
            other.reset_prefix_cache()
        assert counts(other) == {"complete": 1, "gone": 1}
        assert counts(one) == {"offered": 1, "sent": 1, "unknown": 1}

    def test_after_the_lease(self, engine: Engine) -> None:
        one, other = engine(kv_transfer_lease=0.05), engine()
        params = computed_elsewhere(one, job(prompt(50)))
        assert not at_rest(one)
        wait_until(lambda: at_rest(one))
        [result] = run(other, job(prompt(50), source=source(params)))
        assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
        assert counts(one) == {"offered": 1, "expired": 1, "unknown": 1}

    def test_from_nobody(self, engine: Engine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            nobody = reserved.getsockname()[1]
        other = engine()
        [result] = run(other, job(prompt(50), source=Source("127.0.0.1", nobody, bytes(NAME_BYTES))))
        assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
        assert counts(other) == {"unreachable": 1}

    def test_from_a_host_that_nobody_named(self, engine: Engine) -> None:
        other = engine()
        [result] = run(other, job(prompt(50), source=Source("192.0.2.1", 9, bytes(NAME_BYTES))))
        assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
        assert counts(other) == {"refused host": 1}
        assert is_trusted("192.0.2.1", frozenset({"192.0.2.1"})) and is_trusted("localhost", frozenset())


@contextmanager
def between(params: dict[str, Any], pieces: Callable[[bytes], list[bytes | None]]) -> Iterator[Source]:
    """Something between the two engines that passes on what ``pieces`` makes of the answer; None: and then waits."""
    there = source(params)
    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((there.host, there.port)) as far:
                far.sendall(near.recv(GREETING.size))
                answer = b"".join(iter(lambda: far.recv(1 << 16), b""))
                try:
                    for piece in pieces(answer):
                        if piece is None:
                            released.wait(20)
                        else:
                            near.sendall(piece)
                except OSError:
                    pass  # the fetching side has seen enough

        thread = threading.Thread(target=serve)
        thread.start()
        yield Source("127.0.0.1", listener.getsockname()[1], there.name)
        released.set()
        thread.join()


def flipped(answer: bytes, at: int) -> list[bytes | None]:
    return [answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]]


@pytest.mark.parametrize(
    ("pieces", "why", "saved"),
    [
        (lambda a: [a[: len(a) // 2]], "torn", 24),
        (lambda a: [a[:10]], "gone", 0),
        (lambda a: [a[:-1]], "torn", 48),
        (lambda a: [a[: len(a) // 2], None], "late", 24),
        (lambda a: [None], "late", 0),
        (lambda a: flipped(a, 2000), "refused: checksum", 0),
        (lambda a: flipped(a, len(a) // 2 + 99), "refused: checksum", 24),
        (lambda a: flipped(a, len(a) - 5), "refused: checksum", 48),
        (lambda a: [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 400], "refused: magic", 0),
    ],
    ids=["half", "nothing", "one byte short", "stuck half way", "silent", "flip 1", "flip 2", "flip 3", "http"],
)
def test_a_fetch_that_goes_wrong_costs_the_rest(
    engine: Engine, pieces: Callable[[bytes], list[bytes | None]], why: str, saved: int
) -> None:
    one, other = engine(), engine(kv_transfer_patience=0.5)
    params = computed_elsewhere(one, job(prompt(50)))
    with between(params, pieces) as changed:
        [result] = run(other, job(prompt(50), source=changed))
    assert result.tokens == run(tiny.core(), job(prompt(50)))[0].tokens
    assert counts(other) == {why: 1}
    assert other.counters.computed_tokens == 50 - saved


def test_a_client_that_leaves_during_the_fetch_leaves_nothing_behind(engine: Engine) -> None:
    one, other = engine(), engine()
    for tokens in (prompt(50), prompt(60, 1)):
        params = computed_elsewhere(one, job(tokens))
        with between(params, lambda a: [a[: len(a) // 2], None]) as stuck:
            results = {"j": submit(other, job(tokens, source=stuck))}
            pull = results["j"].sequence.pull
            assert pull is not None
            wait_until(lambda pull=pull: pull.loaded > 2)
            advance(other, results)
            other.cancel("j")
            wait_until(lambda pull=pull: pull.done)
        other.check_integrity()
        assert other.manager.free == other.manager.total


def test_a_fetching_side_that_dies_frees_the_blocks(engine: Engine) -> None:
    one = engine(blocks=64)
    params = computed_elsewhere(one, job(prompt(100)))
    there = source(params)
    with socket.create_connection((there.host, there.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.sendall(GREETING.pack(b"WGPD", 1, 0, there.name, 0))
    wait_until(lambda: at_rest(one))
