"""Curated answers: questions an operator has answered by hand (``faq.yaml``), found after light normalisation of the
question.
"""

from __future__ import annotations

import datetime
import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_KNOWN = ("ask", "answer", "tags", "expires", "models")


class FaqError(ValueError):
    """``faq.yaml`` is not as it should be; ``problems`` holds one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Curated:
    """One answer with its spellings. ``expires``: unix seconds, or None."""

    ask: tuple[str, ...]
    answer: str
    tags: tuple[str, ...] = ()
    expires: float | None = None
    models: tuple[str, ...] = ("*",)

    def serves(self, model: str) -> bool:
        """Whether it answers requests for ``model``."""
        return "*" in self.models or model in self.models


class Faq:
    """Curated answers by normalised question; an empty one finds nothing."""

    def __init__(self, entries: Iterable[Curated] = ()) -> None:
        self.entries = tuple(entries)
        self._by_question: dict[str, list[Curated]] = {}
        for entry in self.entries:
            for question in {normalise(spelling) for spelling in entry.ask}:
                self._by_question.setdefault(question, []).append(entry)

    def find(self, question: str, models: Iterable[str], now: float) -> Curated | None:
        """The live answer to a question for any of the names a model goes by; None where there is not exactly one."""
        listed = self._by_question.get(normalise(question), ())
        names = tuple(models)
        live = [entry for entry in listed if entry.expires is None or entry.expires > now]
        fitting = [entry for entry in live if any(entry.serves(name) for name in names)]
        return fitting[0] if len(fitting) == 1 else None

    def collisions(self) -> list[str]:
        """Questions that two entries answer for the same model, one sentence each."""
        found: list[str] = []
        for question, entries in self._by_question.items():
            for index, entry in enumerate(entries):
                found += [
                    f"two entries answer {question!r} ({entry.ask[0]!r} and {other.ask[0]!r}), so neither is served"
                    for other in entries[index + 1 :]
                    if "*" in entry.models or "*" in other.models or set(entry.models) & set(other.models)
                ]
        return found


def normalise(question: str) -> str:
    """Case, spacing, sentence punctuation and Unicode form (NFKC) fall away; every sign that may change a meaning
    stays.

    ``C++`` is not ``C``, ``-5`` and ``5!`` are not ``5``, ``.5`` is not ``5``, ``3²`` is not ``32``, ``[0,1)`` is not
    ``[0,1]``.
    """
    text = _compatible(_compatible(question).casefold()).replace("’", "'")
    words = (_bare(word) for word in text.split())
    return " ".join(word for word in words if word)


_OPENING = '"`“”„«»¿¡'
_CLOSING = '?.,;:…"`“”„«»。、，？！；：'
_RAISED = ("<super>", "<sub>", "<fraction>")
_EXCLAIMED = re.compile(r"(?:(?<=[^\W\d_]{2})|(?<=[?.,;:…])|^)!+$")


def _compatible(text: str) -> str:
    """NFKC, but for raised and lowered signs and fractions, which it would turn into plain digits."""
    runs = itertools.groupby(text, lambda sign: unicodedata.decomposition(sign).startswith(_RAISED))
    return "".join("".join(run) if raised else unicodedata.normalize("NFKC", "".join(run)) for raised, run in runs)


def _bare(word: str) -> str:
    before = None
    while word != before:
        before = word
        word = _EXCLAIMED.sub("", word.lstrip(_OPENING).rstrip(_CLOSING))
    return word


def read_faq(text: str) -> Faq:
    """Reads ``faq.yaml``; raises `FaqError` that names every entry at fault. Two answers to one question are no error
    here, but neither is served (`Faq.collisions`).
    """
    try:
        listed: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise FaqError([f"not valid YAML{where}"]) from None
    if listed is None:
        return Faq()
    if not isinstance(listed, list):
        raise FaqError(["the file must hold a list of entries, each with 'ask' and 'answer'"])
    entries: list[Curated] = []
    problems: list[str] = []
    for number, item in enumerate(listed, 1):
        try:
            entries.append(_entry(item))
        except ValueError as error:
            problems.append(f"entry {number}: {error}")
    if problems:
        raise FaqError(problems)
    return Faq(entries)


def load_faq(path: Path) -> Faq:
    """Reads the file at ``path``; raises `FaqError`."""
    try:
        return read_faq(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FaqError([f"cannot read {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise FaqError([f"{path} is not UTF-8"]) from None


def _entry(item: object) -> Curated:
    if not isinstance(item, Mapping):
        raise ValueError("must have 'ask' and 'answer'")
    for name in item:
        if name not in _KNOWN:
            raise ValueError(f"unknown key {name!r}; known are {', '.join(_KNOWN)}")
    ask = _texts(item.get("ask"), "ask")
    answer = item.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("'answer' must be a text")
    for spelling in ask:
        if not normalise(spelling):
            raise ValueError(f"the question {spelling!r} has no words")
    models = _texts(item["models"], "models") if "models" in item else ("*",)
    for model in models:
        if model != "*" and "*" in model:
            raise ValueError(f"'models' holds names, or \"*\" for all of them; {model!r} is neither")
    tags = _texts(item["tags"], "tags") if item.get("tags") else ()
    return Curated(ask, answer, tags, _moment(item.get("expires")), models)


def _texts(value: object, name: str) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(text, str) and text for text in values):
        raise ValueError(f"{name!r} must be a text or a list of texts")
    return tuple(values)


def _moment(value: object) -> float | None:
    """A YAML date (its first second, UTC) or date and time, as unix seconds."""
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        moment = value
    elif isinstance(value, datetime.date):
        moment = datetime.datetime(value.year, value.month, value.day)
    else:
        raise ValueError("'expires' must be a date such as 2027-06-01")
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
