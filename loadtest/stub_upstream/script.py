"""What a reply says: an answer in the caller's dialect, an error, or bytes of one's own."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from loadtest.stub_upstream import answers
from loadtest.stub_upstream.answers import NORMAL, Content, UsageAs
from loadtest.stub_upstream.call import Call
from loadtest.stub_upstream.reply import Ending, Reply, Wire

JSON = ("content-type", "application/json")
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")

_PLAIN: dict[str, Callable[[Content], dict[str, Any]]] = {
    "/chat/completions": answers.chat_plain,
    "/completions": answers.completion_plain,
    "/responses": answers.responses_plain,
    "/messages": answers.messages_plain,
    "/embeddings": answers.embeddings_plain,
}
_STREAM: dict[str, Callable[[Content], list[bytes]]] = {
    "/chat/completions": answers.chat_stream,
    "/completions": answers.completion_stream,
    "/responses": answers.responses_stream,
    "/messages": answers.messages_stream,
}


def answer(
    text: str | None = None,
    *,
    deltas: Sequence[str] | None = None,
    n: int | None = None,
    finish_reason: str | Sequence[str | None] | None = NORMAL,
    usage: dict[str, Any] | None = None,
    usage_as: UsageAs = "separate",
    repeat_usage: bool = False,
) -> Reply:
    """A good answer in the dialect of the call's path, streamed if the call asks for it.

    text or deltas: what is said (absent: `ans-<call number>`). n: choices (absent: as asked for). finish_reason: of
    all choices, or one per choice, in the dialect's words; None: the choice never finishes. usage: in the dialect's
    form (absent: 10 tokens in, 5 out). usage_as: in a streamed chat answer, in a chunk without choices, in one whose
    choice has an empty delta, or in the last chunk of the text. repeat_usage: message_delta repeats message_start's.
    """

    def render(call: Call) -> Wire:
        try:
            request = call.json
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return error(400, "the body is no JSON object").render(call)
        if call.api == "/embeddings" and not request.get("input"):
            return error(400, "input may not be empty").render(call)
        choices = n if n is not None else request.get("n") or 1
        said = list(deltas) if deltas is not None else _pieces(f"ans-{call.number}" if text is None else text)
        reasons = [finish_reason] * choices if isinstance(finish_reason, str | None) else list(finish_reason)
        content = Content(
            number=call.number,
            request=request,
            deltas=[[*said, f".{i}"] if i else said for i in range(choices)],
            finish=reasons,
            usage=usage,
            usage_as=usage_as,
            repeat_usage=repeat_usage,
        )
        if request.get("stream") and call.api in _STREAM:
            return Wire(200, [EVENT_STREAM, ("cache-control", "no-cache")], list(_STREAM[call.api](content)), "chunked")
        return Wire(200, [JSON], [orjson.dumps(_PLAIN[call.api](content))], "length")

    return Reply(lambda call: render(call) if call.api in _PLAIN else _unknown(call))


def error(status: int, message: str = "the stub was told to fail", kind: str = "stub_error") -> Reply:
    """An error in the form of the call's dialect."""

    def render(call: Call) -> Wire:
        if "/messages" in call.path:
            shown = {"type": "error", "error": {"type": kind, "message": message}}
        else:
            shown = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        return Wire(status, [JSON], [orjson.dumps(shown)], "length")

    return Reply(render)


def json_body(value: Any, status: int = 200) -> Reply:
    """Any JSON."""
    return body(orjson.dumps(value), status=status)


def body(data: bytes, content_type: str = "application/json", status: int = 200) -> Reply:
    """Any bytes."""
    return Reply(lambda _: Wire(status, [("content-type", content_type)], [data], "length"))


def events(*items: bytes | str | dict[str, Any]) -> Reply:
    """A stream of one's own: bytes as they are, a dict as a `data:` event in JSON, a string as a `data:` event."""
    steps = [_event(item) for item in items]
    return Reply(lambda _: Wire(200, [EVENT_STREAM], list(steps), "chunked"))


def delta(finish_reason: str | None = None, index: int = 0, **fields: Any) -> dict[str, Any]:
    """A chat.completion.chunk whose one choice has these fields in its delta."""
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m1",
        "choices": [{"index": index, "delta": fields, "finish_reason": finish_reason}],
    }


def raw(data: bytes, then: Ending = "close") -> Reply:
    """Exactly these bytes on the wire, in place of an HTTP response."""
    return Reply(lambda _: Wire(0, [], [data], "raw", ending=then))


def _event(item: bytes | str | dict[str, Any]) -> bytes:
    if isinstance(item, bytes):
        return item
    return b"data: " + (item.encode() if isinstance(item, str) else orjson.dumps(item)) + b"\n\n"


def _pieces(text: str) -> list[str]:
    """At most ten pieces of at least two characters."""
    size = max(2, -(-len(text) // 10))
    return [text[i : i + size] for i in range(0, len(text), size)]


def _unknown(call: Call) -> Wire:
    if call.api == "/messages/count_tokens":
        return json_body({"input_tokens": 10}).render(call)
    return error(404, f"the stub has no {call.path}", "not_found_error").render(call)
