"""Prefix health: planted faults are found where they are, and clean traffic is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.prefix_health import Finding, PrefixHealth, report

RULES = "\n".join(
    f"Rule {word}: answer with care, in full sentences, and say what is not known." for word in "abcdefgh"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name} for the caller, once, and says so."}}
    for name in ("alpha", "beta", "gamma")
]
NAMES = ["Anna", "Boris", "Chloe", "Dmitri"]
IDS = [
    "3f2b8c1e-9a4d-4c7b-8e21-0d9f6a7b5c34",
    "b71e02d4-5c3f-4e8a-9f10-6d2c8b4a7e95",
    "0c9d8e7f-6a5b-4c3d-8e2f-1a0b9c8d7e6f",
]


def chat(system: str, question: str = "What is a cache?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m1", "messages": messages, **fields}


def called(identifier: str) -> dict[str, Any]:
    call = {"id": identifier, "type": "function", "function": {"name": "alpha", "arguments": "{}"}}
    body = chat("Help.")
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identifier, "content": RULES},
    ]
    return body


def looked_at(*bodies: dict[str, Any]) -> list[Finding]:
    health = PrefixHealth(lambda: 0.0)
    for body in bodies:
        health.look("t1", body["model"], body)
    return health.findings


def planted(make: Callable[[int], dict[str, Any]], times: int = 3) -> Finding:
    findings = looked_at(*(make(i) for i in range(times)))
    assert len(findings) == 1, findings
    assert findings[0].seen == times - 1
    assert findings[0].lost // findings[0].seen >= len(RULES) // 4 - 60
    return findings[0]


@pytest.mark.parametrize(
    ("before", "kind", "values"),
    [
        ("The time is ", "timestamp", ["2026-11-30T10:00:01Z", "2026-11-30T10:00:02Z", "2026-11-30T11:07:45Z"]),
        ("It is now ", "timestamp", ["10:01 AM", "10:02 AM", "11:15 PM"]),
        ("Today is ", "timestamp", ["Monday, November 30", "Tuesday, December 1", "Friday, December 4"]),
        ("Clock: ", "timestamp", ["1796032801", "1796032915", "1796040001"]),
        ("Request ", "UUID", IDS),
        ("This is request number ", "counter", ["17", "18", "19"]),
        ("You are assisting ", "per-user text", NAMES),
        ("Hello ", "per-user text", NAMES),
        ("Run at temperature ", "sampling settings", ["0.2", "0.7", "0.9"]),
        ("Trace: ", "random id", ["call_a81kZ02m", "call_B77qLx0p", "call_92ksmWQe"]),
        ("The mood of the day: ", "varying text", ["calm", "stormy", "bright"]),
    ],
)
def test_what_changes_before_what_stays_is_found_at_its_place(before: str, kind: str, values: list[str]) -> None:
    found = planted(lambda i: chat(f"{before}{values[i]}.\n{RULES}"))
    assert (found.path, found.kind) == ("messages[0].content", kind)
    assert len(before) <= found.offset < len(before) + len(values[0])


def test_a_trailing_space() -> None:
    found = planted(lambda i: chat("You are kind." + " " * i, question=RULES))
    assert (found.path, found.kind, found.offset) == ("messages[0].content", "whitespace", len("You are kind."))


def test_a_changed_newline() -> None:
    found = planted(lambda i: chat("You are kind." + "\n" * (1 + i) + RULES))
    assert (found.path, found.kind, found.offset) == ("messages[0].content", "newline", len("You are kind."))


def test_a_prompt_of_which_only_the_beginning_is_looked_at() -> None:
    found = planted(lambda i: chat(f"You are assisting {NAMES[i]} {'Maria ' * i}today. " + RULES * 100))
    assert (found.kind, found.offset) == ("per-user text", len("You are assisting "))


def test_windows_line_ends() -> None:
    assert planted(lambda i: chat("You are kind." + ("\n", "\r\n")[i % 2] + RULES), times=2).kind == "newline"


def test_tools_in_another_order() -> None:
    found = planted(lambda i: chat(RULES, tools=TOOLS[i:] + TOOLS[:i]))
    assert (found.path, found.kind) == ("tools[0]", "reordered tools")


def test_keys_in_another_order() -> None:
    def make(i: int) -> dict[str, Any]:
        pairs = [("name", "alpha"), ("description", "x" * 200), ("strict", True)]
        return chat(RULES, tools=[{"type": "function", "function": dict(pairs[i:] + pairs[:i])}])

    found = planted(make)
    assert (found.path, found.kind) == ("tools[0]", "shuffled keys")


def test_a_random_id_in_a_tool_call() -> None:
    found = planted(lambda i: called(f"call_{IDS[i][:8]}"))
    assert (found.path, found.kind) == ("messages[2].tool_calls[0].id", "random id")


def test_a_history_that_is_cut_at_its_front() -> None:
    def make(i: int) -> dict[str, Any]:
        turns = [{"role": "user", "content": f"Question {n}: {RULES[:200]}"} for n in range(i, i + 6)]
        return {"model": "m1", "messages": [{"role": "system", "content": "Help."}, *turns]}

    found = planted(make)
    assert (found.path, found.kind) == ("messages[1].content", "dropped turns")


def test_two_names_of_one_model() -> None:
    dated = chat(RULES) | {"model": "openai/m1-2026-08-06"}
    (found,) = looked_at(chat(RULES), dated)
    assert (found.kind, found.model) == ("model alias", "m1 / openai/m1-2026-08-06")
    assert looked_at(chat(RULES), chat(RULES) | {"model": "m2"}) == []


def test_clean_traffic_has_no_faults() -> None:
    questions = ["What is a cache?", "How does a bird fly?", "Name three rivers in Europe.", "What is a cache?"]
    assert looked_at(*(chat(RULES, question, tools=TOOLS) for question in questions)) == []


def test_a_growing_conversation_has_no_faults() -> None:
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"Turn {n}. {RULES[:300]}"} for n in range(9)]
    assert looked_at(*({"model": "m1", "messages": turns[:n]} for n in range(1, 9, 2))) == []


def test_a_time_behind_all_that_stays_is_no_fault() -> None:
    assert looked_at(*(chat(f"{RULES}\nThe time is 10:0{i}.", f"Question {i}?") for i in range(4))) == []


def test_no_text_is_kept() -> None:
    health = PrefixHealth(lambda: 0.0)
    for i in range(3):
        health.look("t1", "m1", chat(f"Secret{i} number 10:0{i}.\n{RULES}"))
    assert "Secret" not in json.dumps(report([health.told()]))
    assert "Secret" not in repr(health._groups)


def test_the_report_says_what_a_fault_costs_a_day() -> None:
    clock = [0.0]
    health = PrefixHealth(lambda: clock[0], look_every=10.0)
    for i in range(100):
        health.request("t1", "m1", chat(f"At {10 + i // 60}:{i % 60:02}.\n{RULES}"), now=float(i))
    clock[0] = 100.0
    told = report([health.told(), health.told()])  # two workers
    assert (told["requests"], told["looked_at"]) == (200, 20)
    (found,) = told["findings"]
    assert found["seen"] == 18
    assert found["lost_per_day"] == pytest.approx(found["lost"] * 10 * 864, rel=0.02)
    assert found["mend"]


@pytest.mark.parametrize("body", [{}, {"messages": None}, {"messages": [None, 3, {"content": [{"text": 7}]}]}])
def test_odd_bodies_do_no_harm(body: dict[str, Any]) -> None:
    health = PrefixHealth(lambda: 0.0)
    for _ in range(3):
        assert health.look("t1", "m1", body) is None
