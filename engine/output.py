"""What one generation has said so far: whole characters only, cut at stop strings, never leaking a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.model.tokenizer import Tokenizer
from engine.sampling import TokenLogprob


@dataclass
class Delta:
    """A piece of one choice: new text, reports of the tokens in it, and at the end why it ended.

    `transfer`: the parameters by which another engine gets the prompt (`pd/`).
    """

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0
    cached_tokens: int = 0
    cached_by: dict[str, int] = field(default_factory=dict)
    transfer: dict[str, Any] | None = None
    error: str | None = None


class Output:
    """Turns a stream of tokens into deltas.

    Text that could be the beginning of a stop string is held back until it is decided; a token's log-probability
    report goes out with the token's own text, and not at all if a stop string cut all of it off. No stop string is
    looked for in the text of the first `min_tokens`.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], *, ignore_eos: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = tokenizer.stream()
        self.ends = frozenset[int]() if ignore_eos else tokenizer.ends
        self._endless = min_tokens
        self._stops = stops
        self._held = ""
        self._begins: list[tuple[int, TokenLogprob]] = []
        self._decoded = 0
        self._sent = 0

    def push(self, token: int, report: TokenLogprob | None, *, last: bool) -> Delta:
        """Takes the next token; `last` says that the token limit is reached with it."""
        if token in self.ends:
            return self._close("stop")
        if report is not None:
            self._begins.append((self._decoded, report))
        self._add(self._decoder.push(token))
        if self._endless and not last:
            self._endless -= 1
            return self._send(len(self._held), None)
        if (cut := self._find_stop()) is not None:
            self._held = self._held[:cut]
            return self._send(len(self._held), "stop")
        if last:
            return self._close("length")
        return self._send(len(self._held) - self._undecided(), None)

    def _close(self, reason: str) -> Delta:
        self._add(self._decoder.finish())
        if (cut := self._find_stop()) is not None:
            self._held, reason = self._held[:cut], "stop"
        delta = self._send(len(self._held), reason)
        delta.logprobs += [report for _, report in self._begins]  # tokens whose text never became a character
        return delta

    def _add(self, text: str) -> None:
        self._held += text
        self._decoded += len(text)

    def _find_stop(self) -> int | None:
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _undecided(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _send(self, length: int, reason: str | None) -> Delta:
        text, self._held = self._held[:length], self._held[length:]
        self._sent += length
        ready = [report for begin, report in self._begins if begin < self._sent]
        self._begins = self._begins[len(ready) :]
        return Delta(text, ready, reason)
