"""What the sentinels have found: a light for each layer, when it last changed, and what looking has cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["green", "red", "grey"]

MEANS = {
    "memory": "an answer kept in memory is found again",
    "disk": "an answer kept on disk is found again, and the one of the round before still is",
    "redis": "an answer kept in Redis is found again, and the one of the round before still is",
    "coalescing": "two equal requests at the same time make one upstream call",
    "shared coalescing": "so do two that come to different gateways",
    "other tenant": "what was answered to one tenant is not answered to another",
    "other model": "what was answered for one model is not answered for another",
    "purges": "this worker hears of purges made elsewhere",
    "salt": "all gateways that share the store make the same salts",
    "prefix": "the upstream finds again what it has just computed",
    "tier": "the upstream finds prefixes on this tier",
    "template": "the upstream makes the tokens of a prompt that it made before, and that its tokenizer makes here",
    "events": "its KV events arrive, and what it holds appears in the router's index",
    "prefix of another tenant": "the upstream does not find for one tenant what it has computed for another",
    "agreement": "what is kept and what upstreams answer now agree as often as they should (the hold-out)",
    "rounds": "the sentinels themselves make their rounds",
}
"""What a green light says, by the light's name."""


@dataclass(frozen=True, slots=True)
class Light:
    """One light. Green: it works; red: it does not, for the likely ``cause``, and ``setting`` is the place to look;
    grey: it does not apply, or cannot be told yet, and ``cause`` says why. ``upstream``, ``tier``: where it is one's.
    """

    name: str
    state: State
    cause: str = ""
    setting: str = ""
    upstream: str = ""
    tier: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """What it is the light of."""
        return self.name, self.upstream, self.tier


def green(name: str, upstream: str = "", tier: str = "") -> Light:
    """It works."""
    return Light(name, "green", upstream=upstream, tier=tier)


def red(name: str, cause: str, setting: str = "", upstream: str = "", tier: str = "") -> Light:
    """It does not."""
    return Light(name, "red", cause, setting, upstream, tier)


def grey(name: str, cause: str, setting: str = "", upstream: str = "", tier: str = "") -> Light:
    """It does not apply, or cannot be told."""
    return Light(name, "grey", cause, setting, upstream, tier)


class Board:
    """This worker's lights. ``every``: seconds between two rounds, None where there are none."""

    def __init__(self) -> None:
        self.every: float | None = None
        self._at: float | None = None
        self._lights: dict[tuple[str, str, str], tuple[Light, float]] = {}
        self._spent: Counter[str] = Counter()
        self._last: Counter[str] = Counter()

    @property
    def lights(self) -> list[Light]:
        """As the last round found them."""
        return [light for light, _ in self._lights.values()]

    def be_due_every(self, seconds: float | None) -> None:
        """How often rounds are made from now on; with None, nothing is known any more."""
        self.every = seconds
        if seconds is None:
            self._at, self._lights = None, {}

    def show(self, lights: Iterable[Light], spent: Counter[str], now: float) -> list[Light]:
        """A round has ended at ``now`` (unix seconds), and ``spent`` so many upstream requests and tokens. Returns the
        lights that have changed.
        """
        old, self._lights = self._lights, {}
        changed: list[Light] = []
        for light in lights:
            before, since = old.get(light.place, (None, now))
            if before is None or before.state != light.state:
                since = now
                changed.append(light)
            self._lights[light.place] = (light, since)
        self._at, self._last = now, spent
        self._spent += spent
        return changed

    def told(self) -> dict[str, Any]:
        """For the vitals, which other workers read."""
        return {
            "every": self.every,
            "at": self._at,
            "lights": [{**asdict(light), "since": since} for light, since in self._lights.values()],
            "spent": dict(self._spent),
            "last": dict(self._last),
        }
