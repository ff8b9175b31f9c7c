"""What is printed: what a configuration would run, and once all is up, a request to try and where to look."""

import json
import shlex

from gateway.config import Config


def address(host: str, port: int) -> str:
    """The base URL under which this machine reaches a listening address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(config: Config, model: str | None) -> str:
    """Several lines; ``model`` is the embedded engine's, otherwise the first one that the configuration names."""
    base = address(config.listen.host, config.listen.port)
    body = {
        "model": model or _first_name(config),
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    lines = [f"curl -i {base}/v1/chat/completions", "-H 'content-type: application/json'"]
    if config.tenants:
        lines.append(f'-H "authorization: Bearer {_key_hint(config)}"')
    lines.append(f"-d {shlex.quote(json.dumps(body))}")
    command = " \\\n      ".join(lines)
    return f"""
  Warmgate is ready on {base}

    Try it, then try it again (the second answer comes from the cache; see its Cache-Status header):

      {command}

    Dashboard: {base}/dashboard
"""


def _first_name(config: Config) -> str:
    named = [*config.models, *(name for upstream in config.upstreams for name in upstream.models or ())]
    return named[0] if named else "MODEL"


def _key_hint(config: Config) -> str:
    """The variable that holds a key, for the shell to fill in; never the key."""
    reference = str(config.tenants[0].keys[0].key)
    return f"${reference.removeprefix('env:')}" if reference.startswith("env:") else "YOUR-KEY"


def overview(config: Config) -> str:
    """What `warmgate serve` would run, a line each."""
    workers = config.listen.workers
    rows = [
        ("gateway", f"{address(config.listen.host, config.listen.port)}, {workers} worker{'s' if workers > 1 else ''}"),
        ("callers", ", ".join(tenant.name for tenant in config.tenants) or "open to this machine, tenant 'default'"),
    ]
    if config.engine:
        rows.append(("engine", f"{config.engine.model} ({config.engine.device}, {config.engine.dtype})"))
    for upstream in config.upstreams:
        models = "its own models" if upstream.models is None else ", ".join(upstream.models)
        rows.append(("upstream", f"{upstream.name}: {upstream.url} ({upstream.api}; {models})"))
    if config.upstreams_file is not None:
        rows.append(("upstreams", f"those in {config.upstreams_file}"))
    elif not config.engine and not config.upstreams:
        rows.append(("upstream", "none: only remembered and curated answers can be given"))
    rows += [
        ("alias", f"{name} stands for {alias.target}") for name, alias in config.models.items() if name != alias.target
    ]
    if config.cache.memory:
        rows.append(("memory", f"{_size(config.cache.memory.max_bytes)}, {config.cache.memory.eviction}"))
    if config.cache.redis:
        rows.append(("redis", str(config.cache.redis.url)))
    elif config.cache.disk:
        rows.append(("disk", f"{config.cache.disk.path}, {_size(config.cache.disk.max_bytes)}"))
    if config.faq.path:
        rows.append(("faq", str(config.faq.path)))
    return "\n".join(f"{name:>9}  {text}" for name, text in rows)


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:g} {unit}"
    return f"{count} B"
