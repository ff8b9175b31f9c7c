"""Sizes and times as people write them: ``256MiB`` is bytes, ``1h30m`` is seconds."""

import re
from decimal import Decimal, InvalidOperation

SIZE_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
TIME_UNITS: dict[str, Decimal] = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86_400),
    "w": Decimal(604_800),
}

MAX_BYTES = 1 << 60
MAX_SECONDS = 100 * 366 * 86_400

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_TIME = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw])\s*)+", re.ASCII)
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_SIZE_FACTORS = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}


def parse_size(value: object) -> int:
    """Bytes from ``256MiB``, ``1.5GB``, ``4096`` or a plain number. Raises ValueError with one sentence."""
    complaint = "must be a size such as 512KiB, 256MiB or 4GiB"
    number, factor = _plain_number(value), 1
    if number is None:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or (match[2] and match[2].lower() not in _SIZE_FACTORS):
            raise ValueError(complaint)
        number, factor = Decimal(match[1]), _SIZE_FACTORS[match[2].lower() or "b"]
    size = number * factor
    if not 0 <= size <= MAX_BYTES:
        raise ValueError(complaint)
    return int(size)


def parse_time(value: object) -> float:
    """Seconds from ``500ms``, ``30s``, ``1h30m``, ``7d`` or a plain number. Raises ValueError with one sentence."""
    complaint = "must be a time such as 500ms, 30s, 10m, 1h or 7d"
    seconds = _plain_number(value)
    if seconds is None:
        if not isinstance(value, str) or _TIME.fullmatch(value.strip()) is None:
            raise ValueError(complaint)
        parts = _TIME_PART.findall(value)
        units = [unit for _, unit in parts]
        if len(set(units)) != len(units):
            raise ValueError(complaint)
        seconds = sum((Decimal(amount) * TIME_UNITS[unit] for amount, unit in parts), Decimal(0))
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(complaint)
    return float(seconds)


def _plain_number(value: object) -> Decimal | None:
    """A finite number, or text that is only a number; None for anything else (booleans are not numbers here)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", value, re.ASCII):
        return None
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
