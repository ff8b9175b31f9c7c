"""What usage reports are worth in tokens and money, and whether an answer came in time."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.ledger.labels import MODELS
from gateway.ledger.rows import Row
from policies.pricing import Price, PriceTable, Tokens, tokens
from policies.slo import Slo


class Worth:
    """Prices and service levels by the model's name sent upstream."""

    def __init__(self, prices: PriceTable, slos: Mapping[str, Slo]) -> None:
        self._table = prices
        self._prices: dict[str, Price | None] = {}
        self._slos = dict(slos)

    def of(self, usage: dict[str, int] | None, model: str) -> tuple[Tokens | None, int | None]:
        """Tokens and pico-dollars; None where unknown."""
        used = tokens(usage)
        if used is None:
            return None, None
        if model not in self._prices:
            if len(self._prices) >= MODELS:
                self._prices.clear()
            self._prices[model] = self._table.price(model)
        price = self._prices[model]
        return used, price.of(used) if price is not None else None

    def slo(self, model: str) -> Slo | None:
        """The service level of a model, if it has one."""
        return self._slos.get(model)

    def in_time(self, row: Row, output: int | None) -> bool | None:
        """Whether a request met its service level; None where there is none, or where nothing was owed to the caller
        (its own error, or it left).
        """
        slo = self._slos.get(row.model)
        if slo is None or 400 <= row.status < 500:
            return None
        if row.outcome == "error":
            return False
        return slo.met(latency=row.latency, ttft=row.ttft if row.stream else None, output=output)
