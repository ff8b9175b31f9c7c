"""Why prompts that could share a prefix do not: where two of them part, what kind of text parts them, and how much that
was the same behind it had to be computed anew.

A prompt is compared as a `Print`: hashes of its words, salted by the process; the text itself is not kept. A difference
is a fault only if much the same follows it: another question at a prompt's end, or another turn of a conversation,
breaks nothing that a cache could have kept.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "timestamp",
    "UUID",
    "random id",
    "counter",
    "sampling settings",
    "per-user text",
    "whitespace",
    "newline",
    "reordered tools",
    "shuffled keys",
    "dropped turns",
    "varying text",
]
MEND: dict[str, str] = {
    "timestamp": "Put the time behind all that stays the same, or round it to the day.",
    "UUID": "Leave the id out of the prompt, or put it behind all that stays the same.",
    "random id": "Derive the id from the content (or number the calls), so that the same call has the same id.",
    "counter": "Put the number behind all that stays the same.",
    "sampling settings": "Settings belong in the request's fields, not in its text.",
    "per-user text": "Put what differs from user to user behind what is the same for all.",
    "whitespace": "Strip the text before it is sent: one space more makes another prompt.",
    "newline": "Use one kind and one number of line ends: another makes another prompt.",
    "reordered tools": "Send the tools in one order, sorted by name.",
    "shuffled keys": "Serialise JSON with sorted keys.",
    "dropped turns": "Cut a long history seldom and in large steps, or summarise it: each cut begins the prefix anew.",
    "varying text": "Put what changes behind what stays the same.",
    "model alias": "Ask for one name of the model: each name has a cache of its own.",
}
"""The change that mends each kind of fault."""
MIN_LOST = 16
"""Tokens that must have been the same behind a difference for it to be a fault."""
CHARS_PER_TOKEN = 4
MAX_CHARS = 32_000
"""Characters of a prompt that are looked at."""

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_TIME = "|".join(
    (
        r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?",
        r"\d{1,2}:\d\d(?::\d\d)?(?:\s?[AaPp][Mm])?",
        r"\d{1,2}[./]\d{1,2}[./]\d{2,4}",
        r"\b1[5-9]\d{8}(?:\d{3})?\b",  # unix seconds or milliseconds
        r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b",
        rf"\b{_MONTH}\.? \d{{1,2}}\b",
        rf"\b\d{{1,2}} {_MONTH}",
    )
)
_LOOKS = re.compile(
    r"(?P<U>\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b)"
    rf"|(?P<T>{_TIME})"
    r"|(?P<K>\b(?:temperature|top_p|top_k|seed|max_tokens)\b\W{1,4}[\d.]+)"
    r"|(?P<I>\b(?:call|toolu|msg|req|run|trace|session)[_-][0-9A-Za-z]{6,}\b|\b(?=\w*\d)(?=\w*[A-Za-z])\w{16,}\b)"
    r"|(?P<G>\b(?:hello|hi|hey|dear|welcome|user|customer|client|assisting|helping|name is)\b[ ,:]{1,3}\w+)"
    r"|(?P<N>\d+)",
    re.IGNORECASE,
)
_KINDS: dict[str, Kind] = {
    "U": "UUID",
    "T": "timestamp",
    "K": "sampling settings",
    "I": "random id",
    "G": "per-user text",
    "N": "counter",
}
_NEWLINES, _SPACES, _MIXED = "n", "s", "m"
_SPACE = hash(" ")
_SKIP, _ALIKE = 16, 8
"""Words that may differ on either side before two texts go on alike, and how many must then be equal."""
_AROUND = 80
"""Characters before and behind a difference that tell what it looks like."""
_DATED = re.compile(r"[-@:_](?:latest|\d{4}-?\d\d-?\d\d|\d{4})$")


class Segment(NamedTuple):
    """A part of a prompt: where it stands in the request, and its text as it is sent."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment without its text: hashes of the whole and of its words, where each begins, and which are white space
    of what kind.
    """

    path: str
    size: int
    whole: int
    sorted_keys: int
    words: array[int]
    offsets: array[int]
    blanks: dict[int, str]


Print = tuple[_Part, ...]
"""A prompt, to be compared."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where a prompt parts from an earlier one: the segment's path, the character in it, what kind of text parts them,
    and about how many tokens were ``shared`` before it and ``lost`` behind it.
    """

    path: str
    offset: int
    kind: Kind
    shared: int
    lost: int


def fingerprint(segments: Sequence[Segment]) -> Print:
    """A prompt's print, of its first `MAX_CHARS` characters."""
    parts: list[_Part] = []
    left = MAX_CHARS
    for path, text in segments:
        if left <= 0:
            break
        parts.append(_part(path, text[:left]))
        left -= len(text)
    return tuple(parts)


def shared_length(old: Print, new: Print) -> int:
    """Characters that two prompts have in common from the first on."""
    length = 0
    for mine, other in zip(new, old, strict=False):
        if mine.whole != other.whole:
            at = _common(mine.words, other.words)
            return length + (mine.offsets[at] if at < len(mine.offsets) else mine.size)
        length += mine.size
    return length


def find_break(old: Print, new: Print, segments: Sequence[Segment]) -> Break | None:
    """The fault that parts a prompt from an earlier one, if there is one. ``segments``: what ``new`` is made of."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a.whole != b.whole), None)
    if at is None:
        return None
    mine, other = new[at], old[at]
    word = _common(mine.words, other.words)
    tail = _tail(mine, other, word) if mine.path == other.path else 0
    elsewhere = {part.whole for part in old[at:]}
    lost = (tail + sum(part.size for part in new[at:] if part.whole in elsewhere)) // CHARS_PER_TOKEN
    if mine.sorted_keys and mine.sorted_keys == other.sorted_keys:
        lost += mine.size // CHARS_PER_TOKEN
    if lost < MIN_LOST:
        return None
    offset = mine.offsets[word] if word < len(mine.offsets) else mine.size
    shared = sum(part.size for part in new[:at]) + offset
    kind = _structural(old, new, at, word) or _look(segments[at].text, offset)
    return Break(mine.path, offset, kind, shared // CHARS_PER_TOKEN, lost)


def same_model(one: str, other: str) -> bool:
    """Whether two names look like one model: with and without its provider, its date, or ``latest``."""
    return one != other and _bare(one) == _bare(other)


def _bare(name: str) -> str:
    return _DATED.sub("", name.rsplit("/", 1)[-1].lower())


def _part(path: str, text: str) -> _Part:
    found = [(match[0], match.start()) for match in _WORD.finditer(text)]
    words = array("q", [hash(word) for word, _ in found])
    offsets = array("L", [start for _, start in found])
    blanks = {i: _blank(word) for i, (word, _) in enumerate(found) if word != " " and word.isspace()}
    return _Part(path, len(text), hash(text), _sorted_keys(text), words, offsets, blanks)


def _blank(word: str) -> str:
    if not word.strip("\r\n"):
        return _NEWLINES
    return _MIXED if "\n" in word or "\r" in word else _SPACES


def _only_blank(mine: _Part, other: _Part, word: int) -> bool:
    """Whether two segments part at white space alone: more, less or other of it before the same word."""

    def at(part: _Part, i: int) -> tuple[bool, int | None]:
        word = part.words[i] if i < len(part.words) else None
        return word == _SPACE or i in part.blanks, word

    (blank, here), (blank_there, there) = at(mine, word), at(other, word)
    behind, behind_there = at(mine, word + 1)[1], at(other, word + 1)[1]
    if blank and blank_there:
        return behind == behind_there
    return (blank and behind == there) or (blank_there and behind_there == here)


def _sorted_keys(text: str) -> int:
    """The hash of a JSON object or list whatever the order of its keys; 0 for any other text."""
    if text[:1] not in ("{", "["):
        return 0
    try:
        return hash(json.dumps(json.loads(text), sort_keys=True))
    except (ValueError, RecursionError):
        return 0


def _common(one: array[int], other: array[int]) -> int:
    """Words in common from the first on; halving compares slices, which is quicker than word by word."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tail(mine: _Part, other: _Part, word: int) -> int:
    """Characters in common behind the word at which two segments part: up to their ends, or, where these are not alike
    (as when only their beginnings are looked at), up to the next difference.
    """
    most = min(len(mine.words), len(other.words)) - word
    same = 0
    while same < most and mine.words[-1 - same] == other.words[-1 - same]:
        same += 1
    if same:
        return mine.size - mine.offsets[len(mine.offsets) - same]
    for skipped in range(1, 2 * _SKIP):
        for at in range(word + max(0, skipped - _SKIP), word + min(skipped, _SKIP) + 1):
            there = 2 * word + skipped - at
            if mine.words[at : at + _ALIKE] == other.words[there : there + _ALIKE] and at + _ALIKE < len(mine.words):
                end = at + _common(mine.words[at:], other.words[there:])
                return (mine.offsets[end] if end < len(mine.offsets) else mine.size) - mine.offsets[at]
    return 0


def _structural(old: Print, new: Print, at: int, word: int) -> Kind | None:
    """What parts two prompts, where that is their form and not their text."""
    mine, other = new[at], old[at]
    if mine.sorted_keys and mine.sorted_keys == other.sorted_keys:
        return "shuffled keys"
    if mine.path.startswith("tools"):
        tools = [sorted(part.sorted_keys for part in one if part.path.startswith("tools")) for one in (old, new)]
        if tools[0] == tools[1]:
            return "reordered tools"
    if mine.path.endswith("id"):
        return "random id"
    if any(part.whole == mine.whole for part in old[at + 1 :]):
        return "dropped turns"
    if _only_blank(mine, other, word):
        kinds = {part.blanks[word] for part in (mine, other) if word in part.blanks}
        return "newline" if kinds == {_NEWLINES} else "whitespace"
    return None


def _look(text: str, offset: int) -> Kind:
    """What the text looks like that stands at a character."""
    start = max(0, offset - _AROUND)
    for match in _LOOKS.finditer(text, start, offset + _AROUND):
        if match.start() <= offset < match.end():
            return _KINDS[match.lastgroup or ""]
    return "varying text"
