"""Text out of tokens: whole characters only, stop strings cut cleanly wherever token borders fall."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.output import Delta, Output
from engine.sampling import TokenLogprob
from tests.engine import tiny

TOKENIZER = tiny.tokenizer()


def say(text: str, stops: list[str] | None = None, *, last: bool = True, reports: bool = False) -> list[Delta]:
    """Feeds a text byte by byte, as this tokenizer has it, until the output says it has ended."""
    output = Output(TOKENIZER, stops or [])
    ids = TOKENIZER.encode(text)
    deltas: list[Delta] = []
    for i, token in enumerate(ids):
        report = TokenLogprob(token, -1.0, []) if reports else None
        deltas.append(output.push(token, report, last=last and i == len(ids) - 1))
        if deltas[-1].finish_reason:
            break
    return deltas


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_no_delta_holds_half_a_character() -> None:
    deltas = say("a你好🙂é")
    assert [delta.text for delta in deltas if delta.text] == list("a你好🙂é")
    assert "\ufffd" not in joined(deltas)


def test_a_character_cut_off_by_the_limit_becomes_one_replacement() -> None:
    output = Output(TOKENIZER, [])
    ids = TOKENIZER.encode("🙂")
    deltas = [output.push(token, None, last=i == 2) for i, token in enumerate(ids[:3])]
    assert joined(deltas) == "\ufffd"
    assert deltas[-1].finish_reason == "length"


def test_the_end_token_ends_without_text() -> None:
    output = Output(TOKENIZER, [])
    output.push(TOKENIZER.encode("a")[0], None, last=False)
    delta = output.push(256, None, last=False)
    assert (delta.text, delta.finish_reason) == ("", "stop")


def test_the_end_token_is_passed_over_when_asked() -> None:
    output = Output(TOKENIZER, [], ignore_eos=True)
    assert output.push(256, None, last=False).finish_reason is None


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("hello world", [" wor"], "hello"),
        ("hello world", ["xyz", "lo", "world"], "hel"),
        ("aaab", ["aab"], "a"),
        ("ab", ["abc"], "ab"),
        ("你好🙂!", ["🙂"], "你好"),
        ("stop", ["s"], ""),
        ("abcabd", ["abd", "bca"], "a"),
    ],
)
def test_stop_strings_cut_across_token_borders(text: str, stops: list[str], left: str) -> None:
    deltas = say(text, stops)
    assert joined(deltas) == left
    assert deltas[-1].finish_reason == ("length" if left == text else "stop")


@given(st.text("ab🙂", max_size=30), st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3))
def test_what_is_sent_is_the_text_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    sent = joined(say(text, stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        seen = text[: min(ends)]  # what had been said when the first stop string was complete
        assert sent == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    else:
        assert sent == text


def test_a_possible_beginning_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assert joined(say("xabca", ["abcab"], last=False)) == "x"
    assert joined(say("xabcac", ["abcab"], last=False)) == "xabcac"
    assert joined(say("xabca", ["abcab"], last=True)) == "xabca"


def test_reports_go_out_with_their_text_and_not_behind_a_stop() -> None:
    deltas = say("hello", ["llo"], reports=True)
    assert [len(delta.logprobs) for delta in deltas if delta.text or delta.logprobs] == [1, 1]
    every = say("a🙂b", reports=True)
    assert sum(len(delta.logprobs) for delta in every) == 6
    assert all(one.text or not one.logprobs for one, _ in pairwise(every))
