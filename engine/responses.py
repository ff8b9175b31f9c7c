"""The engine's HTTP answers: OpenAI's bodies and stream events for chat and text completions."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine.model.tokenizer import Tokenizer
from engine.output import Delta
from engine.sampling import TokenLogprob

FINGERPRINT = "warmgate-engine"


class Answer(ABC):
    """One response in the making: `whole` for plain callers, `event` for streams. Texts are gathered per choice."""

    kind, prefix, chunk = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer, choices: int, prompt_tokens: int) -> None:
        self.id = f"{self.prefix}{secrets.token_hex(12)}"
        self._created, self._model, self._tokenizer = int(time.time()), model, tokenizer
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self._reasons: list[str | None] = [None] * choices
        self._tokens = [0] * choices
        self._prompt_tokens = prompt_tokens
        self._found: list[dict[str, int]] = [{} for _ in range(choices)]
        self._transfer: dict[str, Any] | None = None
        self.per_prompt = 1
        self.reports = False

    def take(self, choice: int, delta: Delta) -> None:
        """Adds a piece to the whole."""
        self._texts[choice].append(delta.text)
        self._logprobs[choice] += delta.logprobs
        self._reasons[choice] = delta.finish_reason
        self._tokens[choice] = delta.tokens
        self._found[choice] = delta.cached_by
        self._transfer = delta.transfer

    def usage(self) -> dict[str, Any]:
        """Tokens so far; `cached_tokens` are prompt tokens whose prefill was not computed again."""
        generated = sum(self._tokens)
        by_tier: Counter[str] = Counter()
        for found in self._found[:: self.per_prompt]:  # a prompt's other choices only find what its first has computed
            by_tier.update(found)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": by_tier.total(), "cached_by_tier": dict(by_tier)},
        }

    def whole(self) -> dict[str, Any]:
        """The plain response body."""
        return {
            **self._head(self.kind),
            "choices": [
                self._choice(i, "".join(texts), self._logprobs[i], self._reasons[i])
                for i, texts in enumerate(self._texts)
            ],
            "usage": self.usage(),
            **({"kv_transfer_params": self._transfer} if self._transfer else {}),
        }

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The event before a choice's first text, if this dialect has one."""
        return None

    def event(self, choice: int, delta: Delta) -> dict[str, Any]:
        """A stream event."""
        return {
            **self._head(self.chunk),
            "choices": [self._piece(choice, delta.text, delta.logprobs, delta.finish_reason)],
        }

    def usage_event(self) -> dict[str, Any]:
        """The last event of a stream whose caller asked for usage."""
        return {**self._head(self.chunk), "choices": [], "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }

    @abstractmethod
    def _choice(self, index: int, text: str, reports: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        """One choice of the plain body."""

    @abstractmethod
    def _piece(self, index: int, text: str, reports: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        """One choice of a stream event."""


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    kind, prefix, chunk = "chat.completion", "chatcmpl-", "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, Any] | None:
        piece = {
            "index": choice,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self._head(self.chunk), "choices": [piece]}

    def _choice(self, index: int, text: str, reports: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._report(reports), "finish_reason": reason}

    def _piece(self, index: int, text: str, reports: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text or not reason else {}
        return {"index": index, "delta": delta, "logprobs": self._report(reports), "finish_reason": reason}

    def _report(self, reports: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.reports:
            return None
        content = [
            {
                **self._entry(report.token, report.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in report.top],
            }
            for report in reports
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.text_of(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.bytes_of(token)),
        }


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    kind, prefix, chunk = "text_completion", "cmpl-", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, choices: int, prompt_tokens: int) -> None:
        super().__init__(model, tokenizer, choices, prompt_tokens)
        self._offsets = [0] * choices

    def _choice(self, index: int, text: str, reports: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        self._offsets[index] = 0
        return self._piece(index, text, reports, reason)

    def _piece(self, index: int, text: str, reports: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._report(index, reports), "finish_reason": reason}

    def _report(self, index: int, reports: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.reports:
            return None
        names = [self._tokenizer.text_of(report.token) for report in reports]
        offsets: list[int] = []
        for name in names:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(name)
        return {
            "tokens": names,
            "token_logprobs": [report.logprob for report in reports],
            "top_logprobs": [{self._tokenizer.text_of(t): p for t, p in report.top} for report in reports],
            "text_offset": offsets,
        }
