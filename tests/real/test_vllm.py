"""The gateway before two real vLLMs with LMCache over Redis: who is asked, and what is really held there. Counted in
tokens, by vLLM's own reports and metrics.
"""

from __future__ import annotations

import pytest

from tests.real.processes import BLOCK
from tests.real.stack import Stack, document, eventually

pytestmark = pytest.mark.timeout(1800)


def whole_blocks(prompt: int, size: int = BLOCK) -> int:
    """The tokens of a prompt that can be held: those of its full blocks, the last token always excepted."""
    return (prompt - 1) // size * size


def test_a_prefix_is_asked_where_it_is_held(stack: Stack) -> None:
    text = document(1)
    first = stack.ask(text, "What lies beside item 3?")
    holder = stack.vllm(first.upstream)
    assert first.cached == first.expected == 0
    eventually(lambda: stack.known(holder) >= first.prompt // BLOCK, "the gateway's knowledge of the first prompt")
    [other] = [vllm for vllm in stack.vllms if vllm is not holder]
    asked = other.counter("vllm:prefix_cache_queries_total")
    for item in range(6):
        again = stack.ask(text, f"What lies beside item {item * 5}?")
        assert again.upstream == holder.name
        assert again.cached == again.expected >= 0.9 * first.prompt, again.route
    assert other.counter("vllm:prefix_cache_queries_total") == asked
