"""The configuration as typed, frozen values. Every key is optional; an unknown key is an error.

Sizes are int bytes, times float seconds, paths absolute (or relative to the working directory when no file was read),
secrets are references (`gateway.config.secret`).
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from gateway.config.fields import (
    Amount,
    AutoBytes,
    AutoOrOff,
    Bytes,
    Count,
    Device,
    Few,
    FileOrOutput,
    FilePath,
    HttpUrl,
    KeyRef,
    Name,
    Off,
    Port,
    RedisUrl,
    RemoteUrl,
    Seconds,
    SecretRef,
    Share,
    SocketUrl,
    Switch,
    Text,
    base_folder,
    expand_home,
)
from gateway.config.secret import Secret

MIB, GIB = 1 << 20, 1 << 30
DAY = 86_400.0
ENGINE_UPSTREAM = "engine"

Sampled = Literal["never", "faq", "always"]


class Section(BaseModel):
    """Base of every part: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


class Listen(Section):
    host: Text = "127.0.0.1"
    port: Port = 8080  # 0: any free port
    workers: Count = 1

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


class Admin(Section):
    key: KeyRef | None = None  # without it, /admin and /dashboard answer on loopback only


class Timeouts(Section):
    connect: Seconds = 5.0
    first_byte: Seconds = 600.0
    idle: Seconds = 300.0  # between two reads of one answer
    total: Seconds = 3600.0


class KvEvents(Section):
    """Where an upstream tells what it holds. For a ``tcp://`` endpoint vLLM connects, so that the gateway binds."""

    bind: SocketUrl | None = None
    connect: SocketUrl | None = None
    replay: SocketUrl | None = None
    block_size: Count | None = None  # None: whatever the events say

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if (self.bind is None) == (self.connect is None):
            raise ValueError("must hold one of 'bind' and 'connect'")
        return self


class Kubernetes(Section):
    """A service whose endpoints are upstreams, each like the one this stands in."""

    service: Name
    namespace: Name | None = None  # None: the gateway's own
    port: Text | None = None  # its name or number; None: the first
    api: HttpUrl | None = None  # of the API server; None: as every pod knows it


class Upstream(Section):
    """One server that speaks a dialect; the URL may end in /v1 or not, and may have a base path."""

    name: Name
    url: HttpUrl
    api: Literal["openai", "anthropic"] = "openai"
    api_key: SecretRef | None = None
    models: tuple[Text, ...] | None = None  # None: asked from /v1/models
    role: Literal["both", "prefill", "decode"] = "both"
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # its share of the traffic against that of others
    dns: bool = False  # one upstream for each address of the URL's host, looked up anew from time to time
    kubernetes: Kubernetes | None = None  # one upstream for each endpoint of a service
    cache_salt: bool = False  # send the tenant's salt, so that prefix reuse never crosses tenants
    timeouts: Timeouts = Timeouts()
    kv_events: KvEvents | None = None
    tokenizer: FilePath | None = None
    sentinel: Switch = "auto"  # whether canaries are sent to it; auto: to an engine of one's own
    labels: dict[str, str | float] = {}


class Slo(Section):
    ttft: Seconds | None = None
    tpot: Seconds | None = None  # per output token after the first
    total: Seconds | None = None


class ModelAlias(Section):
    """What a model name stands for; without a target the name stands for itself."""

    target: Text
    revision: Text | None = None
    fallback: tuple[Text, ...] = ()
    faq: bool = False
    prompt_cache: bool = False  # help the provider cache prefixes: prompt_cache_key, Anthropic's breakpoints
    slo: Slo = Slo()


class TenantKey(Section):
    """One API key; ``models`` narrows it further than its tenant."""

    key: KeyRef
    models: tuple[Text, ...] | None = None


class TenantLimits(Section):
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None
    usd_per_day: Amount | None = None  # what upstream calls cost by `prices` since midnight UTC; hits cost nothing


class TenantCache(Section):
    sampled: Sampled | None = None  # None: as under `cache`
    max_ttl: Seconds | None = None


def _tenant_key(value: object) -> object:
    return {"key": value} if isinstance(value, str | Secret) else value


class Tenant(Section):
    """Whose requests may share answers. A plain key ``K`` is the same as ``{key: K}``."""

    name: Name
    keys: tuple[Annotated[TenantKey, BeforeValidator(_tenant_key)], ...] = ()
    models: tuple[Text, ...] | None = None  # None: all
    limits: TenantLimits = TenantLimits()
    cache: TenantCache = TenantCache()


class MemoryCache(Section):
    max_bytes: Bytes = 256 * MIB
    eviction: Literal["s3fifo", "sieve", "lru"] = "s3fifo"


class DiskCache(Section):
    path: FilePath = Field(default_factory=lambda: Path.home() / ".cache" / "warmgate")
    max_bytes: Bytes = 4 * GIB


class RedisCache(Section):
    url: RedisUrl
    timeout: Seconds = 0.05
    prefix: Name = "wg"

    def address(self) -> str:
        """The URL itself. Raises SecretError where it is a reference that cannot be read."""
        return self.url.resolve() if isinstance(self.url, Secret) else self.url


class RuleMatch(Section):
    """Shell-style patterns (``*``, ``?``); all must match."""

    model: Text = "*"
    tenant: Text = "*"
    path: Text = "*"


class CacheRule(Section):
    """Overrides for matching requests; the first rule that matches counts."""

    match: RuleMatch = RuleMatch()
    ttl: Seconds | None = None  # 0: not stored, whatever the caller asks for
    stale_while_revalidate: Seconds | None = None
    stale_if_error: Seconds | None = None
    sampled: Sampled | None = None


class Cache(Section):
    memory: Annotated[MemoryCache | None, Off] = MemoryCache()
    disk: Annotated[DiskCache | None, Off] = Field(default_factory=DiskCache)  # used where redis is absent
    redis: Annotated[RedisCache | None, Off] = None
    ttl: Seconds = 3600.0
    max_ttl: Seconds = 7 * DAY  # ceiling for x-warmgate-ttl and s-maxage
    stale_while_revalidate: Seconds = 0.0
    stale_if_error: Seconds = 0.0
    keep_stale: Seconds = (
        3600.0  # kept this long after its time for callers who accept that (max-stale, stale-if-error)
    )
    max_entry: Bytes = MIB
    min_uses: Annotated[Count, Field(le=255)] = 1  # an answer is stored from this sighting of its question on
    sampled: Sampled = "never"  # requests with temperature above 0 or absent
    store_finish: tuple[Text, ...] = ("stop", "tool_calls")
    rules: tuple[CacheRule, ...] = ()
    holdout: Share = 0.01  # share of hits that are recomputed, to measure what was saved
    max_disagreement: Share = 0.1  # share of recomputed answers that may differ from those kept, before it is told
    disarm: bool = False  # whether what is kept then no longer answers, until answers agree again


class Limits(Section):
    max_body: Bytes = 16 * MIB  # of a request, after decompression


class Faq(Section):
    path: FilePath | None = None


class KvCache(Section):
    device: AutoBytes = "auto"
    host: Annotated[Bytes | None, Off] = None
    remote: RemoteUrl | None = None


def _engine_model(value: object, info: ValidationInfo) -> object:
    """A path (it holds a slash or ends in .gguf) is taken from the configuration's folder; a name is left alone."""
    if isinstance(value, str) and ("/" in value or value.endswith(".gguf")):
        return str(base_folder(info) / expand_home(value))
    return value


class EngineConfig(Section):
    """The embedded engine, run as a process of its own."""

    model: Annotated[Text, BeforeValidator(_engine_model)] = "smollm2-135m-instruct"
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: Count = 32
    kv_cache: KvCache = KvCache()
    speculate: AutoOrOff = "auto"


class Routing(Section):
    policy: Literal["prefix", "load", "round_robin", "sticky"] = "prefix"
    max_load_ratio: Annotated[float, Field(ge=1)] = 1.3
    probe: Seconds = 5.0  # between two looks at each upstream's health and load; 0: none


class Retry(Section):
    """Further tries where no upstream of a model was reached, or where one asks to come back (``retry-after``)."""

    rounds: Few = 2
    base: Seconds = 0.2  # the longest pause before the first round; doubled for each further one
    longest: Seconds = 5.0  # that a caller is kept waiting for a round


class Disaggregation(Section):
    """Long prompts are computed by upstreams of role prefill, their answers by those of role decode; ``auto``: where a
    model has both.
    """

    enabled: Switch = "auto"
    min_tokens: Count = 256  # prompt tokens that no cache holds, below which a request stays whole


class Ledger(Section):
    path: FilePath = Field(default_factory=lambda: Path.home() / ".local" / "state" / "warmgate" / "ledger.db")
    keep: Seconds = 30 * DAY
    max_bytes: Bytes = GIB
    store_prompts: bool = False


class Sentinels(Section):
    """Canaries that look for silent failures."""

    every: Annotated[Seconds, Field(ge=1)] = 45.0  # with what a round takes, a failure shows within a minute


class Telemetry(Section):
    otlp: HttpUrl | None = None
    access_log: FileOrOutput | None = None  # a JSON line a request; "-": standard output


def _alias_targets(value: object) -> object:
    """An alias without a target stands for itself: ``m1: {revision: "2"}``."""
    if not isinstance(value, dict):
        return value
    return {
        name: {"target": name, **alias} if isinstance(alias, dict) and isinstance(name, str) else alias
        for name, alias in value.items()
    }


class Config(Section):
    listen: Listen = Listen()
    admin: Admin = Admin()
    upstreams: tuple[Upstream, ...] = ()
    upstreams_file: FilePath | None = None  # more of them, read again when it changes: a file with `upstreams:`
    models: Annotated[dict[str, ModelAlias], BeforeValidator(_alias_targets)] = {}
    tenants: tuple[Tenant, ...] = ()  # none: open, everyone is the tenant "default"
    cache: Cache = Field(default_factory=Cache)
    limits: Limits = Limits()
    secret: SecretRef | None = None  # for tenant salts; None: made on first start, kept beside the disk cache
    faq: Faq = Faq()
    engine: Annotated[EngineConfig | None, Off] = None
    routing: Routing = Routing()
    retry: Retry = Retry()
    disaggregation: Disaggregation = Disaggregation()
    prices: FilePath | None = None
    ledger: Annotated[Ledger | None, Off] = Field(default_factory=Ledger)
    sentinels: Annotated[Sentinels | None, Off] = Sentinels()
    telemetry: Telemetry = Telemetry()

    @model_validator(mode="before")
    @classmethod
    def _default_engine(cls, data: Any) -> Any:
        """Whoever names no upstream gets the embedded engine; whoever names one gets it only when asked for."""
        if isinstance(data, dict) and not {"engine", "upstreams_file"} & data.keys() and not data.get("upstreams"):
            return {**data, "engine": {}}
        return data

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if complaints := [*self._clashes(), *self._openness(), *self._budgets()]:
            raise ValueError("\n".join(complaints))
        return self

    def _clashes(self) -> list[str]:
        complaints = []
        for section, items in (("upstreams", self.upstreams), ("tenants", self.tenants)):
            names = [item.name for item in items]
            complaints += [
                f"{section}[{index}].name '{name}' is used twice"
                for index, name in enumerate(names)
                if name in names[:index]
            ]
        complaints += [
            f"upstreams[{index}]: 'dns' and 'kubernetes' find addresses, for which no certificate is made out; "
            "use an http:// URL, or name the upstream by its host name alone"
            for index, one in enumerate(self.upstreams)
            if (one.dns or one.kubernetes) and one.url.startswith("https://")
        ]
        for name, alias in self.models.items():
            for target in (alias.target, *alias.fallback):
                if target != name and target in self.models and self.models[target].target != target:
                    complaints.append(f"models.{name} points at '{target}', which is itself an alias; name its target")
        return complaints

    def _budgets(self) -> list[str]:
        return [
            f"tenants[{index}].limits.usd_per_day needs 'prices': without them nobody knows what is spent"
            for index, tenant in enumerate(self.tenants)
            if tenant.limits.usd_per_day is not None and self.prices is None
        ]

    def _openness(self) -> list[str]:
        complaints = [
            f"tenants[{index}].keys is empty, so that nobody could use tenant '{tenant.name}'"
            for index, tenant in enumerate(self.tenants)
            if not tenant.keys
        ]
        if not self.listen.loopback and not self.tenants:
            complaints.append(
                f"listen.host '{self.listen.host}' would open the gateway to the network without keys; "
                "add tenants with keys, or listen on 127.0.0.1"
            )
        return complaints

    @property
    def open(self) -> bool:
        """Whether callers need no key (only ever on loopback)."""
        return not self.tenants
