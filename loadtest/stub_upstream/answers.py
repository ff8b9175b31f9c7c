"""Well-formed answers of each API, plain and streamed, as the real services send them."""

import base64
import hashlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import orjson

NORMAL = "normal"  # stands for each dialect's own name of a normal end
DIMS = 8  # of an embedding, where the caller asks for none

UsageAs = Literal["separate", "with_choice", "merged"]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Content:
    """What is to be said, in no dialect yet."""

    number: int  # of the call
    request: dict[str, Any]
    deltas: list[list[str]]  # per choice, the pieces of its text
    finish: list[str | None]  # per choice; None: it never finishes
    usage: dict[str, Any] | None  # in the dialect's own form; None: the usual one
    usage_as: UsageAs = "separate"
    repeat_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        return self.request.get("model", "m1")

    @property
    def include_usage(self) -> bool:
        return bool((self.request.get("stream_options") or {}).get("include_usage"))

    def ends(self, normal: str) -> list[str | None]:
        return [normal if reason == NORMAL else reason for reason in self.finish]


def known_vector(text: str | Sequence[int], dims: int = DIMS) -> list[float]:
    """The embedding that the stub gives a text (or token list): known from the text alone, exact in 32-bit floats."""
    seed = text if isinstance(text, str) else ",".join(map(str, text))
    digest = hashlib.shake_128(seed.encode("utf-8", "surrogatepass")).digest(dims)
    return [byte / 256 - 0.5 for byte in digest]


def sse(data: dict[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + orjson.dumps(data) + b"\n\n"


# OpenAI: chat and plain completions


def _openai_usage(content: Content) -> dict[str, Any]:
    return content.usage or {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def _openai_body(content: Content, kind: str, prefix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-stub-{content.number}",
        "object": kind,
        "created": content.created,
        "model": content.model,
        "choices": choices,
    }


def chat_plain(content: Content) -> dict[str, Any]:
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": "".join(deltas), "refusal": None},
            "logprobs": None,
            "finish_reason": finish,
        }
        for i, (deltas, finish) in enumerate(zip(content.deltas, content.ends("stop"), strict=True))
    ]
    return {**_openai_body(content, "chat.completion", "chatcmpl", choices), "usage": _openai_usage(content)}


def completion_plain(content: Content) -> dict[str, Any]:
    choices = [
        {"index": i, "text": "".join(deltas), "logprobs": None, "finish_reason": finish}
        for i, (deltas, finish) in enumerate(zip(content.deltas, content.ends("stop"), strict=True))
    ]
    return {**_openai_body(content, "text_completion", "cmpl", choices), "usage": _openai_usage(content)}


def chat_stream(content: Content) -> list[bytes]:
    def choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}

    opened = [choice(i, {"role": "assistant", "content": ""}) for i in range(len(content.deltas))]
    said = [choice(i, {"content": text}) for i, text in _interleaved(content.deltas)]
    ended = [choice(i, {}, finish) for i, finish in enumerate(content.ends("stop")) if finish is not None]
    return _openai_stream(content, "chat.completion.chunk", "chatcmpl", opened + said + ended, choice(0, {}))


def completion_stream(content: Content) -> list[bytes]:
    def choice(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    said = [choice(i, text) for i, text in _interleaved(content.deltas)]
    ended = [choice(i, "", finish) for i, finish in enumerate(content.ends("stop")) if finish is not None]
    return _openai_stream(content, "text_completion", "cmpl", said + ended, choice(0, ""))


def _interleaved(deltas: list[list[str]]) -> list[tuple[int, str]]:
    """The choices' pieces as they come from an engine that decodes all of them at once."""
    rounds = zip_longest(*deltas)
    return [(i, piece) for pieces in rounds for i, piece in enumerate(pieces) if piece is not None]


def _openai_stream(
    content: Content, kind: str, prefix: str, choices: list[dict[str, Any]], empty: dict[str, Any]
) -> list[bytes]:
    chunks = [_openai_body(content, kind, prefix, [choice]) for choice in choices]
    if content.include_usage:
        if content.usage_as != "merged":
            chunks.append(_openai_body(content, kind, prefix, [empty] if content.usage_as == "with_choice" else []))
        chunks = [{**chunk, "usage": None} for chunk in chunks[:-1]] + [
            {**chunk, "usage": _openai_usage(content)} for chunk in chunks[-1:]
        ]
    return [sse(chunk) for chunk in chunks] + [DONE]


# OpenAI: responses


def responses_plain(content: Content) -> dict[str, Any]:
    return _response(content, content.ends("completed")[0] or "in_progress", [_output_message(content)])


def responses_stream(content: Content) -> list[bytes]:
    text = "".join(content.deltas[0])
    item = f"msg_stub_{content.number}"
    at = {"item_id": item, "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "", "annotations": []}
    opened = {"id": item, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
    stages: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(content, "in_progress", [])},
        {"type": "response.in_progress", "response": _response(content, "in_progress", [])},
        {"type": "response.output_item.added", "output_index": 0, "item": opened},
        {"type": "response.content_part.added", **at, "part": part},
        *({"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []} for piece in content.deltas[0]),
        {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": {**part, "text": text}},
        {"type": "response.output_item.done", "output_index": 0, "item": _output_message(content)},
    ]
    status = content.ends("completed")[0]
    if status is not None:
        whole = _response(content, status, [_output_message(content)])
        stages.append({"type": f"response.{whole['status']}", "response": whole})
    return [sse({**stage, "sequence_number": i}, stage["type"]) for i, stage in enumerate(stages)]


def _output_message(content: Content) -> dict[str, Any]:
    part = {"type": "output_text", "text": "".join(content.deltas[0]), "annotations": [], "logprobs": []}
    return {
        "id": f"msg_stub_{content.number}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }


def _response(content: Content, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """A status that the API does not know is taken as the reason of an incomplete answer."""
    known = status in ("completed", "in_progress", "failed", "incomplete")
    return {
        "id": f"resp_stub_{content.number}",
        "object": "response",
        "created_at": content.created,
        "status": status if known else "incomplete",
        "error": None,
        "incomplete_details": None if known else {"reason": status},
        "model": content.model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if status == "in_progress" else content.usage or _RESPONSES_USAGE,
    }


_RESPONSES_USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 15,
}


# Anthropic: messages


def messages_plain(content: Content) -> dict[str, Any]:
    return {
        "id": f"msg_stub_{content.number}",
        "type": "message",
        "role": "assistant",
        "model": content.model,
        "content": [{"type": "text", "text": "".join(content.deltas[0])}],
        "stop_reason": content.ends("end_turn")[0],
        "stop_sequence": None,
        "usage": content.usage or {"input_tokens": 10, "output_tokens": 5},
    }


def messages_stream(content: Content) -> list[bytes]:
    """Input tokens come in message_start, output tokens in message_delta (with `repeat_usage`, all of them again)."""
    whole = messages_plain(content)
    usage = whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    stages: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            for piece in content.deltas[0]
        ),
        {"type": "content_block_stop", "index": 0},
    ]
    if whole["stop_reason"] is not None:
        ended = usage if content.repeat_usage else {"output_tokens": usage["output_tokens"]}
        stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        stages.append({"type": "message_delta", "delta": stop, "usage": ended})
    stages.append({"type": "message_stop"})
    return [sse(stage, stage["type"]) for stage in stages]


# OpenAI: embeddings and models


def embeddings_plain(content: Content) -> dict[str, Any]:
    given = content.request["input"]
    alone = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    inputs = [given] if alone else given
    dims = content.request.get("dimensions") or DIMS
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _embedding(text, dims, content.request)}
            for i, text in enumerate(inputs)
        ],
        "model": content.model,
        "usage": content.usage or {"prompt_tokens": 10 * len(inputs), "total_tokens": 10 * len(inputs)},
    }


def _embedding(text: str | list[int], dims: int, request: dict[str, Any]) -> list[float] | str:
    vector = known_vector(text, dims)
    if request.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack(f"<{dims}f", *vector)).decode()
    return vector


def model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "stub"}
