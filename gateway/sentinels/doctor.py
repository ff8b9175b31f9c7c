"""The report of the sentinels as `warmgate doctor` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDTH = 34


def prescription(report: dict[str, Any], now: float) -> str:
    """Lines for people: each light, and for the red ones the likely cause and where to look. ``now``: unix seconds."""
    return "\n".join(_lines(report, now))


def _lines(report: dict[str, Any], now: float) -> Iterator[str]:
    if report["state"] == "off":
        yield "The sentinels are off (sentinels: off): nothing is known of silent failures."
        return
    if report["at"] is None:
        yield "The sentinels have not made their first round yet; ask again in some seconds."
        return
    yield f"Sentinels: a round every {report['every']:g} s, the last one {max(0.0, now - report['at']):.0f} s ago."
    for light in report["lights"]:
        name = " ".join(_printable(light[part]) for part in ("name", "upstream", "tier") if light[part])
        said = light["means"] if light["state"] == "green" else light["cause"]
        yield f"  {light['state']:<6} {name:<{WIDTH}} {_printable(said)}"
        if light["state"] == "red":
            since = _age(now - light["since"])
            yield f"  {'':<6} {'':<{WIDTH}} look at: {light['setting'] or 'the log'} (red for {since})"
    cost = report["cost"]["per_hour"]
    if cost["requests"]:
        yield (
            f"Canaries cost upstreams {cost['requests']:,} requests an hour: {cost['prompt']:,} prompt tokens "
            f"({cost['cached']:,} of them cached there) and {cost['output']:,} output tokens, in no other figure."
        )
    else:
        yield "Canaries cost upstreams nothing: none are sent there."


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _printable(text: str) -> str:
    """Without what could move a terminal's cursor: names and errors come from elsewhere."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
