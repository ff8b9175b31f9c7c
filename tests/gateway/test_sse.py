"""Server-sent events by their grammar (WHATWG HTML, section 9.2.6), however the network cuts them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import Event, EventReader, EventTooLarge, frame

LINE_ENDS = ("\n", "\r\n", "\r")
lines = st.sampled_from(
    [
        "data: a",
        "data:b",
        "data:  c",
        "data",
        "data: 你好🙂",
        ": comment",
        ":",
        "event: ping",
        "event:x",
        "id: 7",
        "retry: 1",
        "x: y",
        "",
    ]
)


def by_the_book(text: str) -> list[tuple[str, str]]:
    """Name and data of every event, line by line, as the specification tells it."""
    found: list[tuple[str, str]] = []
    name, data = "", []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
        if not line:
            if data:
                found.append((name, "\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return found


def told(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.data.decode()) for event in events if event.data is not None]


@given(
    parts=st.lists(st.tuples(lines, st.sampled_from(LINE_ENDS)), max_size=30),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_events_are_those_of_the_specification_wherever_they_are_cut(
    parts: list[tuple[str, str]], cuts: list[int]
) -> None:
    text = "".join(line + end for line, end in parts)
    raw = text.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    reader = EventReader()
    events = [event for start, end in pairwise(places) for event in reader.feed(raw[start:end])]
    assert b"".join(event.raw for event in events) + reader.rest() == raw
    assert told(events + reader.finish()) == by_the_book(text)


def test_an_event_is_given_out_with_its_last_byte() -> None:
    reader = EventReader()
    whole = b"event: e\r\ndata: 1\r\n\r\n"
    assert [reader.feed(whole[at : at + 1]) for at in range(len(whole) - 1)] == [[]] * (len(whole) - 1)
    assert told(reader.feed(whole[-1:])) == [("e", "1")]


def test_a_byte_order_mark_is_skipped() -> None:
    assert told(EventReader().feed("\ufeffdata: 1\n\n".encode())) == [("", "1")]


def test_a_last_line_that_ends_with_a_bare_cr_is_waited_for_only_while_more_may_come() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\r\r") == []
    assert told(reader.finish()) == [("", "1")]


def test_an_endless_event_is_given_up() -> None:
    reader = EventReader(max_event=10)
    reader.feed(b"data: 12")
    with pytest.raises(EventTooLarge):
        reader.feed(b"345")


def test_frames_are_events() -> None:
    assert told(EventReader().feed(frame(b"{}") + frame(b"[]", "named"))) == [("", "{}"), ("named", "[]")]
