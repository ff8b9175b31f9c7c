"""Locust users for a gateway: frequently asked questions, chats, agents, long documents, and bursts of them.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080          # with locust's own page
    make loadtest ARGS='--users 50 --spawn-rate 10 --run-time 60s'         # headless, with a report at the end

Environment: LOAD_MODEL (absent: the first model that is served), LOAD_KEYS (API keys of several tenants, separated by
commas; absent: none), LOAD_DIGEST=1 where the upstream answers with the digest of the conversation (``python -m
loadtest.stub_upstream --digest``): then every answer is checked, and a wrong one is a failure.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import gevent
from locust import FastHttpUser, between, constant, events, task

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # locust runs this file by its path

from loadtest.digest import digest_of
from loadtest.workloads import AgentLoop, Chat, Questions, document

KEYS = [key for key in os.environ.get("LOAD_KEYS", "").split(",") if key]
CHECKED = os.environ.get("LOAD_DIGEST") == "1"
QUESTIONS = Questions()
outcomes: Counter[str] = Counter()


class Caller(FastHttpUser):
    """Base of all users: of one tenant, with a memory of its own."""

    abstract = True
    wait_time = between(0.0, 0.05)
    model = os.environ.get("LOAD_MODEL", "")

    def on_start(self) -> None:
        self.rng = random.Random()
        self.key = self.rng.choice(KEYS) if KEYS else None

    def ask(self, body: dict[str, Any], kind: str) -> str:
        """Sends a request, holds its answer against its question, and gives the answer's text."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        form = "stream" if body.get("stream") else "plain"
        with self.client.post(
            "/v1/chat/completions", data=json.dumps(body), headers=headers, name=f"{kind}, {form}", catch_response=True
        ) as response:
            status = str((response.headers or {}).get("cache-status", "none"))
            outcomes[f"{kind}: {_outcome(status)}"] += 1
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return ""
            text = _streamed(response.text) if form == "stream" else _plain(response.text)
            if text is None:
                response.failure("the answer does not end as it should")
            elif CHECKED and text != digest_of(body["messages"]):
                response.failure("WRONG ANSWER")
            return text or ""


class FaqUser(Caller):
    """Asks what many ask."""

    weight = 12

    @task
    def question(self) -> None:
        self.ask(QUESTIONS.body(self.rng, self.model), "faq")


class BurstUser(Caller):
    """Silent for a while, then many questions at once."""

    weight = 2
    wait_time = constant(2)

    @task
    def burst(self) -> None:
        for _ in range(20):
            self.ask(QUESTIONS.body(self.rng, self.model), "burst")


class ChatUser(Caller):
    """Talks for eight turns, then begins anew."""

    weight = 3

    @task
    def conversation(self) -> None:
        chat = Chat(self.rng)
        while not chat.over:
            chat.answered(self.ask(chat.body(self.model), "chat"))


class AgentUser(Caller):
    """Runs a loop of tool calls."""

    weight = 2

    @task
    def loop(self) -> None:
        agent = AgentLoop(self.rng)
        while not agent.over:
            self.ask(agent.body(self.model), "agent")


class DocumentUser(Caller):
    """Asks about long documents."""

    weight = 1

    @task
    def read(self) -> None:
        self.ask(document(self.rng, self.model), "document")


@events.test_start.add_listener
def choose_model(environment: Any, **_: Any) -> None:
    """Without LOAD_MODEL, all ask for the first model that is served."""
    if Caller.model:
        return
    headers = {"Authorization": f"Bearer {KEYS[0]}"} if KEYS else {}
    models = Request(f"{environment.host}/v1/models", headers=headers)
    try:
        with build_opener(ProxyHandler({})).open(models, timeout=30) as response:
            Caller.model = json.load(response)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        print(f"{environment.host} names no model ({error}); start a gateway there, or set LOAD_MODEL", file=sys.stderr)
        environment.process_exit_code = 2
        gevent.spawn(environment.runner.quit)  # once it has begun; it would go on to begin, else


@events.quitting.add_listener
def report(environment: Any, **_: Any) -> None:
    """What the cache did, after locust's own table."""
    total = sum(outcomes.values())
    print(f"\nanswers by outcome (questions by Zipf's law, exponent {QUESTIONS.exponent}):")
    for name, count in sorted(outcomes.items()):
        print(f"  {name:32} {count:9}  {count / total:6.1%}")


def _outcome(cache_status: str) -> str:
    parts = [part.strip() for part in cache_status.split(";")[1:]]
    if "hit" in parts:
        return next((part.removeprefix("detail=") for part in parts if part.startswith("detail=")), "hit")
    if "collapsed" in parts:
        return "coalesced"
    return next((part for part in parts if part.startswith("fwd=")), cache_status)


def _plain(text: str | None) -> str | None:
    choice = json.loads(text or "{}")["choices"][0]
    return choice["message"]["content"] if choice["finish_reason"] else None


def _streamed(text: str | None) -> str | None:
    lines = [line.removeprefix("data: ") for line in (text or "").splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return None
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    if not any(choice["finish_reason"] for choice in choices):
        return None
    return "".join(choice["delta"].get("content") or "" for choice in choices)
