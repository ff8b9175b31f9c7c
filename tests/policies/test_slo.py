"""Did the answer reach its user in time?"""

from __future__ import annotations

import pytest

from policies.slo import Slo

CHAT = Slo(ttft=0.5, tpot=0.05)


@pytest.mark.parametrize(
    ("slo", "latency", "ttft", "output", "met"),
    [
        (CHAT, 0.5 + 9 * 0.04, 0.5, 10, True),
        (CHAT, 0.6 + 9 * 0.01, 0.6, 10, False),  # first token late
        (CHAT, 0.1 + 9 * 0.06, 0.1, 10, False),  # the others slow
        (CHAT, 0.3, 0.3, 1, True),  # one token has none after it
        (CHAT, 0.3, 0.3, 0, True),
        (CHAT, 0.9, 0.2, None, None),  # nobody knows how many tokens
        (CHAT, 0.9, 0.6, None, False),  # late whatever they were
        (CHAT, 0.9, None, 10, True),  # plain: due when a stream within the bounds would have ended, 0.95 s
        (CHAT, 1.0, None, 10, False),
        (CHAT, 0.9, None, None, None),
        (Slo(ttft=0.5), 9.0, 0.4, None, True),
        (Slo(ttft=0.5), 0.6, None, 10, False),  # plain: nothing was seen before the end
        (Slo(tpot=0.05), 3.0, None, 10, None),  # plain, and no bound on when it begins
        (Slo(tpot=0.05), 3.0, 2.6, 10, True),
        (Slo(total=2), 2.0, None, None, True),
        (Slo(total=2), 2.1, 0.1, 10, False),
        (Slo(ttft=0.5, tpot=0.05, total=0.7), 0.8, 0.4, 20, False),
    ],
)
def test_met(slo: Slo, latency: float, ttft: float | None, output: int | None, met: bool | None) -> None:
    assert slo.met(latency=latency, ttft=ttft, output=output) is met
