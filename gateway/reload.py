"""Taking a new configuration into use without dropping a request."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config import Config, ConfigError
from gateway.runtime import Runtime
from gateway.source import adopted, unchangeable, waiting

Source = Callable[[], Config]
"""Reads the configuration anew; raises `ConfigError`."""


class ReloadError(Exception):
    """The configuration cannot be taken into use; the old one stays. The message says why, a line a fault."""


def reload(runtime: Runtime, source: Source | None) -> list[str]:
    """Applies what ``source`` gives, and returns the keys whose changes wait for the next start; raises `ReloadError`,
    and then nothing has changed.
    """
    if source is None:
        raise ReloadError("This gateway was started with a fixed configuration.")
    try:
        config = source()
    except ConfigError as error:
        raise ReloadError(str(error)) from None
    if fixed := unchangeable(config, runtime.config):
        raise ReloadError(f"A change of {', '.join(fixed)} needs a restart.")
    later = waiting(config, runtime.config)
    runtime.apply(adopted(config, runtime.config))
    return later
