"""Endpoints that never stream and whose answers have no identity of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.base import Answer, Dialect, Rendered
from gateway.dialects.events import EventCollector
from policies.cacheability import Outcome


class PlainDialect(Dialect):
    """Base of the dialects without a stream. Should an upstream stream all the same, it is passed on and not kept."""

    def prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def wants_usage(self, body: Mapping[str, Any]) -> bool:
        return False

    def collector(self, body: Mapping[str, Any]) -> EventCollector:
        return _Unexpected()

    def render(self, message: bytes) -> Rendered:
        return Rendered((message,), (), ())

    def identity(self, now: float) -> bytes:
        return b""

    def curated(self, body: Mapping[str, Any], model: str, text: str) -> bytes | None:
        return None

    @staticmethod
    def streams(body: Mapping[str, Any]) -> bool:
        return False


class _Unexpected(EventCollector):
    """A stream that nobody asked for."""

    done_ends = True

    def join(self, name: str, data: dict[str, Any]) -> None:
        self.refuse("a stream from an endpoint that has none")

    def usage(self) -> dict[str, int]:
        return {}

    def answer(self) -> Answer:
        return Answer(None, Outcome(fault="a stream from an endpoint that has none"))
