"""Workloads are reproducible, and are what they say."""

import random
from collections import Counter

from loadtest.digest import digest_of
from loadtest.workloads import AgentLoop, Chat, Questions, document


def test_questions_follow_zipfs_law() -> None:
    questions, rng = Questions(count=100, exponent=1.0), random.Random(1)
    texts = [questions.body(rng, "m")["messages"][0]["content"] for _ in range(20_000)]
    seen = Counter(text.rpartition(" ")[2] for text in texts)
    assert 8 < seen["0?"] / seen["9?"] < 12.5


def test_a_chat_grows_by_its_answers_and_keeps_its_beginning() -> None:
    chat = Chat(random.Random(1), turns=3)
    bodies = []
    while not chat.over:
        bodies.append(chat.body("m"))
        chat.answered("fine")
    assert [len(body["messages"]) for body in bodies] == [2, 4, 6]
    assert bodies[2]["messages"][:4] == bodies[1]["messages"]


def test_an_agent_answers_every_tool_call() -> None:
    agent = AgentLoop(random.Random(1), turns=2)
    agent.body("m")
    messages = agent.body("m")["messages"]
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def test_documents_repeat_and_are_long() -> None:
    rng = random.Random(1)
    bodies = [document(rng, "m", kilobytes=20, documents=2) for _ in range(20)]
    beginnings = {body["messages"][0]["content"][:15_000] for body in bodies}
    assert len(beginnings) == 2


def test_the_digest_tells_conversations_apart_and_not_their_spelling() -> None:
    one = [{"role": "user", "content": "a"}]
    assert digest_of(one) == digest_of([{"content": "a", "role": "user"}])
    assert digest_of(one) != digest_of([{"role": "user", "content": "b"}])
