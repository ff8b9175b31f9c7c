"""Splitting: a long prompt is computed by a prefill upstream and its answer by a decode upstream, where the policy says
that it pays (`policies.disaggregation`), by vLLM's ``kv_transfer_params``.

The prefill side gets the request with a limit of one token; what it returns goes, beside the caller's own bytes, to the
decode side, which fetches the prompt's keys and values from it. Whatever goes wrong on the way, the decode side is
asked for the whole as if nothing had been. The route header and a metric say of every request what was done and why.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from cache.response.canonical import parse, respell
from gateway.clock import Clock
from gateway.config import Disaggregation
from gateway.dialects.openai import usage_of
from gateway.encoding import Decoder
from gateway.plan import Plan
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.headers import retry_after
from gateway.upstreams.pool import Member
from gateway.upstreams.router import Asked, Route, Router
from gateway.usage import PromptDetails
from policies.disaggregation import Side, decide
from policies.tiering import Cost

PATHS = ("/v1/chat/completions", "/v1/completions")
"""Where engines take the parameters."""
PATIENCE = 30.0
"""Seconds that a prefill may take beyond ten times what it is expected to."""
MAX_ANSWER = 4 * 1024 * 1024
_FOR_ANSWERS = ("stream", "stream_options", "n", "best_of", "min_tokens", "stop", "logprobs", "top_logprobs")
"""What concerns the answer only, and would be wrong or in vain where but one token is made."""
_OF_PROMPTS = ("prompt_logprobs", "echo")
"""What wants the prompt computed where the answer is."""
_ANSWERS = ("n", "best_of")
"""Each answer would fetch the prompt, which vLLM gives up after the first: others might read what took its place."""
_ASKING = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


class Spending(Protocol):
    """Of a call under way: whether an upstream may have worked, and the tokens it reports."""

    made: bool
    usage: dict[str, int] | None


Send = Callable[[Plan, Member], Awaitable[UpstreamResponse]]
Counted = Callable[[Member], AbstractContextManager[Spending]]


@dataclass(frozen=True, slots=True)
class Handed:
    """A prompt that a prefill upstream has computed: the parameters by which it is to be had, and its usage."""

    params: bytes
    usage: dict[str, int]
    details: Any


class Sent:
    """A request that an upstream has begun to answer; ``usage`` is what it and its prefill used of the whole."""

    def __init__(
        self, splits: Splits, route: Route, response: UpstreamResponse, handed: Handed | None, at: float
    ) -> None:
        self.response = response
        self._splits, self._route, self._handed = splits, route, handed
        self._at = at

    def begun(self, *, first_token: bool) -> None:
        """Its answer begins."""
        if self._handed is not None and first_token:
            self._splits.moved(self._route.decision.uncached, self._splits.now() - self._at)
        self._route.begun(first_token=first_token)

    def codec(self, codec: Decoder | None, *, stream: bool) -> Decoder | None:
        """How its body is read: with the usage of the whole in place of the decode side's own."""
        return codec if self._handed is None else PromptDetails(self._handed.details, codec, stream=stream)

    def ended(self, usage: dict[str, int] | None) -> dict[str, int] | None:
        """The answer is there, with this usage; returns what of it the upstream has used itself."""
        if self._handed is None:
            self._route.learn(usage)
            return usage
        return usage and {**usage, "prompt": 0, "cached": 0}


class Splits:
    """Sends requests, split or whole. One per process; it outlives reloads, so that what it has measured stays."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router, self._clock = router, clock
        self.now = clock.monotonic
        self._moving = Cost()
        self.counts: Counter[str] = Counter()
        self.settings = Disaggregation()

    async def send(
        self,
        plan: Plan,
        asked: Asked,
        route: Route,
        prefills: Sequence[Member],
        send: Send,
        counted: Counted,
        *,
        again: bool,
    ) -> Sent:
        """Sends a request to the upstream of ``route``, which may get its prompt from one of ``prefills``. ``counted``:
        a call to an upstream, for the ledger. ``again``: it has failed before. Raises `UpstreamError`.
        """
        prefill, why = self._choose(plan, asked, route, prefills)
        if prefill is not None and again:
            prefill, why = None, "after a failure"
        if prefill is not None:
            route.spared()
            try:
                handed = await self._prefill(plan, asked, prefill, send, counted)
                at = self.now()
                response = await send(_with(plan, handed.params), route.member)
                if response.status < 300:
                    self.counts["split"] += 1
                    route.note = f"split={prefill.name}"
                    return Sent(self, route, response, handed, at)
                response.close()  # whatever it has against it, it may not be the caller's fault
                why = f"decode failed: status {response.status}"
            except _Failed as failed:
                why = str(failed)
            route.burdened()
        if why:
            self.counts[why.partition(":")[0]] += 1
            route.note = f'whole="{why}"'
        return Sent(self, route, await send(plan, route.member), None, self.now())

    def concern(self, members: Sequence[Member]) -> bool:
        """Whether a request to one of these may be split, or is to be told why not."""
        enabled = self.settings.enabled
        return enabled == "on" or (enabled != "off" and any(member.config.role == "prefill" for member in members))

    def moved(self, tokens: int, seconds: float) -> None:
        """The first token of a split answer came so long after the decode side was asked, with all that was moved."""
        if tokens >= self.settings.min_tokens:
            self._moving.observe(tokens, seconds, self.now())

    def _choose(self, plan: Plan, asked: Asked, route: Route, prefills: Sequence[Member]) -> tuple[Member | None, str]:
        """Who computes the prompt, if not the upstream of the route; else why not, or nothing to say about it."""
        if self.settings.enabled == "off" or not (prefills or self.settings.enabled == "on"):
            return None, ""
        if route.member.config.role != "decode":
            return None, f"role {route.member.config.role}" if prefills else "no prefill pool"
        able = [member for member in prefills if member.health.available(self.now())]
        if not able:
            return None, "no prefill upstream is well" if prefills else "no prefill pool"
        if plan.dialect.path not in PATHS:
            return None, "endpoint"
        if not plan.repeatable:
            return None, "side effects"
        if any(plan.body.get(name) for name in _OF_PROMPTS):
            return None, "numbers of the prompt wanted"
        if not _is_one(plan.body.get("prompt")):
            return None, "several prompts"
        if any(plan.body.get(name) not in (None, 1) for name in _ANSWERS):
            return None, "several answers"
        sides = [_side(member, self._router.uncached(asked, member)) for member in able]
        decode = _side(route.member, route.decision.uncached)  # without this request, which is counted there already
        decode = replace(decode, pending=max(0.0, decode.pending - decode.uncached), running=decode.running - 1)
        decision = decide(
            route.decision.cached + route.decision.uncached,
            _limit(plan.body),
            sides,
            decode,
            least=self.settings.min_tokens,
            latency=self._moving.latency,
            per_token=self._moving.per_unit or 0.0,
        )
        return (able[decision.prefill], "") if decision.prefill is not None else (None, decision.reason)

    async def _prefill(self, plan: Plan, asked: Asked, member: Member, send: Send, counted: Counted) -> Handed:
        with self._router.route(asked, [member]) as route, counted(member) as call:
            expected = (member.engine.pending + route.decision.uncached) / member.engine.prefill_rate
            response = None
            try:
                async with asyncio.timeout(PATIENCE + 10 * expected):
                    response = await send(replace(plan, outgoing=_for_prefill(plan.outgoing)), member)
                    if response.status >= 300:
                        call.usage = {"prompt": 0, "output": 0, "cached": 0}
                        if response.status >= 429:
                            route.refused(response.status, retry_after(response.headers, self._clock.time()))
                        raise _Failed(f"prefill failed: status {response.status}")
                    handed = _handed(await response.read(MAX_ANSWER))
                    route.begun(first_token=True)
            except TimeoutError:
                route.failed()
                raise _Failed("prefill failed: late") from None
            except UpstreamError as error:
                route.failed()
                call.made = error.sent
                raise _Failed(f"prefill failed: {error.kind}") from None
            finally:
                if response is not None:
                    response.close()
            route.learn(handed.usage)
            call.usage = {**handed.usage, "output": 0}
            return handed


class _Failed(Exception):
    """A prompt was not computed elsewhere; says why, with nothing in it that an upstream could choose."""


def _side(member: Member, uncached: int) -> Side:
    engine = member.engine
    return Side(uncached, engine.pending, engine.running, engine.prefill_rate)


def _handed(answer: bytes) -> Handed:
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        raise _Failed("prefill failed: not JSON") from None
    params = body.get("kv_transfer_params") if isinstance(body, Mapping) else None
    if not isinstance(params, dict) or not params:
        raise _Failed("prefill failed: no parameters")
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    return Handed(orjson.dumps(params), usage_of(usage), details)


def _for_prefill(outgoing: bytes) -> bytes:
    """The request as the prefill side gets it: the same prompt, and but one token wanted."""
    body = {name: value for name, value in parse(outgoing).items() if name not in _FOR_ANSWERS}
    limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name == "max_tokens" or name in body}
    return respell({**body, **limits, "kv_transfer_params": _ASKING})


def _with(plan: Plan, params: bytes) -> Plan:
    """The caller's own bytes, with the parameters before them."""
    return replace(plan, outgoing=b'{"kv_transfer_params":%s,' % params + plan.outgoing.lstrip()[1:])


def _is_one(prompt: object) -> bool:
    """Whether there is no more than one prompt: a text or token ids, or the messages of a chat (None here)."""
    return not isinstance(prompt, list) or all(isinstance(item, int) for item in prompt)


def _limit(body: Mapping[str, Any]) -> int | None:
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return next((limit for limit in limits if isinstance(limit, int)), None)
