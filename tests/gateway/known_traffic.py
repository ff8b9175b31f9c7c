"""Scripted traffic of which everything is known beforehand: hits, misses, errors, callers that leave, tokens cached by
the provider, a clock that is set back, a restart.

Time stands still but where the script moves it, so even latencies are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest.stub_upstream import StubUpstream, answer, error
from tests.harness import FakeClock, Running, running_gateway, upstream
from tests.waiting import until

NOON = 1_796_040_000
PRICES = "models:\n  m1: {input: 1, cached_input: 0.25, output: 4}\n"
FAQ = '- ask: ["What is Warmgate?"]\n  answer: "A gateway."\n'
TOLD = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
"""What a call uses: 100 prompt tokens, 40 of them in the provider's cache, 10 of output."""
COST = (60 * 1 + 40 * 0.25 + 10 * 4) / 1e6
"""Dollars that such a call costs."""


class Script:
    """The traffic, and what is true of it."""

    def __init__(self, folder: Path, u: StubUpstream) -> None:
        self.u = u
        self.clock = FakeClock()
        self.clock._time = float(NOON)
        (folder / "prices.yaml").write_text(PRICES)
        (folder / "faq.yaml").write_text(FAQ)
        self.config: dict[str, Any] = {
            "upstreams": [upstream(u.url, models=["m1", "unpriced"])],
            "ledger": {"path": str(folder / "ledger.db")},
            "prices": str(folder / "prices.yaml"),
            "faq": {"path": str(folder / "faq.yaml")},
            "cache": {"ttl": "1h", "stale_while_revalidate": "1d"},
            "models": {"m1": {"faq": True, "slo": {"ttft": "1s"}}},
        }

    async def ask(self, gateway: Running, question: str, **more: Any) -> int:
        body = {"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": question}], **more}
        response = await gateway.chat(body)
        await gateway.app.runtime.keeper.drain()
        return response.status_code

    async def first(self, gateway: Running) -> None:
        """Before the restart."""
        u, clock = self.u, self.clock
        u.always(answer(usage=TOLD))
        for stream in (False, False, True):  # a miss and two hits, one of them streamed
            await self.ask(gateway, "q1", stream=stream)
        await self.ask(gateway, "q2", stream=True)  # a miss
        await self.ask(gateway, "q2")  # a hit
        gate = asyncio.Event()
        u.reply(answer(usage=TOLD).held(gate))
        sharing = asyncio.gather(*(self.ask(gateway, "q3") for _ in range(3)))  # a miss and two that share its call
        await gateway.joined(3)
        gate.set()
        await sharing
        assert u.n == 3
        await self.ask(gateway, "What is Warmgate?")  # curated
        await self.ask(gateway, "q4", temperature=1)  # not cacheable
        u.reply(answer(usage={"prompt_tokens": 7, "completion_tokens": 1}))
        await self.ask(gateway, "q5")  # a miss; cached or not, nobody said
        u.reply(answer(usage={"prompt_tokens": -3, "completion_tokens": 10**15}))
        await self.ask(gateway, "q6")  # a miss with an absurd report
        await self.ask(gateway, "q7", model="unpriced")  # a miss
        await self.ask(gateway, "q7", model="unpriced")  # a hit
        u.reply(error(500))
        assert await self.ask(gateway, "q8") == 500
        assert await self.ask(gateway, "q9", model="nobody's") == 404
        assert (await gateway.client.post("/v1/chat/completions", content=b"{")).status_code == 400
        u.reply(answer(usage=TOLD).cut(after=2, then="reset"))
        await self.ask(gateway, "q10", stream=True)  # breaks in mid-stream
        await self.leave(gateway, "q11")
        clock.advance(60)  # the next minute
        await self.ask(gateway, "q1")
        clock.advance(2 * 3600)
        await self.ask(gateway, "q1")  # stale, and renewed behind the caller's back
        await until(lambda: u.n == 11 and not gateway.app.runtime.flights, "what is stale has been renewed")
        await gateway.app.runtime.keeper.drain()

    async def leave(self, gateway: Running, question: str) -> None:
        """A caller that leaves while its answer is coming."""
        self.u.reply(answer(deltas=["a", "b", "c"], usage=TOLD).pause(before=2, seconds=30))
        body = {"model": "m1", "temperature": 0, "stream": True, "messages": [{"role": "user", "content": question}]}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break
        await until(lambda: not gateway.app.runtime.flights, "the call has ended")

    async def second(self, gateway: Running) -> None:
        """After it, with the clock set back by three hours."""
        self.clock._time -= 3 * 3600
        await self.ask(gateway, "q1")  # nothing was kept but in memory: a miss
        await self.ask(gateway, "q1")  # a hit
        gate, calls = asyncio.Event(), self.u.n
        self.u.reply(answer(usage=TOLD).held(gate))
        slow = asyncio.create_task(self.ask(gateway, "q12"))  # a miss that takes 2 s
        await self.u.wait_calls(calls + 1)
        self.clock._monotonic += 2
        gate.set()
        await slow


REQUESTS = {"exact": 6, "stale": 1, "faq": 1, "coalesced": 2, "miss": 8, "bypass": 1, "error": 5}
GROUPS = {
    ("m1", "exact", False): 4,
    ("m1", "exact", True): 1,
    ("unpriced", "exact", False): 1,
    ("m1", "stale", False): 1,
    ("m1", "faq", False): 1,
    ("m1", "coalesced", False): 2,
    ("m1", "miss", False): 6,
    ("m1", "miss", True): 1,
    ("unpriced", "miss", False): 1,
    ("m1", "bypass", False): 1,
    ("m1", "error", False): 1,  # the upstream's
    ("m1", "error", True): 2,  # broken off, left
    ("", "error", False): 2,  # no such model, no JSON
}
"""Requests by model, outcome and stream."""
IN_TIME = 5 * 10 + 10 + 2 * 10 + 4 * 10 + 1 + 10
"""Output tokens that met the service level: exact, stale, coalesced, misses (one of 1 token, two told nothing or were
late), bypass.
"""
HITS = 6 + 1 + 2
"""Saved answers with a usage report; that of the model without a price among them."""
CALLS = {"miss": 11, "bypass": 1, "stale": 1}
"""Also those that failed, broke off, or were left."""
TOLD_CALLS = 3 + 1 + 1 + 1 + 2
"""Calls that reported `TOLD`: q1 q2 q3, q4, the unpriced q7, the refresh, q1 and q12 after the restart."""


@asynccontextmanager
async def after_known_traffic(folder: Path) -> AsyncIterator[Running]:
    """A gateway that has seen the whole script, a restart of the process in its middle."""
    async with StubUpstream(models=("m1",)) as u:
        script = Script(folder, u)
        async with running_gateway(script.config, script.clock) as gateway:
            await script.first(gateway)
        async with running_gateway(script.config, script.clock) as gateway:
            await script.second(gateway)
            assert u.n == sum(CALLS.values())
            yield gateway
