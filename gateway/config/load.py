"""Reading the configuration: the YAML file, the environment over it, command-line flags over both.

Whatever is wrong becomes one sentence a fault in a ConfigError, with the key's path and, where a key is unknown, the
nearest known one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gateway.config.explain import ENV_PREFIX, explain, hint, nearest_variable
from gateway.config.models import Config
from gateway.config.secret import Secret, SecretError

# What Kubernetes sets for a service whose name begins with "warmgate".
_SERVICE_VARIABLE = re.compile(r"\w*(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PORT|PROTO|ADDR))?)")


class ConfigError(Exception):
    """The configuration cannot be used; `messages` has one sentence for each fault."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = list(messages)


def load_config(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]) -> Config:
    """The configuration from a YAML file (None: all defaults), WARMGATE_A__B variables and nested flag values.

    Relative paths are taken from the file's folder. Raises ConfigError.
    """
    data = {} if path is None else _read_yaml(path)
    data = _merge(data, _from_environment(data, env))
    data = _merge(data, _without_none(overrides))
    base = path.resolve().parent if path else Path.cwd()
    try:
        return Config.model_validate(data, context={"base": base})
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
    except RuntimeError:  # Path.home() knows none
        raise ConfigError(["there is no home directory; set HOME, or cache.disk.path and ledger.path"]) from None


def secrets_of(config: Config) -> Iterator[tuple[str, Secret]]:
    """Every secret reference with its key's path."""
    yield from _secrets(config, "")


def unreadable_secrets(config: Config, env: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each secret that cannot be read now."""
    faults = []
    for path, secret in secrets_of(config):
        try:
            secret.digest(env)
        except SecretError as error:
            faults.append(f"{path}: {error}")
    return faults


def _secrets(value: Any, path: str) -> Iterator[tuple[str, Secret]]:
    if isinstance(value, Secret):
        yield path, value
    elif isinstance(value, BaseModel):
        for key in type(value).model_fields:
            yield from _secrets(getattr(value, key), f"{path}.{key}".lstrip("."))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _secrets(item, f"{path}.{key}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _secrets(item, f"{path}[{index}]")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice instead of silently taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} must be text; put it in quotes", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key}' is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"the configuration file {path} does not exist"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([f"the configuration file {path} cannot be read: {reason}"]) from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "it is not valid YAML"
        raise ConfigError([f"{where}: {problem}"]) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: must be a mapping such as 'listen: {{port: 8080}}'"])
    return _without_none(data)


def _from_environment(data: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Nested values of WARMGATE_A__B=value; names that the file's secrets refer to are not settings."""
    referenced = set(_referenced_variables(data)) | set(_referenced_variables(dict(env)))
    found: dict[str, Any] = {}
    unknown = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in referenced:
            continue
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        if keys[0] not in Config.model_fields:
            if not _set_by_kubernetes(name, env[name]):
                unknown.append(f"unknown setting {name} in the environment" + hint(nearest_variable(name)))
            continue
        section = found
        for key in keys[:-1]:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        section[keys[-1]] = _env_value(name, env[name])
    if unknown:
        raise ConfigError(unknown)
    return found


def _env_value(name: str, text: str) -> Any:
    """Lists and mappings are written as YAML or JSON; everything else is taken as it stands."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return _without_none(yaml.load(text, Loader=_Loader))
    except yaml.YAMLError:
        raise ConfigError([f"the environment variable {name} is not a valid list or mapping"]) from None


def _set_by_kubernetes(name: str, value: str) -> bool:
    rest = name.removeprefix(ENV_PREFIX)
    return _SERVICE_VARIABLE.fullmatch(rest) is not None or (rest.endswith("PORT") and "://" in value)


def _referenced_variables(data: object) -> Iterator[str]:
    if isinstance(data, str):
        yield from re.findall(r"\benv:(\w+)", data)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _referenced_variables(value)
    elif isinstance(data, list):
        for value in data:
            yield from _referenced_variables(value)


def _without_none(data: Any) -> Any:
    """A key without a value counts as not written."""
    if isinstance(data, Mapping):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return [_without_none(item) for item in data] if isinstance(data, list) else data


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged
