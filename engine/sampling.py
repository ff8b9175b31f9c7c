"""From a row of logits to the next token, as the request asked: penalties, bias, temperature, top-k, top-p, min-p.

Order and meaning follow vLLM: repetition penalty over prompt and output (Keskar et al. 2019), presence and frequency
over the output, bias, temperature, min-p (arXiv:2407.01082), top-k, top-p (Holtzman et al. 2020). Log-probabilities
are the model's own, before any of it. A guide (`guide.py`) forbids tokens before all else.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.guide import Guide


_COLDEST = 1e-5
"""The lowest temperature that logits are divided by: at lower ones they could leave the range of float32."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `top_logprobs` None is off.

    Of the first `min_tokens` none ends the answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    min_tokens: int = 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the answer is simply the largest logit."""
        return (
            self.temperature == 0
            and not (self.presence_penalty or self.frequency_penalty or self.logit_bias)
            and self.repetition_penalty == 1
        )


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token with its log-probability and the likeliest alternatives, (token, log-probability) each."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Sampler:
    """Chooses one sequence's tokens; keeps its random state and what it has counted for the penalties.

    `ends`: the tokens that end an answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        guide: Guide | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.params = params
        self._guide = guide
        self._ends, self._endless = sorted(ends), params.min_tokens if ends else 0
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()
        bias = params.logit_bias
        self._bias = (torch.tensor(list(bias)), torch.tensor(list(bias.values()))) if bias else None
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if params.seed is None else params.seed % (1 << 63))

    def choose(self, logits: Tensor) -> int:
        """The next token from float32 logits [vocab] on the CPU. Raises `RequestError` if the guide cannot go on."""
        if self._endless:
            self._endless -= 1
            logits = logits.clone()
            logits[self._ends] = float("-inf")
        if self._guide is None:
            return self._choose(logits)
        token = self._choose(self._guide.mask(logits))
        self._guide.advance(token)
        return token

    def _choose(self, logits: Tensor) -> int:
        params = self.params
        if params.plain_greedy:
            return _likeliest(logits)
        logits = self._adjust(logits.clone())
        token = _likeliest(logits) if params.temperature == 0 else self._draw(logits)
        self._counts[token] += 1
        return token

    def report(self, logits: Tensor, token: int) -> TokenLogprob | None:
        """The log-probability report for a chosen token, if asked for."""
        wanted = self.params.top_logprobs
        if wanted is None:
            return None
        logprobs = torch.log_softmax(logits, dim=-1)
        values, indices = logprobs.topk(min(wanted, len(logits))) if wanted else (logprobs[:0], [])
        top = [(int(i), float(v)) for i, v in zip(indices, values, strict=True)]
        return TokenLogprob(token, float(logprobs[token]), top)

    def _adjust(self, logits: Tensor) -> Tensor:
        params = self.params
        if params.repetition_penalty != 1:
            index = torch.tensor(sorted(self._seen | self._counts.keys()))
            seen = logits[index]
            logits[index] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            index = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits[index] -= params.presence_penalty + params.frequency_penalty * counts
        if self._bias is not None:
            logits[self._bias[0]] += self._bias[1]
        return logits

    def _draw(self, logits: Tensor) -> int:
        params = self.params
        probabilities = torch.softmax(logits / max(params.temperature, _COLDEST), dim=-1)
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        if 0 < params.top_k < len(logits):
            values, indices = probabilities.topk(params.top_k)
        elif params.top_p < 1:
            values, indices = probabilities.sort(descending=True)
        else:
            values, indices = probabilities, None
        if params.top_p < 1:
            before = values.cumsum(0) - values
            kept = before < params.top_p * values.sum()
            kept[0] = True  # the likeliest token always stays
            values = torch.where(kept, values, 0)
        drawn = int(torch.multinomial(values, 1, generator=self._generator))
        return drawn if indices is None else int(indices[drawn])


def _likeliest(logits: Tensor) -> int:
    return int(logits.numpy().argmax())  # ten times as fast as torch's
