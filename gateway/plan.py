"""Understanding a request: what would be sent upstream, under which key it is remembered, and what the cache may do
with it.

The same plan serves the pipeline and ``/admin/explain``, so what is explained is what happens.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cache.response.canonical import BadBody, Identity, Scope, identify, parse, respell
from cache.response.tags import scopes_of, tag_scopes
from gateway.config import Cache, Config, TenantCache
from gateway.config.units import parse_time
from gateway.dialects.base import Dialect
from gateway.http import Request
from gateway.tenants import Caller
from policies.cacheability import Sampled, Verdict, judge
from policies.freshness import Directives, Lifetime, parse_cache_control

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
NAME_FORM = "1 to 128 letters, digits, or any of . _ : / @ - (but first a letter or digit)"
_MAX_TAGS = 16
_MAX_NAMES = 4096
"""Models remembered; callers choose their names."""
_NEVER_SENT = frozenset(("cache_salt", "kv_transfer_params"))
"""What upstreams hear from the gateway alone."""
_NO_SETTINGS = TenantCache()
NOWHERE = Identity(b"", b"")
"""The identity of a request that takes no part in the cache: making one costs more than passing the request on."""


class BadRequest(ValueError):
    """The request cannot be understood; the message is one sentence for the caller."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as asked for (``name``) and as sent upstream (``target``, at the operator's ``revision``)."""

    name: str
    target: str
    revision: str
    fallback: tuple[str, ...] = ()
    faq: bool = False
    prompt_cache: bool = False


@dataclass(slots=True)
class Plan:
    """All that is decided about a request before anything is looked up."""

    dialect: Dialect
    caller: Caller
    body: Mapping[str, Any]
    model: Model
    verdict: Verdict
    directives: Directives
    identity: Identity
    namespace: str
    tags: tuple[str, ...]
    lifetime: Lifetime
    sampled: bool
    repeatable: bool
    outgoing: bytes
    echo: bytes
    """What its answer repeats of its own bookkeeping (`Dialect.echo`)."""
    renews: bool
    """Whether its answer may take the place of one that is fresh, but not for this caller."""

    @property
    def streams(self) -> bool:
        """Whether the caller wants a stream."""
        return self.dialect.streams(self.body)

    @property
    def question(self) -> str:
        """What its user last asked; the empty string where that is no text."""
        asked = [turn.text for turn in self.dialect.ask(self.body).turns if turn.role == "user"]
        return (asked[-1] or "") if asked else ""

    @property
    def may_serve(self) -> bool:
        """Whether the caller takes anything but a new answer."""
        return not self.directives.no_cache and not self.directives.no_store

    @property
    def may_recall(self) -> bool:
        """Whether a stored answer may serve it."""
        return self.verdict.cacheable and self.may_serve

    @property
    def may_keep(self) -> bool:
        """Whether its answer may be stored."""
        return self.verdict.cacheable and not self.directives.no_store and self.lifetime.ttl > 0

    @property
    def may_join(self) -> bool:
        """Whether it may share an upstream call with equal requests: never when sampled, never past ``no-cache``."""
        return self.may_recall and self.may_keep and not self.sampled

    @property
    def tag_scopes(self) -> tuple[str, ...]:
        """Those scopes that the caller named itself."""
        return tag_scopes(self.tags)

    @property
    def scopes(self) -> tuple[str, ...]:
        """Every scope by which its stored answer can be purged."""
        return scopes_of(
            key=self.identity.key,
            tenant=self.caller.tenant,
            namespace=self.namespace,
            model=self.model.target,
            tags=self.tags,
        )


class Planner:
    """Makes plans by one configuration. ``secret`` (bytes) is what tenant salts are made with."""

    def __init__(self, config: Config, secret: bytes) -> None:
        self._config = config
        self._secret = secret
        self._revisions = {alias.target: alias.revision or "" for alias in config.models.values()}
        self._tenants = {tenant.name: tenant.cache for tenant in config.tenants}
        self._salts: dict[str, str] = {}
        self._models: dict[str, Model] = {}
        self._rules: dict[tuple[str, str, str], _Rule] = {}

    def model(self, name: str) -> Model:
        """What a model name stands for."""
        found = self._models.get(name)
        if found is None:
            if len(self._models) >= _MAX_NAMES:
                self._models.clear()
            found = self._models[name] = self._model(name)
        return found

    def _model(self, name: str) -> Model:
        alias = self._config.models.get(name)
        if alias is None:
            return Model(name, name, self._revisions.get(name, ""))
        revision = alias.revision if alias.revision is not None else self._revisions.get(alias.target, "")
        return Model(name, alias.target, revision, alias.fallback, alias.faq, alias.prompt_cache)

    def salt(self, tenant: str) -> str:
        """What an engine keeps this tenant's prefixes apart by; it tells nothing of the tenant to whoever lacks the
        secret.
        """
        salt = self._salts.get(tenant)
        if salt is None:
            made = hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()
            salt = self._salts[tenant] = made[:32]
        return salt

    def plan(self, request: Request, dialect: Dialect, caller: Caller, body: Mapping[str, Any]) -> Plan:
        """Understands a request with a parsed ``body``; raises `BadRequest`, or `Denied` for a model out of bounds."""
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise BadRequest("The request must name a 'model' (a text).")
        model = self.model(name)
        caller.require(model.name)
        directives = parse_cache_control(request.header(b"cache-control") or "")
        namespace = _label(request, b"x-warmgate-namespace")
        asked_ttl = _seconds(request, b"x-warmgate-ttl")
        own = self._tenants.get(caller.tenant, _NO_SETTINGS)
        rule = self._rule(caller.tenant, own, model, dialect.path)
        opted_in = bool(asked_ttl) or bool(directives.max_age) or directives.only_if_cached
        sampled: Sampled = "faq" if model.faq and rule.sampled == "never" else rule.sampled
        ask = dialect.ask(body)
        verdict = judge(ask, sampled=sampled, opted_in=opted_in)
        if verdict.cacheable and not isinstance(body.get("stream"), bool | None):  # upstreams read it differently
            verdict = Verdict(False, "'stream' is neither true nor false")
        temperature_zero = ask.always_deterministic or (ask.temperature is not None and ask.temperature == 0)
        try:
            identity = (
                self._identity(request, dialect, caller, body, model, namespace) if verdict.cacheable else NOWHERE
            )
            outgoing = self._outgoing(request.body, body, model, dialect, caller.tenant)
            echo = dialect.echo(body)
        except BadBody as error:
            raise BadRequest(str(error)) from None
        return Plan(
            dialect=dialect,
            caller=caller,
            body=body,
            model=model,
            verdict=verdict,
            directives=directives,
            identity=identity,
            namespace=namespace,
            tags=_tags(request),
            lifetime=self._lifetime(rule, own, asked_ttl),
            sampled=not temperature_zero,
            repeatable=not ask.side_effects,
            outgoing=outgoing,
            echo=echo,
            renews=directives.no_cache,
        )

    def _identity(
        self,
        request: Request,
        dialect: Dialect,
        caller: Caller,
        body: Mapping[str, Any],
        model: Model,
        namespace: str,
    ) -> Identity:
        scope = Scope(
            dialect=dialect.name,
            tenant=caller.tenant,
            namespace=namespace,
            model=model.target,
            revision=model.revision,
            vary=varying(request, dialect),
        )
        return identify(scope, {**body, "model": model.target}, dialect.excluded)

    def instead(self, plan: Plan, model: Model) -> Plan:
        """The same request to another model."""
        request = respell({**plan.body, "model": model.name})
        outgoing = self._outgoing(request, {**plan.body, "model": model.name}, model, plan.dialect, plan.caller.tenant)
        return replace(plan, model=model, outgoing=outgoing)

    def salted(self, plan: Plan) -> bytes:
        """The outgoing body with the tenant's salt, for an upstream that keeps prefixes apart by it."""
        salt = b'{"cache_salt":"%s",' % self.salt(plan.caller.tenant).encode()
        return salt + plan.outgoing.lstrip()[1:]

    def _outgoing(self, raw: bytes, body: Mapping[str, Any], model: Model, dialect: Dialect, tenant: str) -> bytes:
        """The caller's own bytes wherever no field had to change."""
        changes = dialect.prepare(body)
        if model.prompt_cache:
            changes |= dialect.hint(body, self.salt(tenant))
        if model.target != model.name:
            changes["model"] = model.target
        if not changes and _NEVER_SENT.isdisjoint(body):
            return raw
        return respell({name: value for name, value in {**body, **changes}.items() if name not in _NEVER_SENT})

    def _rule(self, tenant: str, own: TenantCache, model: Model, path: str) -> _Rule:
        key = (tenant, model.name, path)
        rule = self._rules.get(key)
        if rule is None:
            if len(self._rules) >= _MAX_NAMES:
                self._rules.clear()
            rule = self._rules[key] = _Rule(self._config.cache, own, tenant, model, path)
        return rule

    def _lifetime(self, rule: _Rule, own: TenantCache, asked_ttl: float | None) -> Lifetime:
        ceiling = self._config.cache.max_ttl
        if own.max_ttl is not None:
            ceiling = min(ceiling, own.max_ttl)
        ttl = rule.ttl if asked_ttl is None or rule.never else asked_ttl
        return Lifetime(min(ttl, ceiling), rule.while_revalidate, rule.if_error, self._config.cache.keep_stale)


class _Rule:
    """The settings that hold for one tenant, model and path: the first rule that matches, then the defaults."""

    def __init__(self, cache: Cache, own: TenantCache, tenant: str, model: Model, path: str) -> None:
        self.ttl = cache.ttl
        self.while_revalidate = cache.stale_while_revalidate
        self.if_error = cache.stale_if_error
        self.sampled: Sampled = own.sampled or cache.sampled
        self.never = False
        for rule in cache.rules:
            names = (model.name, model.target)
            if (
                any(fnmatch.fnmatchcase(name, rule.match.model) for name in names)
                and fnmatch.fnmatchcase(tenant, rule.match.tenant)
                and fnmatch.fnmatchcase(path, rule.match.path)
            ):
                self.ttl = cache.ttl if rule.ttl is None else rule.ttl
                self.never = rule.ttl == 0
                self.while_revalidate = _given(rule.stale_while_revalidate, self.while_revalidate)
                self.if_error = _given(rule.stale_if_error, self.if_error)
                self.sampled = rule.sampled or self.sampled
                return


def varying(request: Request, dialect: Dialect) -> tuple[tuple[str, str], ...]:
    """What besides the body may change the answer: the dialect's headers, and a query, which is sent upstream as it is
    (``api-version`` and the like).
    """
    headers = tuple((name, request.header(name.encode()) or "") for name in dialect.vary)
    return (*headers, ("?", request.query.decode("latin-1"))) if request.query else headers


def read_body(body: bytes) -> dict[str, Any]:
    """Parses a request body; raises `BadRequest`."""
    try:
        return parse(body)
    except BadBody as error:
        raise BadRequest(str(error)) from None


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def is_name(text: str) -> bool:
    """Whether a namespace or a tag may be called so (`NAME_FORM`)."""
    return _NAME.fullmatch(text) is not None


def _label(request: Request, header: bytes) -> str:
    value = request.header(header)
    if value is None:
        return ""
    if not is_name(value):
        raise BadRequest(f"The header {header.decode()} must be {NAME_FORM}.")
    return value


def _tags(request: Request) -> tuple[str, ...]:
    value = request.header(b"x-warmgate-tags")
    if value is None:
        return ()
    tags = tuple(dict.fromkeys(tag.strip() for tag in value.split(",") if tag.strip()))
    if len(tags) > _MAX_TAGS or not all(map(is_name, tags)):
        raise BadRequest(
            f"The header x-warmgate-tags must hold at most {_MAX_TAGS} names, separated by commas, each {NAME_FORM}."
        )
    return tags


def _seconds(request: Request, header: bytes) -> float | None:
    value = request.header(header)
    if value is None:
        return None
    try:
        return parse_time(value)
    except ValueError as error:
        raise BadRequest(f"The header {header.decode()} {error}.") from None
