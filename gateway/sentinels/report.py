"""The lights of all workers in one view: what is red for one of them is red."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gateway.sentinels.lights import MEANS, red

_WORST = {"red": 0, "green": 1, "grey": 2}
_LATE = 3.0
"""Rounds that may be missing before the sentinels themselves count as failed."""
HOUR = 3600.0


def report(workers: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, Any]:
    """``workers``: the vitals of each. Red lights come first, and ``state`` is ``off`` where no rounds are made, else
    ``red``, ``green``, or ``grey`` as long as there has been none. ``cost`` is per hour, by the last round.
    """
    told = {worker: vitals["sentinels"] for worker, vitals in workers.items()}
    lights: dict[tuple[str, str, str], dict[str, Any]] = {}
    for worker, board in told.items():
        late = board["at"] is not None and now - board["at"] > _LATE * board["every"]
        for light in board["lights"] if not late else [_overdue(board)]:
            place = (light["name"], light["upstream"], light["tier"])
            there = lights.get(place)
            if there is None or _WORST[light["state"]] < _WORST[there["state"]]:
                lights[place] = {**light, "means": MEANS[light["name"]], "workers": [worker]}
            elif light["state"] == there["state"]:
                there["workers"].append(worker)
                there["since"] = min(there["since"], light["since"])
    found = sorted(lights.values(), key=lambda light: light["state"] != "red")
    every = next((board["every"] for board in told.values() if board["every"] is not None), None)
    states = {light["state"] for light in found}
    return {
        "state": "off" if every is None else next((state for state in ("red", "green") if state in states), "grey"),
        "every": every,
        "at": min((board["at"] for board in told.values() if board["at"] is not None), default=None),
        "lights": found,
        "cost": _cost(told.values(), every),
    }


def _overdue(board: Mapping[str, Any]) -> dict[str, Any]:
    cause = "a worker has made no round for long: it hangs, or is overloaded"
    return {**asdict(red("rounds", cause, "sentinels.every")), "since": board["at"]}


def _cost(boards: Any, every: float | None) -> dict[str, Any]:
    """Upstream requests and tokens: an hour's worth by the last round, and all since the workers have started."""
    last, spent = Counter[str](), Counter[str]()
    for board in boards:
        last.update(board["last"])
        spent.update(board["spent"])
    kinds = ("requests", "prompt", "cached", "output")
    return {
        "per_hour": {kind: round(last[kind] * HOUR / every) if every else 0 for kind in kinds},
        "so_far": {kind: spent[kind] for kind in kinds},
    }
