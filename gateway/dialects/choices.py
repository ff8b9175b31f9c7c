"""What chat completions and completions share: choices that end with a finish reason, and streams of chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from cache.response.canonical import respell
from gateway.dialects.base import Answer, Dialect, Piece, Rendered, Unjoinable
from gateway.dialects.events import EventCollector
from gateway.dialects.joining import load, member, merge_constant, settle
from gateway.dialects.openai import EXCLUDED, VARY, error_body, usage_of
from gateway.ids import unique
from gateway.sse import Event, frame
from policies.cacheability import Outcome

_IDENTITY = ("id", "created")
_OF_ONE_CHUNK = ("object", "choices", "usage", "obfuscation", *_IDENTITY)
_OF_EVERY_CHUNK = ("model", "system_fingerprint", "service_tier")
_NO_USAGE = (b'"usage":null', b'"usage": null')
_FINISHES = {"function_call": "tool_calls", "model_length": "length"}
"""Older and other names of finish reasons."""


class ChoicesDialect(Dialect):
    """Base of the two dialects with ``choices``."""

    excluded = EXCLUDED
    vary = VARY
    answer_object: str
    chunk_object: str
    id_prefix: str

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self.streams(body) or self.wants_usage(body):
            return {}
        options = body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            return {}
        return {"stream_options": {**(options or {}), "include_usage": True}}

    def wants_usage(self, body: Mapping[str, Any]) -> bool:
        options = body.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def read(self, body: Mapping[str, Any], answer: bytes) -> Answer:
        try:
            message = load(answer)
        except ValueError:
            return Answer(None, Outcome(fault="not JSON"))
        if not isinstance(message, dict):
            return Answer(None, Outcome(fault="not a JSON object"))
        usage = usage_of(message.get("usage"))
        if message.get("error"):
            return Answer(None, Outcome(fault="an error with a success status"), usage)
        choices = message.get("choices")
        if not isinstance(choices, list) or not choices:
            return Answer(None, Outcome(fault="incomplete: no choices"), usage)
        if not all(isinstance(choice, dict) and self.is_sound(choice) for choice in choices):
            return Answer(None, Outcome(fault="unknown form"), usage)
        if {choice.get("index", position) for position, choice in enumerate(choices)} != set(range(len(choices))):
            return Answer(None, Outcome(fault="unknown form"), usage)
        return Answer(_without_identity(message), self.outcome(choices, self.expected(body)), usage)

    def usage_in(self, answer: bytes) -> dict[str, int]:
        return usage_of(member(answer, "usage"))

    def collector(self, body: Mapping[str, Any]) -> ChunkCollector:
        return ChunkCollector(self, self.expected(body))

    def render(self, message: bytes) -> Rendered:
        whole: dict[str, Any] = load(message)
        chunks, usage = self.chunks(whole)
        events = [_open(chunk) for chunk in chunks]
        with_usage = [*events, _open(usage)] if usage else events
        return Rendered((b"{", _open(whole)), _with_gaps(events), _with_gaps(with_usage))

    def identity(self, now: float) -> bytes:
        return b'"id":"%s%s","created":%d,' % (self.id_prefix.encode(), unique(28).encode(), int(now))

    def error(self, status: int, message: str, code: str | None = None, request_id: str = "") -> bytes:
        return error_body(status, message, code)

    def error_event(self, message: str, code: str) -> bytes:
        return frame(error_body(502, message, code))

    def chunks(self, whole: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """A plain message as its chunks without identity, and its usage chunk if it has usage."""
        common = {"object": self.chunk_object} | {name: whole[name] for name in _OF_EVERY_CHUNK if name in whole}
        once = {k: v for k, v in whole.items() if k not in common and k not in ("object", "choices", "usage")}
        chunks: list[dict[str, Any]] = []
        for position, choice in enumerate(whole["choices"]):
            index = choice.get("index", position)
            for part in self.split(choice):
                chunks.append({**common, **once, "choices": [{"index": index, **part}]})
                once = {}
        usage = whole.get("usage")
        return chunks, {**common, "choices": [], "usage": usage} if usage is not None else None

    def outcome(self, choices: list[dict[str, Any]], wanted: int) -> Outcome:
        """Every choice that was asked for must be there and have ended; what refuses to answer is no answer."""
        reasons = [choice.get("finish_reason") for choice in choices]
        if not choices:
            return Outcome(fault="incomplete: no choices")
        if len(choices) < wanted or not all(isinstance(reason, str) and reason for reason in reasons):
            return Outcome(fault="incomplete: a choice without a finish reason")
        finishes = tuple(_FINISHES.get(str(reason), str(reason)) for reason in reasons)
        if "content_filter" in finishes or any(self.refuses(choice) for choice in choices):
            return Outcome(finishes, fault="refused")
        return Outcome(finishes)

    def expected(self, body: Mapping[str, Any]) -> int:
        """How many choices the caller asked for."""
        n = body.get("n")
        return n if type(n) is int and n > 0 else 1

    @abstractmethod
    def is_sound(self, choice: dict[str, Any]) -> bool:
        """Whether a plain choice has the form that `split` can take apart."""

    @abstractmethod
    def refuses(self, choice: dict[str, Any]) -> bool:
        """Whether a plain choice says nothing but that it will not answer."""

    @abstractmethod
    def split(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """A plain choice as the parts of its chunks, without ``index``: role first, finish reason last and once."""

    @abstractmethod
    def add(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        """Adds the part of one chunk to a choice in the making, in place; raises `Unjoinable`."""

    @abstractmethod
    def complete(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A settled choice with the fields that every plain one has."""

    @abstractmethod
    def is_empty(self, part: dict[str, Any]) -> bool:
        """Whether the part of a chunk says nothing (as beside a usage report)."""


class ChunkCollector(EventCollector):
    """Joins chunks, and keeps the usage report from callers who did not ask for it."""

    done_ends = True

    def __init__(self, dialect: ChoicesDialect, expected_choices: int) -> None:
        super().__init__()
        self._dialect = dialect
        self._expected = expected_choices
        self._top: dict[str, Any] = {}
        self._repeated: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: Any = None

    def may_skip(self, events: bytes) -> bool:
        if b'"usage"' in events and events.count(b'"usage"') > sum(map(events.count, _NO_USAGE)):
            return False
        return super().may_skip(events)

    def piece(self, event: Event, data: Mapping[str, Any]) -> Piece:
        usage = data.get("usage")
        if usage is None:
            return Piece.same(event.raw)
        self._usage = usage
        if self._says_nothing(data):
            return Piece(event.raw, b"")
        return Piece(event.raw, frame(respell({name: value for name, value in data.items() if name != "usage"})))

    def join(self, name: str, data: dict[str, Any]) -> None:
        if name not in ("", "message"):
            raise Unjoinable(f"an event named {name[:40]!r}")
        nothing = data.get("usage") is not None and self._says_nothing(data)
        parts = data["choices"] if data.get("choices") and not nothing else ()
        for field in _OF_ONE_CHUNK:
            data.pop(field, None)
        if is_padding(data.get("p")):
            del data["p"]
        if data != self._repeated:
            merge_constant(self._top, data)
            self._repeated = data
        for part in parts:
            index = part.pop("index", 0)
            if type(index) is not int:
                raise Unjoinable("a choice without a number")
            self._dialect.add(self._choices.setdefault(index, {"index": index}), part)

    def usage(self) -> dict[str, int]:
        return usage_of(self._usage)

    def answer(self) -> Answer:
        message = {"object": self._dialect.answer_object, **self._top}
        choices = [self._dialect.complete(settle(self._choices[index])) for index in sorted(self._choices)]
        if sorted(self._choices) != list(range(len(choices))):
            raise Unjoinable("choices that are not numbered from 0")
        message["choices"] = choices
        if self._usage is not None:
            message["usage"] = self._usage
        return Answer(_without_identity(message), self._dialect.outcome(choices, self._expected), self.usage())

    def _says_nothing(self, data: Mapping[str, Any]) -> bool:
        parts = data.get("choices") or []
        return isinstance(parts, list) and all(isinstance(p, dict) and self._dialect.is_empty(p) for p in parts)


def is_padding(value: object) -> bool:
    """Mistral and others pad each chunk with the beginning of the alphabet (and more), against guessing by length."""
    return isinstance(value, str) and "abcdefghijklmnopqrstuvwxyz".startswith(value[:26])


def _without_identity(message: dict[str, Any]) -> bytes:
    return respell({name: value for name, value in message.items() if name not in _IDENTITY})


def _open(value: dict[str, Any]) -> bytes:
    """A JSON object without its opening brace, to follow an identity."""
    return respell(value)[1:]


def _with_gaps(events: list[bytes]) -> tuple[bytes, ...]:
    """Segments whose gaps lie behind the opening brace of each event."""
    head = b"data: {"
    return (head, *(event + b"\n\n" + head for event in events[:-1]), events[-1] + b"\n\ndata: [DONE]\n\n")
