"""The typed event stream of the Responses API, made from a whole response."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gateway.dialects.joining import cut

Events = Iterator[dict[str, Any]]


def response_events(response: dict[str, Any]) -> Events:
    """The data of each event, in order, numbered; in the first two and the last, ``response`` lacks its identity."""
    for number, event in enumerate(_events(response)):
        yield {"type": event.pop("type"), "sequence_number": number, **event}


def _events(response: dict[str, Any]) -> Events:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        where = {"item_id": item.get("id"), "output_index": index}
        start, events = _ITEMS.get(item["type"], _whole)(item, where)
        if "status" in item:
            start["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": index, "item": start}
        yield from events
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _whole(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    """An item of a type that has no events of its own here."""
    return dict(item), iter(())


def _message(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    def events() -> Events:
        for number, part in enumerate(item["content"]):
            yield from _content_part(part, {**where, "content_index": number})

    return {**item, "content": []}, events()


def _content_part(part: dict[str, Any], where: dict[str, Any]) -> Events:
    if part["type"] not in ("output_text", "reasoning_text"):
        yield {"type": "response.content_part.added", **where, "part": part}
        yield {"type": "response.content_part.done", **where, "part": part}
        return
    emptied = {name: [] for name in ("annotations", "logprobs") if isinstance(part.get(name), list)}
    yield {"type": "response.content_part.added", **where, "part": {**part, "text": "", **emptied}}
    logprobs = part.get("logprobs") or []
    of_text = {"logprobs": logprobs} if part["type"] == "output_text" else {}
    for piece in [part["text"]] if logprobs else cut(part["text"]):
        yield {"type": f"response.{part['type']}.delta", **where, "delta": piece, **of_text}
    for number, annotation in enumerate(part.get("annotations") or ()):
        added = {"annotation_index": number, "annotation": annotation}
        yield {"type": "response.output_text.annotation.added", **where, **added}
    yield {"type": f"response.{part['type']}.done", **where, "text": part["text"], **of_text}
    yield {"type": "response.content_part.done", **where, "part": part}


def _reasoning(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], Events]:
    def events() -> Events:
        kind = "response.reasoning_summary"
        for number, part in enumerate(item["summary"]):
            at = {**where, "summary_index": number}
            yield {"type": f"{kind}_part.added", **at, "part": {**part, "text": ""}}
            for piece in cut(part["text"]):
                yield {"type": f"{kind}_text.delta", **at, "delta": piece}
            yield {"type": f"{kind}_text.done", **at, "text": part["text"]}
            yield {"type": f"{kind}_part.done", **at, "part": part}
        for number, part in enumerate(item.get("content") or ()):
            yield from _content_part(part, {**where, "content_index": number})

    emptied = {"content": []} if item.get("content") else {}
    return {**item, "summary": [], **emptied}, events()


def _call(field: str, kind: str, named: bool) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """A tool call, whose ``field`` comes in pieces of events of this ``kind``."""

    def taken_apart(item: dict[str, Any], where: dict[str, Any]) -> tuple[dict[str, Any], Events]:
        def events() -> Events:
            for piece in cut(item[field]):
                yield {"type": f"response.{kind}.delta", **where, "delta": piece}
            name = {"name": item["name"]} if named else {}
            yield {"type": f"response.{kind}.done", **where, field: item[field], **name}

        return {**item, field: ""}, events()

    return taken_apart


_ITEMS: dict[str, Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], Events]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call("arguments", "function_call_arguments", named=True),
    "custom_tool_call": _call("input", "custom_tool_call_input", named=False),
}
