"""A reply of the stub upstream, and every way in which its delivery may go wrong.

A reply is made by a function of `script` and changed by its methods, which apply in the order written:

    answer().encoded("gzip")                         events(b": wait\\n\\n", delta(content="A"), "[DONE]")
    answer().cut(after=3, then="reset")              answer(deltas=["你好🙂"]).regroup(every=1)
    error(503).header("retry-after", "1")            answer().delayed(5)      answer().pause(before=0, seconds=5)
    answer().held(gate)                              answer(deltas=["A", "B"]).held(gate, before=2)
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from loadtest.stub_upstream.call import Call
from loadtest.stub_upstream.codings import compressor

Ending = Literal[
    "end", "close", "reset", "stall"
]  # end: as the framing demands; close: FIN; reset: RST; stall: silence
Framing = Literal["length", "chunked", "close", "raw"]  # raw: not even a head of ours


@dataclass(frozen=True)
class Delay:
    """A pause, in seconds, between two writes."""

    seconds: float

    async def wait(self) -> None:
        await asyncio.sleep(self.seconds)


Pause = Delay | asyncio.Event  # an event: until it is set


@dataclass
class Wire:
    """A reply as it will be sent. Each bytes step is one write (and one chunk, where the framing is chunked)."""

    status: int
    headers: list[tuple[str, str]]
    steps: list[bytes | Pause]
    framing: Framing
    length: int | None = None  # announced Content-Length, where it is not that of the steps
    before: list[Pause] = field(default_factory=list[Pause])  # before the head
    ending: Ending = "end"

    @property
    def size(self) -> int:
        """Bytes in all steps."""
        return sum(len(step) for step in self.steps if isinstance(step, bytes))


Change = Callable[[Wire], None]


@dataclass(frozen=True)
class Reply:
    """A reply to come; made anew for each call."""

    render: Callable[[Call], Wire]
    changes: tuple[Change, ...] = field(default=())

    def wire(self, call: Call) -> Wire:
        wire = self.render(call)
        for change in self.changes:
            change(wire)
        return wire

    def _with(self, change: Change) -> "Reply":
        return Reply(self.render, (*self.changes, change))

    def status(self, code: int) -> "Reply":
        """Another status code, the rest unchanged."""

        def change(wire: Wire) -> None:
            wire.status = code

        return self._with(change)

    def header(self, name: str, value: str) -> "Reply":
        """One more header (content-type: in place of the one that is there)."""

        def change(wire: Wire) -> None:
            if name.lower() == "content-type":
                wire.headers = [kept for kept in wire.headers if kept[0] != "content-type"]
            wire.headers.append((name, value))

        return self._with(change)

    def framed(self, framing: Framing) -> "Reply":
        """Delimit the body another way."""

        def change(wire: Wire) -> None:
            wire.framing = framing

        return self._with(change)

    def delayed(self, seconds: float) -> "Reply":
        """Wait before the head."""
        return self._with(lambda wire: wire.before.append(Delay(seconds)))

    def held(self, gate: asyncio.Event, before: int | None = None) -> "Reply":
        """Wait until the gate is set: before the head, or before the body's step number `before`."""

        def change(wire: Wire) -> None:
            if before is None:
                wire.before.append(gate)
            else:
                wire.steps.insert(_place(wire, before), gate)

        return self._with(change)

    def pause(self, before: int, seconds: float) -> "Reply":
        """Wait before the body's step number `before` (0: between the head and the first)."""
        return self._with(lambda wire: wire.steps.insert(_place(wire, before), Delay(seconds)))

    def paced(self, seconds: float) -> "Reply":
        """Wait between every two steps of the body."""

        def change(wire: Wire) -> None:
            wire.steps = [s for step in wire.steps for s in (Delay(seconds), step)][1:]

        return self._with(change)

    def cut(self, after: int, then: Ending = "close") -> "Reply":
        """Send only the first `after` steps of the body (events, for a stream) and then end like this."""

        def change(wire: Wire) -> None:
            if then != "end" and wire.length is None:
                wire.length = wire.size
            wire.steps = wire.steps[: _place(wire, after)]
            wire.ending = then

        return self._with(change)

    def ending(self, then: Ending) -> "Reply":
        """Send the whole body and then end like this (`close`: with the final chunk of a chunked body missing)."""

        def change(wire: Wire) -> None:
            wire.ending = then

        return self._with(change)

    def swap(self, at: int, step: bytes) -> "Reply":
        """Replace the body's step number `at`."""

        def change(wire: Wire) -> None:
            wire.steps[_place(wire, at)] = step

        return self._with(change)

    def regroup(self, every: int | None = None, at: Sequence[int] = ()) -> "Reply":
        """Write the same body in pieces of `every` bytes, or split at these offsets, or (given neither) in one go."""

        def change(wire: Wire) -> None:
            whole = b"".join(step for step in wire.steps if isinstance(step, bytes))
            borders = [0, *(range(every, len(whole), every) if every else at), len(whole)]
            pieces = [whole[a:b] for a, b in pairwise(borders)]
            wire.steps = [piece for piece in pieces if piece]

        return self._with(change)

    def encoded(self, coding: str) -> "Reply":
        """Content-encode the body: gzip, deflate, br or zstd. Each step is flushed, so that streams still flow."""

        def change(wire: Wire) -> None:
            compress, flush, finish = compressor(coding)
            coded = [compress(s) + flush() if isinstance(s, bytes) else s for s in wire.steps]
            last = finish()
            if coded and isinstance(coded[-1], bytes):
                coded[-1] += last
            else:
                coded.append(last)
            wire.steps = coded
            wire.headers.append(("content-encoding", coding))

        return self._with(change)


def _place(wire: Wire, number: int) -> int:
    """Where the bytes step of this number stands among all steps."""
    seen = 0
    for i, step in enumerate(wire.steps):
        if isinstance(step, bytes):
            if seen == number:
                return i
            seen += 1
    return len(wire.steps)
