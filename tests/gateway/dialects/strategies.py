"""Random answers, as rich as the APIs allow and a little richer: every field a provider may set, and some of no known
API.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
"""Any Unicode but half surrogate pairs, line ends included."""
some_text = texts.filter(bool)
names = st.sampled_from(
    ["arguments", "content", "id", "index", "input", "logprobs", "name", "role", "text", "token_ids", "tool_calls", "x"]
)
"""Names that mean something elsewhere, so that a rule applied in the wrong place is seen."""
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
vendor = st.dictionaries(names.map(lambda name: f"x_{name}"), values, max_size=2)
"""Fields of no known API."""


def counts(*fields: str) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({field: st.integers(0, 2**30) for field in fields})


def with_vendor(fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(fields, vendor).map(lambda both: {**both[1], **both[0]})


def numbered(items: st.SearchStrategy[dict[str, Any]], most: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(items, min_size=1, max_size=most).map(
        lambda found: [{"index": index, **item} for index, item in enumerate(found)]
    )


# OpenAI: chat and plain completions

_usage = with_vendor(
    st.fixed_dictionaries(
        {"prompt_tokens": st.integers(0, 9999), "completion_tokens": st.integers(0, 9999)},
        optional={"prompt_tokens_details": counts("cached_tokens"), "completion_tokens_details": values},
    )
)
_finish = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])
_token = st.fixed_dictionaries({"token": texts, "logprob": numbers, "bytes": st.none(), "top_logprobs": st.just([])})
_logprobs = st.none() | st.fixed_dictionaries(
    {"content": st.none() | st.lists(_token, max_size=3), "refusal": st.none() | st.lists(_token, max_size=2)}
)
_function = st.fixed_dictionaries(
    {
        "id": some_text,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": some_text, "arguments": texts}),
    }
)
_custom = st.fixed_dictionaries(
    {"id": some_text, "type": st.just("custom"), "custom": st.fixed_dictionaries({"name": some_text, "input": texts})}
)
_chat_message = with_vendor(
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | texts | st.lists(values, max_size=2)},
        optional={
            "refusal": st.none() | texts,
            "reasoning_content": st.none() | texts,
            "reasoning": texts,
            "annotations": st.lists(values, max_size=2),
            "tool_calls": st.none() | st.lists(with_vendor(_function | _custom), max_size=3),
            "function_call": st.fixed_dictionaries({"name": some_text, "arguments": texts}),
        },
    )
)
_choice = with_vendor(
    st.fixed_dictionaries({"message": _chat_message, "logprobs": _logprobs, "finish_reason": _finish})
)
_text_choice = with_vendor(
    st.fixed_dictionaries(
        {
            "text": texts,
            "logprobs": st.none() | st.fixed_dictionaries({"tokens": st.lists(texts, max_size=3)}),
            "finish_reason": st.sampled_from(["stop", "length"]),
        }
    )
)


def _answer(kind: str, choice: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return with_vendor(
        st.fixed_dictionaries(
            {"object": st.just(kind), "model": some_text, "choices": numbered(choice, 3), "usage": _usage},
            optional={"system_fingerprint": st.none() | texts, "service_tier": st.sampled_from(["default", "flex"])},
        )
    )


chat_answers = _answer("chat.completion", _choice)
completion_answers = _answer("text_completion", _text_choice)

# Anthropic: messages

_text_block = with_vendor(
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": texts}, optional={"citations": st.none() | st.lists(values, max_size=2)}
    )
)
_thinking_block = st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts}, optional={"signature": texts})
_redacted_block = st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": texts})
_tool_block = with_vendor(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["tool_use", "server_tool_use"]),
            "id": some_text,
            "name": some_text,
            "input": st.dictionaries(texts, values, max_size=3),
        }
    )
)
message_answers = with_vendor(
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.just("assistant"),
            "model": some_text,
            "content": st.lists(_text_block | _thinking_block | _redacted_block | _tool_block, min_size=1, max_size=4),
            "stop_reason": st.sampled_from(["end_turn", "stop_sequence", "tool_use", "max_tokens"]),
            "stop_sequence": st.none() | texts,
            "usage": with_vendor(
                st.fixed_dictionaries(
                    {"input_tokens": st.integers(0, 9999), "output_tokens": st.integers(0, 9999)},
                    optional={
                        "cache_read_input_tokens": st.none() | st.integers(0, 9999),
                        "cache_creation_input_tokens": st.integers(0, 9999),
                        "output_tokens_details": values,
                        "service_tier": st.just("standard"),
                    },
                )
            ),
        },
        optional={"container": st.none() | values, "context_management": values, "stop_details": st.none()},
    )
)

# OpenAI: responses

_output_text = with_vendor(
    st.fixed_dictionaries(
        {"type": st.just("output_text"), "text": texts, "annotations": st.lists(values, max_size=2)},
        optional={"logprobs": st.lists(_token, max_size=2)},
    )
)
_ids = st.integers(0, 2**60).map(lambda number: f"i_{number:x}")
_message_item = with_vendor(
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "id": _ids,
            "status": st.just("completed"),
            "role": st.just("assistant"),
            "content": st.lists(_output_text, max_size=2),
        }
    )
)
_summary = st.fixed_dictionaries({"type": st.just("summary_text"), "text": texts})
_reasoning_text = st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": texts})
_reasoning_item = st.fixed_dictionaries(
    {"type": st.just("reasoning"), "id": _ids, "summary": st.lists(_summary, max_size=2)},
    optional={"content": st.lists(_reasoning_text, max_size=2), "encrypted_content": st.none() | texts},
)
_function_item = with_vendor(
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "id": _ids,
            "call_id": some_text,
            "name": some_text,
            "arguments": texts,
            "status": st.just("completed"),
        }
    )
)
_custom_item = st.fixed_dictionaries(
    {"type": st.just("custom_tool_call"), "id": _ids, "call_id": some_text, "name": some_text, "input": texts}
)
_unknown_item = with_vendor(st.fixed_dictionaries({"type": st.just("web_search_call"), "id": _ids}))
response_answers = with_vendor(
    st.fixed_dictionaries(
        {
            "object": st.just("response"),
            "status": st.just("completed"),
            "error": st.none(),
            "incomplete_details": st.none(),
            "model": some_text,
            "output": st.lists(
                _message_item | _reasoning_item | _function_item | _custom_item | _unknown_item,
                min_size=1,
                max_size=3,
                unique_by=lambda item: item["id"],
            ),
            "parallel_tool_calls": st.booleans(),
            "tool_choice": st.just("auto"),
            "tools": st.lists(values, max_size=1),
            "usage": with_vendor(counts("input_tokens", "output_tokens", "total_tokens")),
        },
        optional={"completed_at": st.none(), "instructions": st.none() | texts, "temperature": numbers},
    )
)
