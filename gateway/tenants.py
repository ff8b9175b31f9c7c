"""Who is asking, and may they: API keys (hashed at rest) to tenants, the models they may use, and their limits.

Nothing is served, joined or routed before `Tenants.admit` has let the caller in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.config import Config
from gateway.http import Request
from gateway.limits import Usage, Usages

DEFAULT = "default"


class Denied(Exception):
    """The caller is refused: HTTP status, a sentence, OpenAI's error code, and seconds to wait where that helps."""

    def __init__(self, status: int, message: str, code: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``models``: the names it may ask for, None for all; ``usage`` is that of its whole tenant."""

    tenant: str
    usage: Usage = field(compare=False)
    models: frozenset[str] | None = None

    def require(self, model: str) -> None:
        """Raises `Denied` unless the caller may use ``model``."""
        if self.models is not None and model not in self.models:
            raise Denied(403, f"This key may not use the model {model[:100]!r}.", "model_not_allowed")


class Tenants:
    """Admission by key. Without configured tenants everybody is the one tenant ``default``."""

    def __init__(self, config: Config, usages: Usages) -> None:
        self._usages = usages
        self._by_digest: dict[bytes, Caller] = {}
        self._open = self.caller(DEFAULT)
        for tenant in config.tenants:
            usage = usages.of(tenant.name)
            usage.apply(tenant.limits)
            for key in tenant.keys:
                self._by_digest[key.key.digest()] = Caller(tenant.name, usage, _narrowed(tenant.models, key.models))

    def caller(self, tenant: str) -> Caller:
        """Somebody of this tenant who may use every model."""
        return Caller(tenant, self._usages.of(tenant))

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

    async def admit(self, caller: Caller) -> None:
        """Counts one request of the caller (see `gateway.limits`), who must be released afterwards; raises `Denied`
        (429).
        """
        usage = caller.usage
        if not usage.admit_at_once() and (refusal := await usage.admit()) is not None:
            raise Denied(429, refusal.message, refusal.code, math.ceil(refusal.wait))


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
