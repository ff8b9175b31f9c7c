"""Chat messages to prompt text, by the model's own Jinja template, in a sandbox: a template is untrusted code."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError
from engine.model.tokenizer import Tokenizer


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    """The compiled template of one model. Raises `ModelError` if it does not compile."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(tokenizer.template) if tokenizer.template else None
        except TemplateError as error:
            raise ModelError(f"the model's chat template is broken: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt for these messages, up to where the assistant begins. Raises `RequestError` if it refuses them."""
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self._names
            )
        except (TemplateError, SecurityError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
