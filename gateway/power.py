"""What the embedded engine's machine draws, as far as it can be read: its GPUs by NVML (the extra ``power``), else its
processors by RAPL. Of engines elsewhere, only what the operator says is known (``upstreams[].labels.watts``).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.clock import Clock

RAPL = Path("/sys/class/powercap")
READ_EVERY = 10.0
"""Seconds between two readings: RAPL's counters overflow within some minutes."""
KEPT = 86_400.0
"""Seconds of history."""
_PACKAGE = re.compile(r"intel-rapl:\d+")

Joules = Callable[[], float]
"""Joules drawn since some moment; raises OSError where that cannot be read (any more)."""


class Power:
    """Readings of one source. ``source`` is empty where there is none."""

    def __init__(self, clock: Clock) -> None:
        self.source = ""
        self._read: Joules | None = None
        self._clock = clock
        self._readings: deque[tuple[float, float]] = deque()  # monotonic seconds, joules

    def apply(self, device: str | None) -> None:
        """``device``: where the embedded engine computes (``auto``, ``cpu``, ``cuda``, …); None: there is none."""
        self._readings.clear()
        self.source, self._read = ("", None) if device is None else _source(device)

    async def run(self) -> None:
        """Reads again and again, until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(READ_EVERY)

    def read(self) -> None:
        """Reads once; a source that fails is given up."""
        if self._read is None:
            return
        now = self._clock.monotonic()
        try:
            self._readings.append((now, self._read()))
        except OSError:
            self.source, self._read = "", None
            self._readings.clear()
        while self._readings and self._readings[0][0] < now - KEPT:
            self._readings.popleft()

    def watts(self, seconds: float) -> float | None:
        """What was drawn on average over the last ``seconds``; None where that was not watched all the time."""
        if len(self._readings) < 2:
            return None
        end, last = self._readings[-1]
        begin = self._clock.monotonic() - seconds
        if self._readings[0][0] > begin + READ_EVERY:
            return None
        at, first = min(self._readings, key=lambda reading: abs(reading[0] - begin))
        return (last - first) / (end - at) if end > at else None


def _source(device: str) -> tuple[str, Joules | None]:
    if device != "cpu" and (read := _nvml()) is not None:
        return "nvml", read
    if device in ("cpu", "auto") and (read := _rapl(RAPL)) is not None:
        return "rapl", read
    return "", None


def _nvml() -> Joules | None:
    """All GPUs of the machine (Volta and later count their energy)."""
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        for gpu in gpus:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except pynvml.NVMLError:
        return None

    def read() -> float:
        try:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in gpus) / 1000
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from None

    return read if gpus else None


def _rapl(folder: Path) -> Joules | None:
    """All processor packages (docs.kernel.org/power/powercap/powercap.html); most kernels let only root read them."""
    try:
        packages = [path for path in sorted(folder.iterdir()) if _PACKAGE.fullmatch(path.name)]
        ranges = [int((path / "max_energy_range_uj").read_text()) for path in packages]
        last = [int((path / "energy_uj").read_text()) for path in packages]
    except (OSError, ValueError):
        return None
    total = 0

    def read() -> float:
        nonlocal total
        for index, path in enumerate(packages):
            now = int((path / "energy_uj").read_text())
            total += (now - last[index]) % (ranges[index] + 1)  # it begins anew at 0
            last[index] = now
        return total / 1e6

    return read if packages else None
