"""Two gateways that differ in one thing: one has the short path, the other has not. What one connection is told by the
first is compared, byte for byte, with what the same bytes are told by the second.

They run in a thread of their own, so that tests can be plain functions over blocking sockets (and hypothesis can drive
them).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvloop

from gateway.config import Config
from loadtest.stub_upstream import StubUpstream, answer
from tests.harness import FakeClock, Running, running_gateway, upstream

T = TypeVar("T")

SAID = "hello world, hello ✓ world"
AWAIT = b""
"""Sent in between: the rest is sent when something has come back."""
SENTINEL = b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
"""Sent last: whoever is in step answers it and closes."""
LISTEN = 0.04
"""Seconds between two looks whether a silent gateway still works on an answer."""
_VARYING = re.compile(
    rb'"id":"(?:chatcmpl-|cmpl-|msg_|resp_)[0-9A-Za-z_-]+"|"created(?:_at)?":\d+|"request_id":"[0-9a-f]{32}"'
    rb"|date: [^\r]+|x-request-id: [0-9a-f]{32}\r"
)


@dataclass(frozen=True)
class Told:
    """What came back over one connection: each response (head, then body without framing), what was left over, and how
    it ended. Of what came last some may be lost where the end was a ``reset``: the gateway had closed the connection
    with something behind its last request unread.
    """

    responses: tuple[tuple[bytes, bytes], ...]
    rest: bytes
    closed: bool
    reset: bool = field(default=False, compare=False)

    @property
    def statuses(self) -> list[int]:
        return [int(head.split(b" ", 2)[1]) for head, _ in self.responses]


class Side:
    """One of the two."""

    def __init__(self, running: Running, upstream: StubUpstream) -> None:
        self.running = running
        self.upstream = upstream
        self._loop = asyncio.get_running_loop()
        self.full = 0  # requests that entered the pipeline
        self.short = 0  # requests that were answered without it
        self.direct = 0  # of those that entered it, how many began as errands
        parts = urlsplit(running.url)
        self._address = (parts.hostname, parts.port)
        pipeline, shortcut = running.app.pipeline, running.app.shortcut
        enter, begin, look = pipeline.answer, running.app.direct.begin, shortcut.answer

        async def entered(*arguments: Any) -> Any:
            self.full += 1
            return await enter(*arguments)

        def begun(*arguments: Any) -> Any:
            errand = begin(*arguments)
            self.full += errand is not None
            self.direct += errand is not None
            return errand

        def looked(*arguments: Any) -> Any:
            found = look(*arguments)
            self.short += isinstance(found, bytes)
            return found

        pipeline.answer = entered  # type: ignore[method-assign]
        running.app.direct.begin = begun  # type: ignore[method-assign]
        shortcut.answer = looked  # type: ignore[method-assign]

    def talk(self, pieces: Sequence[bytes], gap: float = 0.0) -> Told:
        """Sends pieces one by one and reads until the end, or until the gateway waits for more from this side. ``gap``:
        seconds after each piece, once it has been read, in which something may come back.
        """
        with socket.create_connection(self._address) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            got, idle, closed, reset = bytearray(), 0, False, False
            try:
                before = 0
                for piece in pieces:
                    if piece:
                        before = len(got)
                        sock.sendall(piece)
                    if piece and gap:
                        self._have_read()
                    pause = gap if piece else 10.0 if len(got) == before else 0.0
                    if pause:
                        sock.settimeout(pause)
                        with contextlib.suppress(TimeoutError):
                            got += sock.recv(1 << 20)
            except ConnectionError:
                reset = True
            sock.settimeout(LISTEN)
            while idle < 3 and not closed:
                try:
                    data = sock.recv(1 << 20)
                    got += data
                    closed, idle = not data, 0
                except ConnectionError:
                    closed = reset = True
                except TimeoutError:
                    idle = 0 if self._is_busy() else idle + 1
        return _told(bytes(got), closed, reset)

    def _have_read(self) -> None:
        """Waits until the gateway has read what was sent: until its loop has looked at its sockets again."""

        async def turn() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(turn(), self._loop).result(10)

    def _is_busy(self) -> bool:
        """Whether the gateway works on a request that it has in full."""

        async def look() -> bool:
            coroutines = [task.get_coro() for task in asyncio.all_tasks()]
            cycles = [c for c in coroutines if getattr(c, "__qualname__", "") == "RequestResponseCycle.run_asgi"]
            frames = [getattr(cycle, "cr_frame", None) for cycle in cycles]
            return any(frame is not None and not frame.f_locals["self"].more_body for frame in frames)

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(10)


class Pair:
    """``wire`` has the short path; ``full`` has not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wire: Side, full: Side, clock: FakeClock) -> None:
        self._loop = loop
        self.wire = wire
        self.full = full
        self.clock = clock

    def same(self, *pieces: bytes, gap: float = 0.0) -> Told:
        """Sends the same to both, and holds that both say the same, or that the short path has closed the connection
        instead of answering. Gives what the short path said.
        """
        told, expected = self.wire.talk(pieces, gap), self.full.talk(pieces, gap)
        if told != expected and told.closed:
            assert told.responses == expected.responses[: len(told.responses)], (pieces, told, expected)
            assert not told.rest, (pieces, told, expected)
        else:
            assert told == expected, (pieces, told, expected)
        return told

    def in_step(self, *pieces: bytes, gap: float = 0.0) -> Told:
        """The same with a last request behind it, which shows whether both are still in step."""
        return self.same(*pieces, SENTINEL, gap=gap)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something in the gateways' own loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(30)

    def both(self, change: Callable[[Side], Coroutine[Any, Any, Any]]) -> None:
        """Does the same to both."""
        for side in (self.wire, self.full):
            self.run(change(side))

    def shortened(self, *pieces: bytes, gap: float = 0.0) -> Told:
        """Like `in_step`, and holds that the short path answered without the pipeline."""
        before = self.wire.full
        told = self.same(*pieces, AWAIT, SENTINEL, gap=gap)
        assert self.wire.full == before, "it took the full path"
        return told


@contextlib.contextmanager
def running_pair(config: Mapping[str, Any], configs: dict[str, Any] | None = None) -> Iterator[Pair]:
    """Two gateways with this configuration. What stands in ``configs`` replaces parts of it at a reload."""
    made: Future[Pair] = Future()
    ending = threading.Event()

    async def serve() -> None:
        clock = FakeClock()
        changes = configs if configs is not None else {}
        async with contextlib.AsyncExitStack() as stack:
            sides = []
            for short_path in (True, False):
                u = await stack.enter_async_context(StubUpstream(models=("m1", "m2")))
                u.always(answer(SAID))
                whole = {"upstreams": [upstream(u.url)], "ledger": "off", **config}
                whole["cache"] = {"disk": "off", **whole.get("cache", {})}

                def again(whole: dict[str, Any] = whole) -> Config:
                    return Config.model_validate({**whole, **changes})

                running = running_gateway(whole, clock, again, short_path=short_path)
                sides.append(Side(await stack.enter_async_context(running), u))
            made.set_result(Pair(asyncio.get_running_loop(), sides[0], sides[1], clock))
            await asyncio.to_thread(ending.wait)

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:
            if made.done():
                raise
            made.set_exception(error)

    thread = threading.Thread(target=run, name="gateways")
    thread.start()
    try:
        yield made.result(30)
    finally:
        ending.set()
        thread.join()


def _told(data: bytes, closed: bool, reset: bool) -> Told:
    responses = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        head, behind = data[: end + 4], data[end + 4 :]
        whole = _body(head.lower(), behind)
        if whole is None:
            break
        body, data = _masked(whole[0]), whole[1]
        head = re.sub(rb"content-length: \d+", b"content-length: %d" % len(body), head)  # ids are not of one length
        responses.append((_masked(head), body))
    return Told(tuple(responses), _masked(data), closed, reset)


def _body(head: bytes, data: bytes) -> tuple[bytes, bytes] | None:
    """The body behind a head, and what is behind that; None while it is incomplete."""
    if b"\r\ntransfer-encoding: chunked\r\n" in head:
        body = b""
        while (line := data.find(b"\r\n")) >= 0:
            size = int(data[:line], 16)  # else it was broken into
            if len(data) < line + 4 + size:
                return None
            body += data[line + 2 : line + 2 + size]
            data = data[line + 4 + size :]
            if size == 0:
                return body, data
        return None
    length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
    size = int(length[1]) if length and not head.startswith((b"http/1.1 1", b"http/1.1 204")) else 0
    return (data[:size], data[size:]) if len(data) >= size else None


def _masked(data: bytes) -> bytes:
    """Without what differs from answer to answer."""
    return _VARYING.sub(lambda found: found[0].partition(b":")[0], data)
