"""What tokens cost, exactly, by a price table; what is not known stays unknown and is never zero.

Money is counted in whole pico-dollars (1e-12 USD): one token at a price of 0.0375 USD per million is 37,500 of them, so
sums have no rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

PICO = 10**12
"""Pico-dollars in a dollar."""
ABSURD = 2**24
"""No request has this many tokens; an upstream that reports them has told nothing."""

_PER_TOKEN = PICO // 10**6  # of one dollar per million tokens
_DEAREST = 10**4  # dollars per million tokens
_KINDS = ("input", "cached_input", "cache_write", "output")


class PriceError(ValueError):
    """The table cannot be used; ``problems`` has one sentence for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(slots=True)
class Tokens:
    """Tokens of one call. ``prompt`` counts them all; ``cached`` of them the provider had in its cache (None: it did
    not say), ``cache_write`` of them it put there.
    """

    prompt: int
    output: int
    cached: int | None = None
    cache_write: int = 0


def tokens(usage: Mapping[str, int] | None) -> Tokens | None:
    """Tokens of a usage report with the keys ``prompt``, ``output``, ``cached``, ``cache_write``; None where it is
    missing, incomplete or contradicts itself.
    """
    if not usage:
        return None
    prompt, output = usage.get("prompt"), usage.get("output")
    cached, written = usage.get("cached"), usage.get("cache_write", 0)
    if prompt is None or output is None or not 0 <= prompt < ABSURD or not 0 <= output < ABSURD:
        return None
    if written < 0 or (cached is not None and cached < 0) or (cached or 0) + written > prompt:
        return None
    return Tokens(prompt, output, cached, written)


@dataclass(frozen=True, slots=True)
class Price:
    """Pico-dollars per token. Without ``cached_input`` or ``cache_write`` such tokens cost what ``input`` costs."""

    input: int
    output: int | None = None
    cached_input: int | None = None
    cache_write: int | None = None

    def of(self, used: Tokens) -> int | None:
        """Pico-dollars; None where it depends on something that is not known."""
        if used.cached is None and self.cached_input is not None:
            return None
        if used.output and self.output is None:
            return None
        cached = used.cached or 0
        return (
            (used.prompt - cached - used.cache_write) * self.input
            + cached * _or(self.cached_input, self.input)
            + used.cache_write * _or(self.cache_write, self.input)
            + used.output * (self.output or 0)
        )


class PriceTable:
    """Prices by the model's name as it is sent upstream; a name that ends in ``*`` stands for all that begin so."""

    def __init__(self, prices: Mapping[str, Price] | None = None) -> None:
        self._exact = {name: price for name, price in (prices or {}).items() if not name.endswith("*")}
        patterns = {name[:-1]: price for name, price in (prices or {}).items() if name.endswith("*")}
        self._patterns = sorted(patterns.items(), key=lambda item: -len(item[0]))

    def __len__(self) -> int:
        return len(self._exact) + len(self._patterns)

    def price(self, model: str) -> Price | None:
        """The price of a model: its own, else that of the longest pattern; None when there is none."""
        if model in self._exact:
            return self._exact[model]
        return next((price for prefix, price in self._patterns if model.startswith(prefix)), None)


def parse_prices(data: object) -> PriceTable:
    """A table of the form ``{models: {NAME: {input, cached_input, cache_write, output}}}``, in dollars per million
    tokens. Raises `PriceError`.
    """
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, dict) or set(data if isinstance(data, dict) else ()) != {"models"}:
        raise PriceError(["must hold 'models', and nothing else beside it"])
    problems: list[str] = []
    table = {str(name): _price(f"models.{name}", entry, problems) for name, entry in models.items()}
    if problems:
        raise PriceError(problems)
    return PriceTable(table)


def _price(path: str, entry: object, problems: list[str]) -> Price:
    if not isinstance(entry, dict) or "input" not in entry:
        problems.append(f"{path} must say at least what 'input' costs")
        return Price(0)
    problems += [f"{path}: unknown price '{name}'; known are {', '.join(_KINDS)}" for name in entry.keys() - {*_KINDS}]
    known = {name: _pico(f"{path}.{name}", value, problems) for name, value in entry.items() if name in _KINDS}
    return Price(**known)


def _pico(path: str, value: Any, problems: list[str]) -> int:
    try:
        dollars = Decimal(str(value)) if type(value) in (int, float, str) else Decimal("nan")
    except InvalidOperation:
        dollars = Decimal("nan")
    if not dollars.is_finite() or not 0 <= dollars <= _DEAREST:
        problems.append(f"{path} must be a number of dollars per million tokens")
        return 0
    pico = dollars * _PER_TOKEN
    if pico != int(pico):
        problems.append(f"{path} may have at most six decimals")
    return int(pico)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
