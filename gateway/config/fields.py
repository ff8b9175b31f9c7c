"""Field types of the configuration: each makes one plain value of what people write, or says what is wrong."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from gateway.config.secret import Secret, parse_secret
from gateway.config.units import parse_size, parse_time

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def base_folder(info: ValidationInfo) -> Path:
    """The folder that relative paths are taken from: the configuration file's, else the working directory."""
    return (info.context or {}).get("base", Path())


def _path(value: object, info: ValidationInfo) -> Path:
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("must be a path")
    return base_folder(info) / expand_home(value)


def _path_or_output(value: object, info: ValidationInfo) -> Path | Literal["-"]:
    return "-" if value == "-" else _path(value, info)


def expand_home(path: str) -> Path:
    """``~`` replaced. Raises ValueError when there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError("begins with '~', but there is no such home directory") from None


def _off(value: object) -> object:
    """``off`` (which YAML reads as false) means None. A bare ``on`` means all defaults."""
    if value is False or value == "off":
        return None
    return {} if value is True or value == "on" else value


def _switch(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit")
    return value


def _secret(value: object, info: ValidationInfo, *, hash_allowed: bool) -> Secret:
    try:
        return parse_secret(value, base=base_folder(info), hash_allowed=hash_allowed)
    except ValueError as error:  # a kind of its own, so that the refused value is not repeated in the message
        raise PydanticCustomError("secret", "{sentence}", {"sentence": str(error)}) from None


def _secret_reference(value: object, info: ValidationInfo) -> Secret:
    return _secret(value, info, hash_allowed=False)


def _key_reference(value: object, info: ValidationInfo) -> Secret:
    return _secret(value, info, hash_allowed=True)


def _url(value: object, *schemes: str, host_required: bool = True) -> str:
    """The URL without trailing slashes; a password in it is refused, and never repeated."""
    sentence = f"must be a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    text = value.strip() if isinstance(value, str) else ""
    try:
        parts = urlsplit(text)
        port = parts.port  # raises when it is not a port
    except ValueError:
        raise ValueError(sentence) from None
    if parts.scheme not in schemes or (host_required and not parts.hostname) or port == 0 or re.search(r"\s", text):
        raise ValueError(sentence)
    if parts.password is not None:
        raise PydanticCustomError(
            "secret", "must not hold a password in the open; keep it where env:NAME or file:PATH says"
        )
    return text.rstrip("/")


def _http_url(value: object) -> str:
    url = _url(value, "http", "https")
    if urlsplit(url).query or urlsplit(url).fragment:
        raise ValueError("must be a URL without '?' and '#'")
    return url


def _socket_url(value: object) -> str:
    return _url(value, "tcp", "ipc", host_required=False)


def _store_url(*schemes: str) -> PlainValidator:
    """Takes a store's URL, or a reference to one (where it holds a password)."""

    def validate(value: object, info: ValidationInfo) -> str | Secret:
        if isinstance(value, Secret) or (isinstance(value, str) and value.startswith(("env:", "file:"))):
            return _secret_reference(value, info)
        return _url(value, *schemes, host_required=False)

    return PlainValidator(validate)


def _as_text(value: object) -> Any:
    return str(value) if isinstance(value, Secret) else value


def _auto_size(value: object) -> int | str:
    try:
        return "auto" if value == "auto" else parse_size(value)
    except ValueError:
        raise ValueError("must be auto or a size such as 512MiB") from None


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value, re.ASCII):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


Bytes = Annotated[int, PlainValidator(parse_size, json_schema_input_type=int | str)]
Seconds = Annotated[float, PlainValidator(parse_time, json_schema_input_type=float | str)]
AutoBytes = Annotated[int | Literal["auto"], BeforeValidator(_auto_size)]
FilePath = Annotated[Path, PlainValidator(_path)]
FileOrOutput = Annotated[Path | Literal["-"], PlainValidator(_path_or_output)]
Device = Annotated[str, AfterValidator(_device)]
Port = Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=65535)]
Count = Annotated[int, BeforeValidator(_not_bool), Field(ge=1)]
Few = Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=10)]
Amount = Annotated[float, BeforeValidator(_not_bool), Field(ge=0)]
Share = Annotated[float, BeforeValidator(_not_bool), Field(ge=0, le=1)]
Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, Field(min_length=1)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(_switch)]
Off = BeforeValidator(_off)
SecretRef = Annotated[Secret, PlainValidator(_secret_reference), PlainSerializer(_as_text)]
KeyRef = Annotated[Secret, PlainValidator(_key_reference), PlainSerializer(_as_text)]
HttpUrl = Annotated[str, PlainValidator(_http_url)]
SocketUrl = Annotated[str, PlainValidator(_socket_url)]
RedisUrl = Annotated[str | Secret, _store_url("redis", "rediss", "unix"), PlainSerializer(_as_text)]
RemoteUrl = Annotated[str | Secret, _store_url("redis", "rediss", "unix", "lmcache"), PlainSerializer(_as_text)]
