"""Curated answers: which spellings are one question, which are not, and what is wrong with a file."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.response.faq import Faq, FaqError, normalise, read_faq

FILE = """
- ask: ["When was OpenAI founded?", "what year was openai founded"]
  answer: "OpenAI was founded in December 2015."
  tags: [company]
  expires: 2027-06-01
- ask: What is 2+2?
  answer: "4"
  models: [m1]
"""


@pytest.mark.parametrize(
    "question",
    [
        "When was OpenAI founded?",
        "when was openai founded",
        " WHEN  was\tOpenAI founded ?!",
        "“When was ＯｐｅｎＡＩ founded…”",
    ],
)
def test_light_normalisation_finds_the_question(question: str) -> None:
    found = read_faq(FILE).find(question, ["any"], 0)
    assert found is not None
    assert found.answer == "OpenAI was founded in December 2015."


def test_signs_that_carry_meaning_keep_questions_apart() -> None:
    things = [
        "5",
        "-5",
        "5!",
        ".5",
        "5%",
        "52",
        "5²",
        "$5",
        "C",
        "C++",
        "C#",
        "NET",
        ".NET",
        "[0,1]",
        "[0,1)",
        "½",
        "1/2",
        "12",
        "n",
        "n!",
        "10^2",
        "102",
    ]
    questions = [f"What is {thing}?" for thing in things]
    for one, other in combinations(questions, 2):
        assert normalise(one) != normalise(other), (one, other)


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_an_entry_serves_only_its_models_and_only_until_it_expires() -> None:
    faq = read_faq(FILE)
    assert faq.find("what is 2+2", ["m1"], 0) is not None
    assert faq.find("what is 2+2", ["alias", "m1"], 0) is not None
    assert faq.find("what is 2+2", ["m2"], 0) is None
    june = 1_811_808_000  # 2027-06-01T00:00Z
    assert faq.find("When was OpenAI founded", ["m1"], june - 1) is not None
    assert faq.find("When was OpenAI founded", ["m1"], june) is None


def test_two_answers_to_one_question_are_named_and_neither_is_served() -> None:
    faq = read_faq('- {ask: "A?", answer: one}\n- {ask: [b, a], answer: two}\n- {ask: c, answer: three}\n')
    assert faq.find("a", ["m"], 0) is None
    assert faq.find("b", ["m"], 0) is not None
    assert len(faq.collisions()) == 1
    assert "'a'" in faq.collisions()[0]


def test_the_same_question_for_different_models_is_no_collision() -> None:
    faq = read_faq("- {ask: a, answer: one, models: [m1]}\n- {ask: a, answer: two, models: [m2]}\n")
    assert faq.collisions() == []
    assert [faq.find("a", [model], 0).answer for model in ("m1", "m2")] == ["one", "two"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: b", "list"),
        ("- 1", "ask"),
        ("- {ask: x}", "answer"),
        ("- {answer: x}", "ask"),
        ("- {ask: x, answer: y, tag: z}", "unknown key 'tag'"),
        ("- {ask: [], answer: y}", "ask"),
        ("- {ask: '?!', answer: y}", "no words"),
        ("- {ask: x, answer: y, expires: soon}", "expires"),
        ("- {ask: x, answer: 3}", "answer"),
        ("- {ask: [x", "YAML"),
    ],
)
def test_faults_in_a_file_are_named(text: str, word: str) -> None:
    with pytest.raises(FaqError, match=word):
        read_faq(text)


def test_an_empty_file_has_no_answers() -> None:
    assert read_faq("").entries == Faq().entries == ()
