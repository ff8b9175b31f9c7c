"""What is wrong with a configuration, one sentence a fault: the key's path, what it must be, the nearest known key."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.config.models import Config

ENV_PREFIX = "WARMGATE_"


def explain(error: ValidationError) -> list[str]:
    """One sentence for each fault of a validation, with the key's path."""
    return [sentence for details in error.errors() for sentence in _sentences(details)]


def _sentences(details: ErrorDetails) -> list[str]:
    path, kind, context = _dotted(details["loc"]), details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return [f"unknown key '{path}'" + hint(_nearest_key(details["loc"]))]
    if kind == "missing":
        return [f"{path} is missing"]
    if kind in ("value_error", "secret"):
        sentence = str(context.get("error") or context.get("sentence") or details["msg"])
        if not path:  # faults between sections name their own paths
            return sentence.split("\n")
        return [f"{path} {sentence}" + ("" if kind == "secret" else _instead(details["input"]))]
    if kind == "literal_error":
        wanted = f"must be {context['expected']}"
    elif kind.startswith("string"):
        wanted = "must be text" if isinstance(details["input"], str) else "must be text; put it in quotes"
    elif kind.startswith("bool"):
        wanted = "must be true or false"
    elif kind.startswith(("int", "float", "finite")):
        wanted = "must be a whole number" if kind.startswith("int") else "must be a number"
    elif kind in ("greater_than_equal", "less_than_equal"):
        wanted = f"must be at least {context['ge']:g}" if "ge" in context else f"must be at most {context['le']:g}"
    elif kind in ("model_type", "dict_type", "model_attributes_type"):
        wanted = "must be a mapping (key: value)"
    elif kind in ("tuple_type", "list_type"):
        wanted = "must be a list"
    else:
        wanted = details["msg"][:1].lower() + details["msg"][1:]
    return [f"{path or 'the configuration'} {wanted}{_instead(details['input'])}"]


def _instead(value: object) -> str:
    scalar = isinstance(value, str | int | float | bool) and len(str(value)) <= 80
    return f", not {value!r}" if scalar else ""


def hint(nearest: str | None) -> str:
    return f"; did you mean '{nearest}'?" if nearest else ""


def _dotted(location: Sequence[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _nearest_key(location: Sequence[int | str]) -> str | None:
    """The known key most like an unknown one: beside it first, else anywhere by its last name."""
    *parents, last = location
    beside = difflib.get_close_matches(str(last), _keys_below(parents), 1, 0.6)
    if beside:
        return _dotted([*parents, beside[0]])
    paths = sorted(_known_paths(Config), key=len)
    return next((path for path in paths if path.rpartition(".")[2] == last), None)


def nearest_variable(name: str) -> str | None:
    names = [ENV_PREFIX + path.upper().replace(".", "__") for path in _known_paths(Config) if "[" not in path]
    return next(iter(difflib.get_close_matches(name, names, 1, 0.6)), None)


def _keys_below(location: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] | None = Config
    for part in location:
        if isinstance(part, int) or model is None or part not in model.model_fields:
            continue  # an index, or a name of the caller's own: the model is that of the items
        model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields) if model else []


def _known_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for key, field in model.model_fields.items():
        yield prefix + key
        if inner := _model_in(field.annotation):
            listed = "tuple" in str(field.annotation) or "dict" in str(field.annotation)
            yield from _known_paths(inner, f"{prefix}{key}[]." if listed else f"{prefix}{key}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation such as ``tuple[Upstream, ...]`` or ``MemoryCache | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
