"""The engine's HTTP requests: OpenAI's chat and text completion bodies, checked field by field.

Fields without effect on the answer (`user`, `metadata`, `store`, …) are ignored; fields that would change it and are
not supported are refused, never silently dropped. Extras beyond OpenAI's, as in vLLM: `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `min_tokens` (before which nothing ends an answer), `priority` (lower is sooner),
`cache_salt` (prefixes are shared within one salt), `kv_transfer_params` (see `pd/`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from engine.errors import RequestError
from engine.guide import wants_json
from engine.pd.wire import NAME_BYTES, Source
from engine.sampling import SamplingParams

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_PROMPTS = 1024
"""Of one request: all are taken in before the first is answered."""

_ADAPTERS = ("adapter", "adapter_id", "adapters", "lora", "lora_name", "lora_path", "lora_request")
"""Names under which servers take an adapter. Here one would have to be merged into the weights."""

_Stop = Annotated[StrictStr, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: StrictBool = False


class KVTransfer(BaseModel):
    """vLLM's `kv_transfer_params`: compute a prompt for another engine, or take up what another has computed."""

    model_config = ConfigDict(extra="ignore")
    do_remote_decode: StrictBool = False
    do_remote_prefill: StrictBool = False
    remote_request_id: StrictStr | None = None
    remote_host: StrictStr | None = None
    remote_port: StrictInt | None = None

    @property
    def source(self) -> Source | None:
        """Where to fetch, if it is said in a form that this engine understands."""
        if not (self.do_remote_prefill and self.remote_host and 0 < (self.remote_port or 0) < 1 << 16):
            return None
        try:
            name = bytes.fromhex(self.remote_request_id or "")
        except ValueError:
            return None
        return Source(self.remote_host, self.remote_port or 0, name) if len(name) == NAME_BYTES else None


class CommonRequest(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, strict=True)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, strict=True)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10, strict=True)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, strict=True)]] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool = False
    priority: StrictInt = 0
    cache_salt: StrictStr | None = None
    response_format: dict[str, Any] | None = None
    kv_transfer_params: KVTransfer | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def salt(self) -> bytes:
        return (self.cache_salt or "").encode("utf-8", "surrogatepass")

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def limit(self) -> int | None:
        """The caller's own token limit."""
        return self.max_tokens

    def top(self) -> int | None:
        """How many alternatives to report per token; None for no report at all."""
        return None

    def sampling(self, choice: int, vocab: int) -> SamplingParams:
        """The parameters of one of the `n` choices; each draws from a seed of its own."""

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return SamplingParams(
            temperature=given(self.temperature, 1.0),
            top_p=given(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=given(self.min_p, 0.0),
            seed=None if self.seed is None else self.seed + choice,
            presence_penalty=given(self.presence_penalty, 0.0),
            frequency_penalty=given(self.frequency_penalty, 0.0),
            repetition_penalty=given(self.repetition_penalty, 1.0),
            logit_bias=self._bias(vocab),
            top_logprobs=self.top(),
            min_tokens=self.min_tokens or 0,
        )

    def refuse_unsupported(self) -> None:
        """Raises `RequestError` for what would change the answer and cannot be done."""
        for name in _ADAPTERS:
            if (self.model_extra or {}).get(name):
                raise RequestError(
                    f"{name} asks for an adapter, which this engine does not support; merge it into its model",
                    code="adapters_unsupported",
                    param=name,
                )
        if wants_json(self.response_format) and self.ignore_eos:
            raise RequestError("an answer in JSON ends where the JSON ends: ignore_eos cannot hold", param="ignore_eos")
        if wants_json(self.response_format) and self.min_tokens:
            raise RequestError("an answer in JSON ends where the JSON ends: min_tokens cannot hold", param="min_tokens")
        limit = self.limit()
        if self.min_tokens and limit is not None and self.min_tokens > limit:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above the limit of {limit}", param="min_tokens")
        if self.offered and (self.stream or self.choices > 1):
            raise RequestError("a prompt computed for another engine has one plain answer", param="kv_transfer_params")

    @property
    def offered(self) -> bool:
        """Whether the prompt is computed for another engine."""
        return self.kv_transfer_params is not None and self.kv_transfer_params.do_remote_decode

    def _bias(self, vocab: int) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit()) or int(key) >= vocab:
                raise RequestError(f"logit_bias names {key!r}, which is no token of this model", param="logit_bias")
            bias[int(key)] = value
        return bias


class Message(BaseModel):
    """One chat message; other fields (`name`, `tool_calls`, …) are left for the template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | list[dict[str, Any]] | None = None

    def plain(self, at: int) -> dict[str, Any]:
        """The message as the template wants it, content parts joined. Raises `RequestError` for images and the like."""
        fields = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            fields["content"] = "".join(_text_part(part, at) for part in self.content)
        elif self.content is None:
            fields["content"] = ""
        if self.role == "developer":
            fields["role"] = "system"
        return fields


def _text_part(part: dict[str, Any], at: int) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text", "refusal"):
        raise RequestError(
            f"this model reads text only; messages[{at}] has a part of type {kind!r}",
            code="unsupported_content",
            param="messages",
        )
    if not isinstance(text, str):
        raise RequestError(f"a text part of messages[{at}] has no text", param="messages")
    return text


class ChatRequest(CommonRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestError("this engine cannot force a tool call", param="tool_choice")


class CompletionRequest(CommonRequest):
    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this endpoint

    def top(self) -> int | None:
        return self.logprobs

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported", param=name)
        if self.best_of not in (None, self.choices):
            raise RequestError("best_of other than n is not supported", param="best_of")


_Request = TypeVar("_Request", bound=CommonRequest)


def parse(kind: type[_Request], body: bytes) -> _Request:
    """The checked request. Raises `RequestError` (400) that names the first field at fault."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = [str(part) for part in first["loc"] if not isinstance(part, str) or part in _FIELDS]
        field = ".".join(path) or str(first["loc"][0])
        raise RequestError(f"{field}: {first['msg']}", param=path[0] if path else field) from error


_FIELDS = {
    *ChatRequest.model_fields,
    *CompletionRequest.model_fields,
    *Message.model_fields,
    *StreamOptions.model_fields,
    *KVTransfer.model_fields,
}
