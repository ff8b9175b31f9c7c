"""Where the configuration comes from, so that it can be read again while the gateway runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cache.response.faq import FaqError, load_faq
from gateway.config import ENGINE_UPSTREAM, Config, ConfigError, load_config, unreadable_secrets
from gateway.ledger.settings import load_prices
from policies.pricing import PriceError

FIGURES = ("prefill_per_second", "watts", "cost_per_hour")
"""Labels of upstreams that figures are made of (`gateway.effective`): numbers."""


@dataclass(frozen=True)
class Source:
    """A file (or none) and the flags of the command line; the environment is the process's own."""

    path: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def read(self) -> Config:
        """The configuration, its secrets and curated answers checked as well. Raises ConfigError."""
        config = load_config(self.path, os.environ, self.flags)
        if faults := shortcomings(config):
            raise ConfigError(faults)
        return config

    def to_json(self) -> str:
        return json.dumps({"path": str(self.path) if self.path else None, "flags": self.flags})

    @classmethod
    def from_json(cls, text: str) -> Source:
        data = json.loads(text)
        return cls(Path(data["path"]) if data["path"] else None, data["flags"])


def shortcomings(config: Config) -> list[str]:
    """Why a well-formed configuration still cannot be run, one sentence each."""
    taken = [
        f"upstreams[{index}].name '{ENGINE_UPSTREAM}' is the embedded engine's; choose another, or set engine: off"
        for index, upstream in enumerate(config.upstreams)
        if config.engine and upstream.name == ENGINE_UPSTREAM
    ]
    return [
        *taken,
        *_label_faults(config),
        *_missing_model(config),
        *unreadable_secrets(config),
        *_faq_faults(config),
        *_price_faults(config),
        *_telemetry_faults(config),
    ]


def missing_tokenizers(config: Config) -> list[str]:
    """What a gateway can be run without, but nobody who names it means to."""
    return [
        f"upstreams[{index}].tokenizer: there is no file or folder {upstream.tokenizer}; without it the gateway runs, "
        "but cannot tell what this upstream holds"
        for index, upstream in enumerate(config.upstreams)
        if upstream.tokenizer is not None and not upstream.tokenizer.exists()
    ]


def adopted(new: Config, running: Config) -> Config:
    """``new`` as a running gateway takes it over: the port stays bound, the embedded engine as it was started."""
    own = {ENGINE_UPSTREAM} if running.engine else set()
    engine = [upstream for upstream in running.upstreams if upstream.name in own]
    upstreams = (*(upstream for upstream in new.upstreams if upstream.name not in own), *engine)
    return new.model_copy(update={"listen": running.listen, "engine": running.engine, "upstreams": upstreams})


def waiting(new: Config, running: Config) -> list[str]:
    """Keys that differ and take effect at the next start only."""
    listen = new.listen.model_copy(update={"port": new.listen.port or running.listen.port})
    return (["listen"] if listen != running.listen else []) + (["engine"] if new.engine != running.engine else [])


def unchangeable(new: Config, running: Config) -> list[str]:
    """Keys that differ and cannot change while a gateway runs: what its stores are."""
    caches = [name for name in ("memory", "disk", "redis") if getattr(new.cache, name) != getattr(running.cache, name)]
    return [f"cache.{name}" for name in caches] + (["ledger"] if new.ledger != running.ledger else [])


def _missing_model(config: Config) -> list[str]:
    """Names that are no path are the engine's to judge."""
    model = config.engine.model if config.engine else ""
    is_path = "/" in model or model.endswith(".gguf")
    return [f"engine.model: there is no file or folder {model}"] if is_path and not Path(model).exists() else []


def _label_faults(config: Config) -> list[str]:
    """Those labels that figures are made of must be numbers."""
    return [
        f"upstreams[{index}].labels.{name} must be a number above 0, not {upstream.labels[name]!r}"
        for index, upstream in enumerate(config.upstreams)
        for name in FIGURES
        if name in upstream.labels and not _is_positive(upstream.labels[name])
    ]


def _is_positive(value: str | float) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _price_faults(config: Config) -> list[str]:
    try:
        load_prices(config.prices)
    except PriceError as error:
        return [f"prices: {problem}" for problem in error.problems]
    return []


def _telemetry_faults(config: Config) -> list[str]:
    path, faults = config.telemetry.access_log, []
    if config.telemetry.otlp is not None and not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        faults.append("telemetry.otlp needs an extra that is not installed: pip install 'warmgate[telemetry]'")
    if isinstance(path, Path) and path.is_dir():
        faults.append(f"telemetry.access_log: {path} is a folder; name a file in it")
    elif isinstance(path, Path) and not path.parent.is_dir():
        faults.append(f"telemetry.access_log: there is no folder {path.parent}")
    return faults


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it is in
        return False


def _faq_faults(config: Config) -> list[str]:
    if config.faq.path is None:
        return []
    try:
        return [f"faq.path: {collision}" for collision in load_faq(config.faq.path).collisions()]
    except FaqError as error:
        return [f"faq.path: {problem}" for problem in error.problems]
