"""The canonical request: one spelling for everything that will be sent upstream, and the key and fingerprint made of
it.

Two bodies get one spelling when every upstream must read them alike: object keys are sorted and white space is
dropped, array order and the exact value and type of each number are kept (``1``, ``1.0``, ``true`` and ``"1"`` are
four different things). A body that two parsers could read differently (duplicate keys, NaN, numbers that overflow,
half surrogate pairs) is refused instead of guessed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from hashlib import sha256
from typing import Any, NoReturn

import orjson
from xxhash import xxh3_128_digest

KEY_FORMAT = 1
"""Raised whenever the spelling below changes, so that entries of an older spelling are never found."""


class BadBody(ValueError):
    """The body is not one unambiguous JSON object; the message is one sentence for the caller."""


class _BigInt(int):
    """An integer beyond 64 bits: written digit by digit, never as a float."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What besides the body decides the answer."""

    dialect: str
    tenant: str
    namespace: str
    model: str
    revision: str
    vary: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """``key`` (xxh3-128, 16 bytes) finds an entry; ``fingerprint`` (SHA-256, 32 bytes) confirms it."""

    key: bytes
    fingerprint: bytes


def parse(body: bytes) -> dict[str, Any]:
    """Reads a request body exactly: integers of any size as ``int``, all other numbers as ``Decimal``.

    Raises `BadBody` for anything but one JSON object that every parser reads alike.
    """
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise BadBody(f"The request body is not UTF-8 (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise BadBody(
            f"The request body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise BadBody("The request body must be a JSON object.")
    return value


def spell(value: object) -> bytes:
    """The canonical spelling: equal bytes exactly when the values are equal in value and type."""
    return _dump(value, orjson.OPT_SORT_KEYS, _canonical_number)


def respell(value: object) -> bytes:
    """JSON for the upstream when a field had to be changed: key order and every digit as the caller wrote them."""
    return _dump(value, 0, str)


def identify(scope: Scope, body: Mapping[str, Any], excluded: Container[str]) -> Identity:
    """Key and fingerprint of a parsed ``body`` under ``scope``, without the top-level fields in ``excluded``."""
    head = [KEY_FORMAT, scope.dialect, scope.tenant, scope.namespace, scope.model, scope.revision, scope.vary]
    included = {name: value for name, value in body.items() if name not in excluded}
    text = spell([head, included])
    return Identity(xxh3_128_digest(text), sha256(text).digest())


def _dump(value: object, option: int, number: Any) -> bytes:
    def default(item: object) -> orjson.Fragment:
        if isinstance(item, _BigInt):
            return orjson.Fragment(int.__repr__(item))
        if isinstance(item, Decimal):
            return orjson.Fragment(number(item))
        raise TypeError(type(item).__name__)

    try:
        return orjson.dumps(value, default=default, option=option | orjson.OPT_PASSTHROUGH_SUBCLASS)
    except orjson.JSONEncodeError as error:
        if "surrogate" in str(error):
            raise BadBody("The request body holds half of a surrogate pair, which no upstream can read.") from None
        raise BadBody("The request body is nested too deeply.") from None


def _canonical_number(number: Decimal) -> str:
    """Digits and exponent without trailing zeros; the ``E`` keeps it apart from every integer."""
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        raise BadBody("The request body holds a number that is not finite.")
    text = "".join(map(str, digits))
    kept = text.rstrip("0") or "0"
    exponent = 0 if kept == "0" else exponent + len(text) - len(kept)
    return f"{'-' if sign else ''}{kept}E{exponent}"


def _integer(text: str) -> int:
    if len(text) < 19:
        return int(text)
    try:
        return _BigInt(text)
    except ValueError:
        raise BadBody("The request body holds an integer with too many digits.") from None


def _real(text: str) -> Decimal:
    if math.isinf(float(text)):
        raise BadBody(f"The request body holds a number that is too large: {text[:40]}.")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise BadBody(f"The request body holds a number with too large an exponent: {text[:40]}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadBody(f"The request body holds the key {twice[:80]!r} twice in one object.")
    return found


def _constant(text: str) -> NoReturn:
    raise BadBody(f"The request body holds {text}, which is not JSON.")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_constant)
