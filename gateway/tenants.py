"""Who is asking, and may they: API keys (hashed at rest) to tenants, the models they may use, and their limits.

Nothing is served, joined or routed before `Tenants.admit` has let the caller in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.clock import Clock
from gateway.config import Config
from gateway.http import Request
from policies.limits import Bucket

DEFAULT = "default"


class Denied(Exception):
    """The caller is refused: HTTP status, a sentence, OpenAI's error code, and seconds to wait where that helps."""

    def __init__(self, status: int, message: str, code: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after


@dataclass(slots=True)
class Usage:
    """What a tenant has under way and left to spend; shared by all its keys."""

    concurrent: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """An admitted caller. ``models``: the names it may ask for, None for all."""

    tenant: str
    models: frozenset[str] | None = None
    max_concurrent: int | None = None
    usage: Usage = field(default_factory=Usage, compare=False)

    def require(self, model: str) -> None:
        """Raises `Denied` unless the caller may use ``model``."""
        if self.models is not None and model not in self.models:
            raise Denied(403, f"This key may not use the model {model[:100]!r}.", "model_not_allowed")


class Tenants:
    """Admission by key. Without configured tenants everybody is the one tenant ``default``.

    Every admitted request counts once against its tenant's limits, whether it turns out a hit or a miss; a refused one
    does not. Tokens count when known, as served to the caller.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._clock = clock
        self._open = Caller(DEFAULT)
        self._by_digest: dict[bytes, Caller] = {}
        now = clock.monotonic()
        for tenant in config.tenants:
            limits = tenant.limits
            usage = Usage(
                requests=Bucket(limits.requests_per_minute, now) if limits.requests_per_minute is not None else None,
                tokens=Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute is not None else None,
            )
            for key in tenant.keys:
                models = _narrowed(tenant.models, key.models)
                self._by_digest[key.key.digest()] = Caller(tenant.name, models, limits.concurrent, usage)

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return not self._by_digest

    def identify(self, request: Request) -> Caller:
        """The caller of a request, by its key alone; raises `Denied` (401)."""
        if self.is_open:
            return self._open
        key = presented_key(request)
        if key is None:
            raise Denied(
                401,
                "No API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                "missing_api_key",
            )
        caller = self._by_digest.get(hashlib.sha256(key.encode("latin-1")).digest())
        if caller is None:
            raise Denied(401, "This API key is not known here.", "invalid_api_key")
        return caller

    def admit(self, caller: Caller) -> None:
        """Counts one request of the caller; raises `Denied` (429). The caller must be given to `release` afterwards."""
        usage, now = caller.usage, self._clock.monotonic()
        if caller.max_concurrent is not None and usage.concurrent >= caller.max_concurrent:
            raise Denied(
                429,
                f"More than {caller.max_concurrent} requests of this tenant are under way.",
                "too_many_concurrent",
                1,
            )
        if usage.tokens is not None and (wait := usage.tokens.take(0, now)) > 0:
            raise Denied(429, "The tenant's tokens for this minute are spent.", "rate_limit_exceeded", math.ceil(wait))
        if usage.requests is not None and (wait := usage.requests.take(1, now)) > 0:
            raise Denied(
                429, "The tenant's requests for this minute are spent.", "rate_limit_exceeded", math.ceil(wait)
            )
        usage.concurrent += 1

    def release(self, caller: Caller, served: dict[str, int] | None) -> None:
        """The caller's request is over; ``served`` are its tokens, as far as known."""
        caller.usage.concurrent -= 1
        if caller.usage.tokens is not None and served:
            spent = served.get("prompt", 0) + served.get("output", 0)
            caller.usage.tokens.spend(spent, self._clock.monotonic())


def presented_key(request: Request) -> str | None:
    """The key a caller shows: ``Authorization: Bearer`` (OpenAI's form), else ``x-api-key`` (Anthropic's)."""
    authorization = request.header(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return request.header(b"x-api-key") or None


def _narrowed(tenant: Iterable[str] | None, key: Iterable[str] | None) -> frozenset[str] | None:
    if tenant is None or key is None:
        chosen = key if tenant is None else tenant
        return None if chosen is None else frozenset(chosen)
    return frozenset(tenant) & frozenset(key)
