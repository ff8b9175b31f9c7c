"""Random conversations for the short path and the full path: what the one says, the other must say.

By hand: ``python -m tests.gateway.fuzz_wire --minutes 10``. Some hundred run with every test (`test_wire_fuzz`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, count, pairwise
from typing import Any

import httptools
import hypothesis
import hypothesis.strategies as st
import orjson

from tests.gateway.pair import AWAIT, SENTINEL, Pair, Side, Told, running_pair
from tests.raw import post

CHAT = "/v1/chat/completions"
KNOWN = orjson.dumps({"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "known ########"}]})
"""Asked at the beginning of each conversation, whose number takes the place of the marks: it depends on no other."""
STREAM = KNOWN[:-1] + b',"stream":true}'
NEW = KNOWN.replace(b"known", b"new")
K1 = "Authorization: Bearer K1"
BEGINNING = (post(CHAT, KNOWN, K1), AWAIT, post(CHAT, STREAM, K1), AWAIT)
KEYS = ("K1", "K2", "K1-narrow", "wrong")
GAPS = (0.01, 0.0)
"""Seconds between two pieces: most come in reads of their own, or most come together."""
OTHER_GAPS = (0.03, 0.1, 0.0)
"""Tried where the two differ, since both may be slow."""
CLOSE = b"connection: close\r\n"
HEALTHY = b'{"status":"ok"}'
"""The answer to the last request: it has come so far."""

_bodies = st.sampled_from(
    [
        *[KNOWN] * 6,
        STREAM,
        STREAM[:-1] + b',"stream_options":{"include_usage":true}}',
        NEW,
        NEW[:-1] + b',"stream":true}',
        KNOWN.replace(b'"temperature":0,', b""),
        KNOWN.replace(b'"m1"', b'"m2"'),
        KNOWN.replace(b'"m1"', b'"nobody"'),
        KNOWN + b" ",
        b"{",
        b"",
        b"x" * 3000,
    ]
)
_paths = st.sampled_from([CHAT] * 15 + ["/v1/completions", "/v1/messages", "/v1/unknown", CHAT + "/", CHAT + "?a=b"])
_usual = [
    "Accept: */*",
    "accept-encoding: gzip",
    "User-Agent: fuzz/1",
    "Connection: keep-alive",
    "X-Request-Id: given-1",
    "X-Stainless-Lang: python",
    "openai-organization: o",
]
_special = [
    "connection: close",
    "OpenAI-Beta: b",
    "anthropic-version: 1",
    "x-api-key: K2",
    "Cache-Control: no-cache",
    "cache-control: only-if-cached",
    "X-Warmgate-Namespace: n",
    "Expect: 100-continue",
    "Transfer-Encoding: chunked",
    "Content-Length: 5",
    "Content-Encoding: gzip",
    "Cookie: a=b",
    "Upgrade: websocket",
    "Host: other",
]
_headers = st.one_of(
    *[st.lists(st.sampled_from(_usual), max_size=3, unique=True)] * 3,
    st.lists(st.sampled_from(_usual + _special), max_size=3),
)


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    key = draw(st.sampled_from([*KEYS[:1] * 12, *KEYS[1:], None]))
    authorization = [] if key is None else [f"Authorization: Bearer {key}"]
    return post(draw(_paths), draw(_bodies), *authorization, *draw(_headers))


_noise = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b":", b" ", b"\t", b",", b"0", b"9", b"\x7f", b"\xff", b";", b"chunked"]
)


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    """A request with a few bytes cut out, put in, doubled, or turned."""
    data = draw(_requests())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "insert", "double", "case", "swap"]))
        until = min(len(data), at + draw(st.sampled_from([1, 2, 4, 16])))
        if kind == "cut":
            data = data[:at] + data[until:]
        elif kind == "insert":
            data = data[:at] + draw(_noise) + data[at:]
        elif kind == "double":
            data = data[:until] + data[at:until] + data[until:]
        elif kind == "case":
            data = data[:at] + data[at:until].swapcase() + data[until:]
        else:
            lines = data.split(b"\r\n")
            lines.insert(draw(st.integers(0, len(lines))), lines[draw(st.integers(0, len(lines) - 1))])
            data = b"\r\n".join(lines)
    return data


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What is sent over one connection, piece by piece."""
    pieces = [b""]
    for request in draw(
        st.lists(st.one_of(_requests(), _requests(), _damaged(), st.binary(max_size=20)), min_size=1, max_size=4)
    ):
        whole = draw(st.integers(0, 2))
        borders = sorted(draw(st.sets(st.integers(0, len(request)), max_size=2))) if not whole else []
        cut = [request[a:b] for a, b in zip([0, *borders], [*borders, len(request)], strict=True)]
        if draw(st.integers(0, 4)) == 0:
            pieces[-1] += cut.pop(0)  # together with what came before
        pieces += cut
    return [piece for piece in pieces if piece]


class Fuzz:
    """Holds conversations with both, and counts what they were told."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._numbers = count()
        self.statuses: Counter[int] = Counter()
        self.conversations = 0

    def converse(self, pieces: list[bytes]) -> None:
        """Fails unless the short path says, at every pace, what the full path says at some."""
        for gap in GAPS:
            told = self._pair.wire.talk(self._sent(pieces), gap)
            heard: list[Told] = []
            for other in (gap, *OTHER_GAPS):
                heard.append(self._pair.full.talk(self._sent(pieces), other))
                if told == heard[-1]:
                    break
            else:
                others = "\n".join(map(str, heard))
                cut = any(one.reset for one in (told, *heard)) or not _is_http(b"".join([*pieces, SENTINEL]))
                same = cut and _same_until_the_end(told, heard)
                assert same, f"{pieces}\nthe short path (gap {gap} s):\n{told}\nthe full path:\n{others}"
            self.statuses.update(told.statuses)
        self.conversations += 1

    def _sent(self, pieces: list[bytes]) -> list[bytes]:
        number = b"%08d" % next(self._numbers)
        ends = list(accumulate(map(len, pieces)))
        whole = re.sub(rb"#+", lambda marks: (3 * number)[: len(marks[0])], b"".join(pieces))
        told = [whole[a:b] for a, b in pairwise([0, *ends])]
        return [*(piece.replace(b"########", number) for piece in BEGINNING), *told, SENTINEL]

    @property
    def short(self) -> int:
        """Answers of the short path that did not need the pipeline."""
        return self._pair.wire.short

    def at_rest(self) -> None:
        """Holds that nothing is left of any conversation, once the gateways have seen the last caller leave."""
        sides, until = (self._pair.wire, self._pair.full), time.monotonic() + 10
        while left := [what for side in sides for what in _left(side)]:
            assert time.monotonic() < until, left
            time.sleep(0.01)


def _left(side: Side) -> list[str]:
    runtime = side.running.app.runtime
    members = [member.name for member in runtime.pool.members if member.in_flight]
    callers = [tenant for tenant in ("t1", "t2") if runtime.usages.of(tenant).concurrent]
    return [*members, *callers, *(["a flight"] if runtime.flights else [])]


def _is_http(data: bytes) -> bool:
    """Whether the parser finds no fault in it. A fault ends the connection at once, and good requests before it that
    are still being answered are not answered any more: how many of them were is a matter of time.
    """
    parser = httptools.HttpRequestParser(_Targets())
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:
        return False
    except httptools.HttpParserUpgrade:
        return True
    return True


class _Targets:
    """Refuses what is not a URL, as uvicorn does."""

    def on_url(self, url: bytes) -> None:
        httptools.parse_url(url)


def _same_until_the_end(told: Told, heard: list[Told]) -> bool:
    """Whether all were told the same as far as each was told anything before the connection ended. Whether an answer
    said so itself depends on what had come by then.
    """
    bodies = [body for one in (told, *heard) for _, body in one.responses]
    if HEALTHY in bodies or not all(one.closed for one in (told, *heard)):
        return False
    answers = [[(head.replace(CLOSE, b""), body) for head, body in one.responses] for one in (told, *heard)]
    fewest = min(map(len, answers))
    return all(one[:fewest] == answers[0][:fewest] for one in answers)


@contextlib.contextmanager
def fuzzing() -> Iterator[Fuzz]:
    """Two gateways with tenants."""

    def hashed(key: str) -> str:
        return "sha256:" + hashlib.sha256(key.encode()).hexdigest()

    narrow: dict[str, Any] = {"key": hashed("K1-narrow"), "models": ["m2"]}
    tenants = [{"name": "t1", "keys": [hashed("K1"), narrow]}, {"name": "t2", "keys": [hashed("K2")]}]
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    with running_pair({"tenants": tenants}) as pair:
        yield Fuzz(pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    with fuzzing() as fuzz:
        for seed in count(arguments.seed):

            @hypothesis.seed(seed)
            @hypothesis.settings(max_examples=300, deadline=None, database=None)
            @hypothesis.given(conversations())
            def some(pieces: list[bytes]) -> None:
                fuzz.converse(pieces)

            some()
            fuzz.at_rest()
            told = ", ".join(f"{times} × {status}" for status, times in sorted(fuzz.statuses.items()))
            print(f"seed {seed}: {fuzz.conversations} conversations, {fuzz.short} short answers; {told}", flush=True)
            if time.monotonic() > end:
                return


if __name__ == "__main__":
    main()
