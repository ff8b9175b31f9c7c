"""The whole: two vLLMs over one LMCache over one Redis, and the gateway, for two tenants."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from tests.real.processes import NAME, Gateway, LMCache, Vllm, counter
from tests.services import RedisServer

PATIENCE = 60.0
"""Seconds in which what one server tells another must have arrived."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Answer:
    """An answer and where it comes from. ``expected``: the tokens that the gateway believed to be held there;
    ``cached``: those that vLLM says were.
    """

    response: httpx.Response

    @property
    def upstream(self) -> str:
        return self.response.headers["x-warmgate-upstream"]

    @property
    def route(self) -> str:
        return self.response.headers["x-warmgate-route"]

    @property
    def expected(self) -> int:
        found = re.search(r"cached=(\d+)/", self.route)
        return int(found[1]) if found else 0

    @property
    def _bodies(self) -> list[dict[str, Any]]:
        """The answer, or the pieces of one that was streamed."""
        if "text/event-stream" not in self.response.headers["content-type"]:
            return [self.response.json()]
        lines = [line.removeprefix("data: ") for line in self.response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    @property
    def usage(self) -> dict[str, Any]:
        return self._bodies[-1].get("usage") or {}

    @property
    def prompt(self) -> int:
        return self.usage["prompt_tokens"]

    @property
    def cached(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @property
    def text(self) -> str:
        choices = [choice for body in self._bodies for choice in body["choices"]]
        said = [choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices]
        return "".join(piece.get("content") or "" for piece in said)


@dataclass
class Stack:
    """``keys``: a key for each tenant."""

    redis: RedisServer
    lmcache: LMCache
    vllms: tuple[Vllm, Vllm]
    gateway: Gateway
    keys: dict[str, str]
    _secret: str = field(default="of the tests, and long enough to be one")

    def start_engines(self) -> None:
        """LMCache first: vLLM looks for it when it starts."""
        self.lmcache.launch()
        self.lmcache.wait()
        for vllm in self.vllms:
            vllm.launch()
        for vllm in self.vllms:
            vllm.wait()

    def stop_engines(self) -> None:
        for process in (*self.vllms, self.lmcache):
            process.stop()

    def start_gateway(self, roles: tuple[str, str] = ("both", "both"), **changes: Any) -> None:
        """Starts it anew with this configuration."""
        self.gateway.stop()
        config: dict[str, Any] = {
            "upstreams": [vllm.upstream(role) for vllm, role in zip(self.vllms, roles, strict=True)],
            "tenants": [{"name": name, "keys": [_digest(key)]} for name, key in self.keys.items()],
            "cache": {"disk": "off"},
            "sentinels": "off",
            **changes,
        }
        self.gateway.launch(config, WARMGATE_SECRET=self._secret)
        self.gateway.wait()

    def vllm(self, name: str) -> Vllm:
        return next(vllm for vllm in self.vllms if vllm.name == name)

    def ask(self, text: str, question: str, tenant: str = "red", **fields: Any) -> Answer:
        """A chat about a text, over a new connection."""
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        return self.send(CHAT, {"messages": messages, "max_tokens": 8, **fields}, tenant)

    def send(self, path: str, body: dict[str, Any], tenant: str = "red") -> Answer:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        whole = {"model": NAME, "temperature": 0, **body}
        response = httpx.post(self.gateway.url + path, json=whole, headers=headers, timeout=300, trust_env=False)
        assert response.status_code == 200, response.text
        return Answer(response)

    def chunks(self) -> int:
        """What LMCache keeps in Redis."""
        with self.redis.client() as client:
            return cast(int, client.dbsize())

    def redis_hits(self) -> int:
        """Reads of Redis that found something, since it started."""
        with self.redis.client() as client:
            return cast(dict[str, int], client.info("stats"))["keyspace_hits"]

    def known(self, vllm: Vllm) -> int:
        """The blocks of a vLLM that every worker of the gateway knows of."""
        page = httpx.get(f"{self.gateway.url}/metrics", timeout=30, trust_env=False).text
        workers = set(re.findall(r'warmgate_route_index_blocks\{worker="([^"]+)"', page))
        of_each = [
            counter(page, "warmgate_kv_events_total", {"upstream": vllm.name, "what": "blocks", "worker": worker})
            for worker in workers
        ]
        return int(min(of_each, default=0))


def _digest(key: str) -> str:
    """A key as it may stand in a configuration."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def eventually(true: Callable[[], bool], what: str) -> None:
    """Waits for what another process is about to do."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.2)


def document(seed: int, items: int = 40) -> str:
    """A text of some 600 tokens that begins like no other."""
    things = ("fox", "dog", "hen", "cow", "owl")
    lines = (f"Item {i}: the number {(seed + i * 7919) % 1000} lies beside the {things[i % 5]}." for i in range(items))
    return f"List {seed}.\n" + "\n".join(lines)
