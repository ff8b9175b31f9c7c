"""The verdict: who takes part in the cache, and why."""

from decimal import Decimal

import pytest

from policies.cacheability import Ask, Outcome, Turn, judge, storable


def ask(text: str = "What is the capital of France?", **changes: object) -> Ask:
    return Ask(**({"turns": [Turn("user", text)]} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [0, 0.0, Decimal("0.0"), Decimal("-0.0")])
@pytest.mark.parametrize("sampled", ["never", "faq", "always"])
def test_deterministic_requests_are_cached(zero: object, sampled: str) -> None:
    assert judge(ask("hello", temperature=zero), sampled=sampled, opted_in=False).cacheable  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [None, 0.7, Decimal("0.7"), 1])
def test_sampled_requests_are_cached_only_when_somebody_asked_for_it(temperature: object) -> None:
    sampled = ask("Tell me a joke", temperature=temperature)
    assert not judge(sampled, sampled="never", opted_in=False).cacheable
    assert not judge(sampled, sampled="faq", opted_in=False).cacheable
    assert judge(sampled, sampled="always", opted_in=False).cacheable
    assert judge(sampled, sampled="never", opted_in=True).cacheable


@pytest.mark.parametrize("odd", ["0", True, False, [], {}])
def test_a_temperature_that_is_no_number_is_left_to_the_upstream(odd: object) -> None:
    verdict = judge(ask(temperature=odd), sampled="always", opted_in=False)
    assert not verdict.cacheable
    assert "temperature" in verdict.reason


def test_side_effects_are_never_cached_whoever_asks() -> None:
    assert not judge(ask(temperature=0, side_effects="store: true"), sampled="always", opted_in=True).cacheable


def test_answers_that_depend_on_the_world_need_the_callers_own_wish() -> None:
    searching = ask(temperature=0, world="web search")
    assert not judge(searching, sampled="always", opted_in=False).cacheable
    assert judge(searching, sampled="never", opted_in=True).cacheable


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "Who wrote Hamlet?",
        "How many legs has a spider",
        "Define entropy.",
        "When was OpenAI founded?",
    ],
)
def test_static_questions_are_the_knowledge_panel(text: str) -> None:
    assert judge(ask(text), sampled="faq", opted_in=False).reason == "static question"
    assert judge(
        Ask([Turn("system", "Be brief. Today is Monday."), Turn("user", text)]), sampled="faq", opted_in=False
    ).cacheable


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("What time is it?", "time"),
        ("What is today's weather?", "time"),
        ("Who is the current president of France?", "time"),
        ("What is the latest version of Python?", "time"),
        ("Who is the president of France?", "changing"),
        ("How old is the Queen?", "changing"),
        ("What is my name?", "personal"),
        ("How do I reset my password?", "personal"),
        ("What did you say?", "personal"),
        ("What does it mean?", "session"),
        ("Who wrote these?", "session"),
        ("What was said above?", "session"),
        ("Paris", "question word"),
        ("Write a poem about spring", "question word"),
        ("Quelle est la capitale de la France ?", "question word"),
        ("法国的首都是哪里？", "language"),
        ("What is x?\nAnd what is y?", "lines"),
        ("What is " + "a " * 200, "long"),
        ("", "question word"),
    ],
)
def test_what_is_not_surely_static_is_not_cached(text: str, word: str) -> None:
    verdict = judge(ask(text), sampled="faq", opted_in=False)
    assert not verdict.cacheable
    assert word in verdict.reason


@pytest.mark.parametrize(
    "other",
    [
        Ask([Turn("user", "What is x?"), Turn("assistant", "y"), Turn("user", "What is z?")]),
        Ask([Turn("user", None)]),
        Ask([]),
        Ask([Turn("assistant", "What is x?")]),
        Ask([Turn("user", "What is x?")], tools=True),
    ],
)
def test_conversations_tools_and_pictures_are_not_static(other: Ask) -> None:
    assert not judge(other, sampled="faq", opted_in=False).cacheable


ACCEPTED = ("stop", "tool_calls")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome(), "incomplete"),
        (Outcome(finishes=("stop",), fault="status 500"), "status 500"),
        (Outcome(finishes=("length",)), "length"),
        (Outcome(finishes=("content_filter",)), "content_filter"),
        (Outcome(finishes=("stop", "content_filter")), "content_filter"),
        (Outcome(finishes=("refusal",)), "refusal"),
    ],
)
def test_only_complete_and_accepted_answers_are_stored(outcome: Outcome, reason: str) -> None:
    verdict = storable(outcome, ACCEPTED)
    assert not verdict.cacheable
    assert reason in verdict.reason


def test_length_is_stored_only_where_listed() -> None:
    assert storable(Outcome(finishes=("stop", "tool_calls")), ACCEPTED).cacheable
    assert storable(Outcome(finishes=("length",)), (*ACCEPTED, "length")).cacheable
