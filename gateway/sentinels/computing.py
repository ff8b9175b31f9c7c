"""What an upstream does with prefixes: found again, on which tier, for whom, and told of by KV events.

Only canaries here cost tokens, so they go to engines of one's own unless the operator says otherwise (`is_watched`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from gateway.config import ENGINE_UPSTREAM, Config, Upstream
from gateway.http import Request
from gateway.runtime import Runtime
from gateway.sentinels.aside import ONE, OTHER, Aside
from gateway.sentinels.lights import Light, green, grey, red
from gateway.sentinels.telling import Telling
from gateway.upstreams.pool import Member

PATIENCE = 30.0
"""Seconds that an upstream may take for all its canaries of a round."""
ELDERS = 10
"""Rounds for which a canary is remembered; the oldest is asked once more in each."""
LOUD = 3
"""Rounds in a row without an answer that turn a light red."""
_MOST_TIERS = 8
_FILLER = (
    "This text is sent by the gateway that stands before you, to see whether you still know what you have just read. "
    "It says nothing else, needs no answer, and is the same each time but for its beginning, which nobody has sent "
    "before; so whatever you find of it, you have computed for this very gateway and for nobody else. It is as long as "
    "it is because caches keep whole blocks only: many engines sixteen tokens, some thirty-two, a few of them one "
    "hundred and twenty-eight, and what fills no block is not kept. Two such blocks would be better than one, but each "
    "costs, so that this has to do. Please answer with a single word, since only one will be read, and then rest."
)
_PREFIX_OFF = (
    "prefix caching is off there, its memory is too small to keep a prompt for a moment, or several engines stand "
    "behind this address"
)


class NoAnswer(Exception):
    """The upstream did not answer a canary; with the status it gave, or ours for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one canary; ``cached`` None: the upstream does not say. ``tiers``: the cached ones by tier."""

    prompt: int
    cached: int | None
    tiers: dict[str, int]


def is_watched(upstream: Upstream, config: Config) -> bool:
    """Whether canaries are sent to it: as ``sentinel`` says, by itself to the embedded engine and to whatever
    publishes KV events, which nobody does for money.
    """
    if upstream.sentinel != "auto":
        return upstream.sentinel == "on"
    return upstream.kv_events is not None or (config.engine is not None and upstream.name == ENGINE_UPSTREAM)


class Computing:
    """The canaries for one upstream, by name; remembers those of earlier rounds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked_as = ("", "")  # model and revision
        self._elders: deque[tuple[dict[str, Any], int]] = deque()  # what was asked, and the prompt's tokens
        self._tiers: set[str] = set()  # that it has told of
        self._unanswered_rounds = 0

    async def look(self, runtime: Runtime, member: Member, spent: Counter[str]) -> list[Light]:
        """One round. What it costs is added to ``spent``."""
        if member.config.api != "openai":
            return [grey("prefix", "canaries speak OpenAI's dialect only", "upstreams[].api", self._name)]
        try:
            async with asyncio.timeout(PATIENCE):
                lights = await self._look(runtime, member, spent)
            self._unanswered_rounds = 0
            return lights
        except NoAnswer as error:
            light = self._no_answer(error)
        except TimeoutError:
            light = self._no_answer(NoAnswer(504, f"nothing within {PATIENCE:g} s"))
        rest = ("prefix of another tenant", "template", "events")
        return [light, *(grey(name, "needs an answer of the upstream", upstream=self._name) for name in rest)]

    async def _look(self, runtime: Runtime, member: Member, spent: Counter[str]) -> list[Light]:
        model = await _model(runtime, member)
        asked_as = (model, runtime.planner.model(model).revision)
        if asked_as != self._asked_as:
            self._asked_as = asked_as
            self._elders.clear()
        alone = {"models": (model,), "role": "both", "kv_events": None, "tokenizer": None}
        aside = Aside(runtime, upstream=member.config.model_copy(update=alone))
        body = _prompt(model)
        telling = Telling(runtime, member, body)
        first = await self._ask(aside, ONE, body, spent)
        again = await self._ask(aside, ONE, body, spent)
        found = (again.cached or 0) > (first.cached or 0)
        lights = [self._prefix(again, found=found)]
        salt = runtime.planner.salt(ONE)
        told = await telling.light(salt, found=found)
        if told.state != "green" and found and telling.expected:
            telling.also(another := _prompt(model))
            await self._ask(aside, ONE, another, spent)
            told = await telling.light(salt, found=found)
        lights.append(told)
        if not member.config.cache_salt:
            cause = "no salt is sent, so that tenants share prefixes"
            lights.append(grey("prefix of another tenant", cause, "upstreams[].cache_salt", self._name))
        elif not found:
            lights.append(grey("prefix of another tenant", "no prefix is found, be it one's own", upstream=self._name))
        else:
            lights.append(self._isolation(again, await self._ask(aside, OTHER, body, spent)))
        elder, before = None, 0
        if self._elders:
            asked, before = self._elders[0]
            elder = await self._ask(aside, ONE, asked, spent)
        lights += self._on_tiers(again, elder, before)
        lights.append(self._template(first.prompt, elder.prompt if elder is not None else None, before, telling))
        self._elders.append((body, first.prompt))
        if len(self._elders) > ELDERS:
            self._elders.popleft()
        return lights

    async def _ask(self, aside: Aside, tenant: str, body: dict[str, Any], spent: Counter[str]) -> Usage:
        spent["requests"] += 1
        told = await aside.ask(tenant, body, [(b"cache-control", b"no-store")])
        if told.status != 200:
            raise NoAnswer(told.status, told.said)
        usage = told.usage
        prompt = _number(usage.get("prompt_tokens")) or 0
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        tiers = details.get("cached_by_tier")
        tiers = (
            {str(tier)[:40]: _number(count) or 0 for tier, count in tiers.items()} if isinstance(tiers, dict) else {}
        )
        cached = _number(details.get("cached_tokens"))
        spent["prompt"] += prompt
        spent["cached"] += cached or 0
        spent["output"] += _number(usage.get("completion_tokens")) or 0
        if len(self._tiers) < _MOST_TIERS:
            self._tiers |= tiers.keys()
        return Usage(prompt, cached, tiers)

    def _prefix(self, again: Usage, *, found: bool) -> Light:
        if found:
            return green("prefix", self._name)
        if again.cached is None:
            cause = "it does not say how many tokens it had cached (vLLM: --enable-prompt-tokens-details)"
            return grey("prefix", cause, upstream=self._name)
        return red("prefix", _PREFIX_OFF, "the upstream's own (vLLM: --enable-prefix-caching)", self._name)

    def _isolation(self, own: Usage, others: Usage) -> Light:
        name = "prefix of another tenant"
        if (others.cached or 0) < (own.cached or 0):
            return green(name, self._name)
        cause = "it, or a proxy before it, takes no notice of cache_salt: timing tells tenants of each other's prompts"
        return red(name, cause, "upstreams[].cache_salt", self._name)

    def _on_tiers(self, again: Usage, elder: Usage | None, before: int) -> list[Light]:
        """A lower tier is looked into only for what the ones above have not: by the oldest canary, of ``before``
        tokens, of which the nearest may still have the beginning.
        """
        lights: list[Light] = []
        lost = elder is not None and elder.cached is not None and 2 * elder.cached < before
        for tier in sorted(self._tiers):
            if again.tiers.get(tier) or (elder is not None and elder.tiers.get(tier)):
                lights.append(green("tier", self._name, tier))
            elif lost and not again.tiers.get(tier) and tier != "device":
                cause = (
                    f"a prompt of {len(self._elders)} rounds ago is mostly on no tier any more: too small, or it fails"
                )
                lights.append(red("tier", cause, "engine.kv_cache", self._name, tier))
            else:
                lights.append(grey("tier", "all was found on a nearer tier", "", self._name, tier))
        return lights

    def _template(self, now: int, again: int | None, before: int, telling: Telling) -> Light:
        name = "template"
        if not now:
            return grey(name, "it does not say how many tokens a prompt has", upstream=self._name)
        if again is not None and again != before:
            cause = f"the same prompt made {before} tokens and makes {again} now: template, tokenizer or model changed"
            return red(name, f"{cause}, and kept answers are of the old ones", "models.*.revision", self._name)
        if telling.tokens and telling.tokens != now:
            cause = f"it makes {now} tokens of a prompt of which its tokenizer here makes {telling.tokens}"
            return red(name, f"{cause}: another template or tokenizer", "upstreams[].tokenizer", self._name)
        if telling.other_tokens:
            cause = "its KV events name other tokens than its tokenizer here makes: another template or tokenizer"
            return red(name, cause, "upstreams[].tokenizer", self._name)
        if again is None and not telling.tokens:
            return grey(name, "not yet: told from the second round on", upstream=self._name)
        return green(name, self._name)

    def _no_answer(self, error: NoAnswer) -> Light:
        """Whoever is still loading or has too much to do fails loudly if it fails, so that red takes some rounds."""
        self._unanswered_rounds += 1
        said = f"status {error.status}: {str(error)[:200]}"
        if error.status in (401, 403):
            return red("prefix", f"it refuses the gateway ({said})", "upstreams[].api_key", self._name)
        if error.status == 429:
            return grey("prefix", f"it is too busy for canaries ({said})", upstream=self._name)
        if 400 <= error.status < 500:
            return grey("prefix", f"it does not take chat canaries ({said})", "upstreams[].sentinel", self._name)
        if self._unanswered_rounds < LOUD:
            return grey("prefix", f"no answer yet: it is loading, busy or gone ({said})", upstream=self._name)
        return red("prefix", f"it does not answer, or is far too busy ({said})", "upstreams[].url", self._name)


async def _model(runtime: Runtime, member: Member) -> str:
    """The first model that the upstream serves; raises `NoAnswer`."""
    await runtime.pool.models(Request("GET", "/v1/models", b"", [], b""))
    known = member.known_models
    if not known:
        raise NoAnswer(503, "it names no model")
    return min(known)


def _prompt(model: str) -> dict[str, Any]:
    """A prompt of about 190 tokens that nobody has sent before, for one token of an answer."""
    text = f"{secrets.token_hex(8)}. {_FILLER}"
    return {"model": model, "temperature": 0, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}


def _number(value: object) -> int | None:
    """A count as an upstream gives it, if it makes sense."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None
