"""What the ledger counts by: the price file, and the service levels of the models."""

from __future__ import annotations

from pathlib import Path

import yaml

from gateway.config import Config
from policies.pricing import PriceError, PriceTable, parse_prices
from policies.slo import Slo


def load_prices(path: Path | None) -> PriceTable:
    """Reads ``prices.yaml``; an empty table where none is named. Raises `PriceError`."""
    if path is None:
        return PriceTable()
    try:
        return parse_prices(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise PriceError([f"{path.name} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise PriceError([f"{path.name} is not UTF-8"]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise PriceError([f"{path.name} is not YAML{where}"]) from None
    except PriceError as error:
        raise PriceError([f"{path.name}: {problem}" for problem in error.problems]) from None


def service_levels(config: Config) -> dict[str, Slo]:
    """Service levels by the name sent upstream; of several names for one model, that of its own name counts, else the
    first.
    """
    levels: dict[str, Slo] = {}
    for _, alias in sorted(config.models.items(), key=lambda item: item[0] != item[1].target):
        if alias.slo.ttft is not None or alias.slo.tpot is not None or alias.slo.total is not None:
            levels.setdefault(alias.target, Slo(alias.slo.ttft, alias.slo.tpot, alias.slo.total))
    return levels
