"""Whether what is kept may still answer: how often held-out answers agreed of late, by place (a tenant's namespace, for
one model), and which places are disarmed.

Each worker remembers its own comparisons and tells them with its vitals; `gateway.judging` adds them up and decides.
What was decided is a generation in the shared store, so that all workers and replicas hear of it, and newcomers too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Literal

from cache.response.tags import Generations, place_of
from gateway.plan import Plan
from policies.savings import surely_below

Verdict = Literal["armed", "doubted", "disarmed"]
"""Answers from what is kept; does, although it is known to disagree more than it should; does not."""

REMEMBERED = 200
"""Comparisons of one place that a worker remembers, the latest."""
FEWEST = 20
"""Comparisons below which nothing is doubted, however they went."""
DOUBT = 0.001
"""How often a place whose agreement lies on the bound would be doubted, each time it is judged."""
RESTORED = 50
"""Comparisons since a place was disarmed, after which it may be armed again."""
_PLACES = 1_000
"""Places remembered; callers choose their namespaces."""
_TOLD = 100


@dataclass(slots=True)
class _Seen:
    """Whether each answer agreed, since the place was ``armed_at`` this generation."""

    armed_at: int
    agreed: deque[bool] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class Trust:
    """``disarms``: whether places can be disarmed at all; ``most``: the share of answers that may disagree."""

    def __init__(self, generations: Generations) -> None:
        self.disarms = False
        self.most = 1.0
        self._generations = generations
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def believes(self, plan: Plan) -> bool:
        """Whether what is kept may answer a request."""
        return not self.disarms or not self._generations.disarmed or place(plan) not in self._generations.disarmed

    def compared(self, where: str, agreed: bool) -> None:
        """An upstream was asked what could have been answered from the cache."""
        seen, armed_at = self._seen.get(where), self._generations.armed_at(where)
        if seen is None or seen.armed_at != armed_at:
            seen = self._seen[where] = _Seen(armed_at)
        self._seen.move_to_end(where)
        seen.agreed.append(agreed)
        if len(self._seen) > _PLACES:
            self._seen.popitem(last=False)

    def told(self) -> dict[str, Any]:
        """For the vitals: places compared lately, each with its generation, comparisons, and how many agreed."""
        latest = list(reversed(self._seen.items()))[:_TOLD]
        return {
            "seen": [(where, seen.armed_at, len(seen.agreed), sum(seen.agreed)) for where, seen in latest],
            "disarmed": sorted(self._generations.disarmed) if self.disarms else [],
        }

    def verdict(self, where: str, agreed: int, judged: int) -> Verdict:
        """What comparisons since the place was last armed or disarmed say of it."""
        least = 1.0 - self.most
        if self.disarms and where in self._generations.disarmed:
            return "armed" if judged >= RESTORED and agreed >= least * judged else "disarmed"
        return "doubted" if judged >= FEWEST and surely_below(agreed, judged, least, DOUBT) else "armed"


def place(plan: Plan) -> str:
    """Where the answer to a request is kept."""
    return place_of(plan.caller.tenant, plan.namespace, plan.model.target)
