"""What chat completions and completions share: choices that end with a finish reason, chunks, usage, errors."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.base import Answer, BrokenStream, Collector, Dialect, Piece, Rendered, Unjoinable
from gateway.sse import Event, frame
from policies.cacheability import Outcome

EXCLUDED = {
    "stream": "delivery: one entry serves both forms",
    "stream_options": "delivery",
    "user": "bookkeeping of the provider",
    "metadata": "bookkeeping of the provider",
    "store": "bookkeeping of the provider; true is not cacheable at all",
    "safety_identifier": "bookkeeping of the provider",
    "prompt_cache_key": "a hint where the prefix may be cached",
    "prompt_cache_retention": "a hint how long the prefix may be cached",
    "cache_salt": "replaced by the gateway's own",
    "priority": "order of service",
}

_DONE = b"[DONE]"
_IDENTITY = ("id", "created")
_OF_ONE_CHUNK = frozenset(("object", "choices", "usage", "obfuscation", *_IDENTITY))


def error_body(status: int, message: str, code: str | None) -> bytes:
    """OpenAI's error form."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def usage_of(usage: object) -> dict[str, int]:
    """Tokens as the ledger counts them, of an OpenAI ``usage`` object; fields that are missing or absurd stay out."""
    if not isinstance(usage, dict):
        return {}
    details = usage.get("prompt_tokens_details")
    found = {
        "prompt": usage.get("prompt_tokens"),
        "output": usage.get("completion_tokens"),
        "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
    }
    return {name: count for name, count in found.items() if type(count) is int and 0 <= count < 2**40}


class OpenAIDialect(Dialect):
    """Base of the two dialects with ``choices``."""

    excluded = EXCLUDED
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
            message = orjson.loads(answer)
        except orjson.JSONDecodeError:
            return Answer(None, Outcome(fault="not JSON"))
        if not isinstance(message, dict):
            return Answer(None, Outcome(fault="not a JSON object"))
        usage = usage_of(message.get("usage"))
        if message.get("error"):
            return Answer(None, Outcome(fault="an error with a success status"), usage)
        choices = message.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            return Answer(None, Outcome(fault="incomplete: no choices"), usage)
        return Answer(_without_identity(message), finished(choices, expected(body)), usage)

    def collector(self, body: Mapping[str, Any]) -> ChunkCollector:
        return ChunkCollector(self, expected(body))

    def render(self, message: bytes) -> Rendered:
        whole: dict[str, Any] = orjson.loads(message)
        chunks, usage = self.chunks(whole)
        gaps = tuple(b"data: " + _open(chunk) + b"\n\n" for chunk in chunks)
        usages = (b"data: " + _open(usage) + b"\n\n",) if usage else ()
        return Rendered((b"{", _open(whole)), _with_gaps(gaps), _with_gaps(gaps + usages))

    def identity(self, now: float) -> bytes:
        return b'"id":"%s%s","created":%d,' % (self.id_prefix.encode(), secrets.token_hex(14).encode(), int(now))

    def error(self, status: int, message: str, code: str | None = None) -> bytes:
        return error_body(status, message, code)

    def error_event(self, message: str, code: str) -> bytes:
        return frame(error_body(502, message, code))

    def chunks(self, whole: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """A plain message as its chunks without identity, and its usage chunk if it has usage."""
        frame_fields = {"object": self.chunk_object}
        frame_fields |= {name: whole[name] for name in ("model", "system_fingerprint", "service_tier") if name in whole}
        extra = {k: v for k, v in whole.items() if k not in frame_fields and k not in ("object", "choices", "usage")}
        chunks: list[dict[str, Any]] = []
        for position, choice in enumerate(whole["choices"]):
            index = choice.get("index", position)
            for part in self.split(choice):
                chunks.append({**frame_fields, **extra, "choices": [{"index": index, **part}]})
                extra = {}
        usage = whole.get("usage")
        return chunks, {**frame_fields, "choices": [], "usage": usage} if usage is not None else None

    @abstractmethod
    def split(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """A plain choice as the parts of its chunks, without ``index``: role first, finish reason last and once."""

    @abstractmethod
    def add(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        """Adds the part of one chunk to a plain choice in place; raises `Unjoinable`."""

    @abstractmethod
    def complete(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A joined choice in its plain form; raises `Unjoinable`."""

    @abstractmethod
    def is_empty(self, part: dict[str, Any]) -> bool:
        """Whether the part of a chunk says nothing (as beside a usage report)."""


class ChunkCollector(Collector):
    """Joins chunks, and keeps the usage report from callers who did not ask for it."""

    def __init__(self, dialect: OpenAIDialect, expected_choices: int) -> None:
        self._dialect = dialect
        self._expected = expected_choices
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] | None = None
        self._done = False
        self._error = ""
        self._unjoinable = ""

    @property
    def ended(self) -> bool:
        return self._done or bool(self._error)

    def feed(self, event: Event) -> Piece:
        if event.data is None or (event.name and event.name not in ("message", "error")):
            return Piece.same(event.raw)
        if event.data == _DONE:
            self._done = True
            return Piece.same(event.raw)
        if self._done:
            self._unjoinable = "an event after the end"
            return Piece.same(b"")
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            raise BrokenStream("an event that is not JSON") from None
        if not isinstance(chunk, dict):
            raise BrokenStream("an event that is not a JSON object")
        if event.name == "error" or chunk.get("error"):
            self._error = "an error event"
            return Piece.same(event.raw)
        try:
            return self._chunk(event.raw, chunk)
        except Unjoinable as error:
            self._unjoinable = f"cannot be joined: {error}"
        except (TypeError, AttributeError, KeyError):
            self._unjoinable = "cannot be joined: unknown chunk form"
        return Piece.same(event.raw)

    def close(self) -> Answer:
        usage = usage_of(self._usage)
        if self._error:
            return Answer(None, Outcome(fault=self._error), usage)
        if not self._done:
            return Answer(None, Outcome(fault="incomplete: the stream did not end as it should"), usage)
        if self._unjoinable:
            return Answer(None, Outcome(fault=self._unjoinable), usage)
        choices = [self._choices[index] for index in sorted(self._choices)]
        outcome = finished(choices, self._expected)
        try:
            message = {"object": self._dialect.answer_object, **self._top}
            message["choices"] = [self._dialect.complete(choice) for choice in choices]
        except Unjoinable as error:
            return Answer(None, Outcome(fault=f"cannot be joined: {error}"), usage)
        if self._usage is not None:
            message["usage"] = self._usage
        return Answer(_without_identity(message), outcome, usage)

    def _chunk(self, raw: bytes, chunk: dict[str, Any]) -> Piece:
        piece = self._without_usage(raw, chunk)
        self._top.update((k, v) for k, v in chunk.items() if v is not None and k not in _OF_ONE_CHUNK)
        for part in chunk.get("choices") or ():
            index = part.get("index", 0)
            if type(index) is not int:
                raise Unjoinable("a choice without a number")
            choice = self._choices.setdefault(index, {"index": index})
            self._dialect.add(choice, {name: value for name, value in part.items() if name != "index"})
        return piece

    def _without_usage(self, raw: bytes, chunk: dict[str, Any]) -> Piece:
        usage = chunk.get("usage")
        if usage is None:
            return Piece.same(raw)
        self._usage = usage
        if all(self._dialect.is_empty(part) for part in chunk.get("choices") or ()):
            chunk["choices"] = []
            return Piece(raw, b"")
        bare = {name: value for name, value in chunk.items() if name != "usage"}
        return Piece(raw, frame(orjson.dumps(bare)))


def expected(body: Mapping[str, Any]) -> int:
    """How many choices the caller asked for."""
    n = body.get("n")
    return n if type(n) is int and n > 0 else 1


def finished(choices: list[dict[str, Any]], wanted: int) -> Outcome:
    """Every choice that was asked for must be there and have ended."""
    reasons = tuple(choice.get("finish_reason") for choice in choices)
    if not choices:
        return Outcome(fault="incomplete: no choices")
    if len(choices) < wanted or not all(isinstance(reason, str) and reason for reason in reasons):
        return Outcome(fault="incomplete: a choice without a finish reason")
    return Outcome(finishes=tuple(str(reason) for reason in reasons))


def _without_identity(message: dict[str, Any]) -> bytes:
    return orjson.dumps({name: value for name, value in message.items() if name not in _IDENTITY})


def _open(value: dict[str, Any]) -> bytes:
    """A JSON object without its opening brace, to follow an identity."""
    return orjson.dumps(value)[1:]


def _with_gaps(events: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Segments whose gaps lie behind the opening brace of each event."""
    head = b"data: "
    joined = [event.removeprefix(head) for event in events]
    return (head + b"{", *(part + head + b"{" for part in joined[:-1]), joined[-1] + b"data: [DONE]\n\n")
