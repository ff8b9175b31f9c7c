"""How long an answer lives and whether it may be served now: HTTP's own words (RFC 9111, RFC 5861) on plain values.

All durations are seconds. Nothing here reads a clock: callers pass ages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Freshness = Literal["fresh", "stale", "revalidate", "expired"]


@dataclass(frozen=True, slots=True)
class Directives:
    """A request's ``Cache-Control``; None where a directive was not given; a bare ``max-stale`` is infinite."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age: float | None = None
    max_stale: float | None = None
    stale_if_error: float | None = None


_NOTHING_ASKED = Directives()


@dataclass(slots=True)
class Lifetime:
    """How long an answer is fresh, and how long it may serve after that: while it is renewed, when the upstream fails,
    or because a caller accepts it stale (``on_request``).
    """

    ttl: float
    while_revalidate: float = 0.0
    if_error: float = 0.0
    on_request: float = 0.0

    @property
    def kept(self) -> float:
        """Seconds from birth after which no rule could serve it."""
        return self.ttl + max(self.while_revalidate, self.if_error, self.on_request)


def parse_cache_control(value: str) -> Directives:
    """Reads a request's ``Cache-Control`` (RFC 9111 section 5.2.1). Unknown directives are ignored, as the RFC asks;
    an unreadable number reads as the cautious one: ``max-age`` 0, nothing stale.
    """
    if not value:
        return _NOTHING_ASKED
    found: dict[str, str | None] = {}
    for part in value.split(","):
        name, equals, argument = part.strip().partition("=")
        found[name.strip().lower()] = argument.strip().strip('"') if equals else None

    def seconds(name: str, *, bare: float) -> float | None:
        if name not in found:
            return None
        argument = found[name]
        if argument is None:
            return bare
        return float(argument) if argument.isascii() and argument.isdigit() else 0.0

    return Directives(
        no_cache="no-cache" in found,
        no_store="no-store" in found,
        only_if_cached="only-if-cached" in found,
        max_age=seconds("max-age", bare=0.0),
        max_stale=seconds("max-stale", bare=math.inf),
        stale_if_error=seconds("stale-if-error", bare=0.0),
    )


def freshness(age: float, expires_in: float, while_revalidate: float, directives: Directives) -> Freshness:
    """Whether an answer of this ``age`` may be served to a request with these ``directives``.

    ``fresh``: as it is; ``revalidate``: at once, while it is renewed behind (RFC 5861, ``while_revalidate`` seconds
    after it expired); ``stale``: the caller accepts it so (``max-stale``); ``expired``: only if the upstream fails.
    """
    if directives.max_age is not None and age > directives.max_age:
        return "expired"
    if expires_in > 0:
        return "fresh"
    if -expires_in < while_revalidate:
        return "revalidate"
    return "stale" if directives.max_stale is not None and -expires_in <= directives.max_stale else "expired"


def serves_after_error(age: float, expires_in: float, if_error: float, directives: Directives) -> bool:
    """Whether an ``expired`` answer may serve when the upstream fails (RFC 5861): as long past what the caller accepts
    as it says itself, else as the operator says (``if_error``).
    """
    allowed = if_error if directives.stale_if_error is None else directives.stale_if_error
    over_age = age - directives.max_age if directives.max_age is not None else -math.inf
    return 0 < allowed >= max(-expires_in, over_age)
