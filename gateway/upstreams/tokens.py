"""Prompts to token ids with an upstream's own tokenizer and chat template, so that its KV events can be understood.

From a Hugging Face folder, a `tokenizer.json`, or a GGUF file. A text is cut before each control token, where every
tokenizer cuts it anyway, and each piece is remembered: a conversation that grows costs only its new turns.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

MEMO_BYTES = 32 * 1024 * 1024
"""Text and ids remembered for one tokenizer, about."""
_TOKEN_BYTES = 8


class TokenizerError(ValueError):
    """The tokenizer cannot be used; the message is one sentence."""


class Untold(Exception):
    """A prompt that cannot be turned into the ids the upstream will see (images, a refusing template, …)."""


class PromptTokens:
    """One upstream's tokenizer and template. Used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Reads the files, which may take seconds; raises `TokenizerError`."""
        try:
            self._tokenizer, settings = _load(path)
        except TokenizerError:
            raise
        except Exception as error:  # the library raises bare Exception, files may hold anything
            raise TokenizerError(f"the tokenizer {path} cannot be read: {error}") from error
        self._names = {name: _text_of(settings.get(name)) for name in ("bos_token", "eos_token")}
        self._template = _compile(settings.get("chat_template"))
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._cut = re.compile(f"(?={'|'.join(longest_first)})") if special else None
        self._memo: OrderedDict[str, list[int]] = OrderedDict()
        self._held = 0

    def ids(self, path: str, body: Mapping[str, Any]) -> list[int]:
        """The prompt of a request to ``path`` as token ids; raises `Untold`."""
        if path == "/v1/chat/completions":
            return self._encode(self._render(body), first=False)
        prompt = body.get("prompt")
        if path == "/v1/completions" and isinstance(prompt, str):
            return self._encode(prompt, first=True)
        if path == "/v1/completions" and isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return prompt
        raise Untold

    def _render(self, body: Mapping[str, Any]) -> str:
        messages = body.get("messages")
        if self._template is None or not isinstance(messages, list):
            raise Untold
        settings = body.get("chat_template_kwargs")
        try:
            return self._template.render(
                messages=[_plain(message) for message in messages],
                tools=body.get("tools") or None,
                add_generation_prompt=body.get("add_generation_prompt", True),
                **self._names,
                **(settings if isinstance(settings, dict) else {}),
            )
        except Untold:
            raise
        except Exception as error:  # a template is untrusted code and may fail in any way
            raise Untold from error

    def _encode(self, text: str, *, first: bool) -> list[int]:
        """``first``: with what the tokenizer itself puts before a text."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
        pieces = [piece for piece in self._cut.split(text) if piece] if self._cut is not None else [text]
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            ids += self._piece(piece) if i or not first else self._tokenizer.encode(piece).ids
        return ids

    def _piece(self, text: str) -> list[int]:
        found = self._memo.get(text)
        if found is not None:
            self._memo.move_to_end(text)
            return found
        found = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._memo[text] = found
        self._held += len(text) + len(found) * _TOKEN_BYTES
        while self._held > MEMO_BYTES:
            old, ids = self._memo.popitem(last=False)
            self._held -= len(old) + len(ids) * _TOKEN_BYTES
        return found


def _load(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    if path.is_dir() or path.name == "tokenizer.json":
        folder = path if path.is_dir() else path.parent
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"there is no tokenizer.json in {folder}")
        settings_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        settings = json.loads(settings_file.read_text("utf-8")) if settings_file.is_file() else {}
        if template_file.is_file():
            settings["chat_template"] = template_file.read_text("utf-8")
        return Tokenizer.from_file(str(folder / "tokenizer.json")), settings
    if path.suffix == ".gguf":
        from gateway.upstreams.gguf import read_tokenizer

        return read_tokenizer(path)
    raise TokenizerError(f"the tokenizer {path} is neither a folder with a tokenizer.json nor a GGUF file")


def _compile(template: object) -> Any:
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise TokenizerError(f"the chat template is broken: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _plain(message: object) -> dict[str, Any]:
    """A message as templates want it: text parts joined, and nothing but text."""
    if not isinstance(message, Mapping):
        raise Untold
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part(part) for part in content)
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "content": content if content is not None else "", "role": role}


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise Untold
    return text


def _text_of(token: object) -> str:
    """A control token's text, written plainly or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
