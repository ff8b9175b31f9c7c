"""The gateway before two real vLLMs with LMCache over Redis: who is asked, and what is really held there. Counted in
tokens, by vLLM's own reports and metrics.
"""

from __future__ import annotations

import pytest

from tests.real.processes import BLOCK, CHUNK, Vllm
from tests.real.stack import CHAT, TEXT, Answer, Stack, document, eventually

pytestmark = pytest.mark.timeout(1800)
MOST = 0.85
"""Share of a prompt that is its text, and so common to all questions about it."""


def held(stack: Stack, answer: Answer) -> Vllm:
    """The vLLM that gave this answer, when the gateway knows what it holds since."""
    vllm = stack.vllm(answer.upstream)
    eventually(lambda: stack.known(vllm) >= (answer.prompt - 1) // BLOCK, "the gateway's knowledge of a prompt")
    return vllm


def kept(stack: Stack, before: int, answer: Answer) -> None:
    """Waits until Redis has got the chunks of a prompt beside those it had ``before``."""
    eventually(lambda: stack.chunks() >= before + (answer.prompt - 1) // CHUNK, "the chunks in Redis")


def test_a_prefix_is_asked_where_it_is_held(stack: Stack) -> None:
    text = document(1)
    first = stack.ask(text, "What lies beside item 3?")
    assert first.cached == first.expected == 0
    holder = held(stack, first)
    [other] = [vllm for vllm in stack.vllms if vllm is not holder]
    asked = other.counter("vllm:prefix_cache_queries_total")
    for item in range(6):
        again = stack.ask(text, f"What lies beside item {item * 5}?")
        assert again.upstream == holder.name
        assert again.cached == again.expected >= MOST * first.prompt, again.route
    assert other.counter("vllm:prefix_cache_queries_total") == asked


def test_a_gateway_that_comes_late_learns_what_is_held(stack: Stack) -> None:
    text = document(2)
    holder = held(stack, stack.ask(text, "What lies beside item 3?"))
    blocks = stack.known(holder)
    stack.start_gateway()
    eventually(lambda: stack.known(holder) == blocks, "a replay of what it holds")
    again = stack.ask(text, "What lies beside item 4?")
    assert again.upstream == holder.name
    assert again.cached == again.expected >= MOST * again.prompt, again.route


def test_what_a_vllm_forgets_is_no_reason_to_ask_it_and_comes_from_lmcache(stack: Stack) -> None:
    text, chunks = document(3), stack.chunks()
    first = stack.ask(text, "What lies beside item 3?")
    holder = held(stack, first)
    kept(stack, chunks, first)
    holder.forget()
    eventually(lambda: stack.known(holder) == 0, "word that it holds nothing")
    again = stack.ask(text, "What lies beside item 4?")
    assert again.expected == 0, again.route
    assert again.cached >= MOST * again.prompt
    assert again.cached % CHUNK == 0, "whole chunks of LMCache's"


def test_tenants_share_nothing_in_vllm_nor_in_lmcache(stack: Stack) -> None:
    stack.start_gateway(routing={"policy": "round_robin"})
    text, asked = document(4), set[str]()
    for item in range(20):
        asked.add(stack.ask(text, f"What lies beside item {item}?", "red").upstream)
        if asked == {"a", "b"}:
            break
    assert asked == {"a", "b"}, "both vLLMs hold it for red"
    assert stack.ask(text, "What lies beside item 3?", "blue").cached == 0
    text, chunks = document(5), stack.chunks()
    kept(stack, chunks, stack.ask(text, "What lies beside item 3?", "red"))
    for vllm in stack.vllms:
        vllm.forget()
    assert stack.ask(text, "What lies beside item 4?", "blue").cached == 0
    again = stack.ask(text, "What lies beside item 4?", "red")
    assert again.cached >= MOST * again.prompt
    stack.start_gateway()


def question(seed: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{document(seed)}\n\nWhat is the capital of France?"}]


def refrain(seed: int) -> str:
    return f"Song {seed}.\n" + "One fox, two dogs, three hens, four cows, five owls.\n" * 36


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS = {  # with answers that are beyond doubt: bfloat16 decides otherwise between equals where batches differ
    "chat": (CHAT, {"messages": question(6), "max_tokens": 8}),
    "text": (TEXT, {"prompt": refrain(7), "max_tokens": 40, "min_tokens": 8, "stop": [" owls"]}),
    "stream": (TEXT, {"prompt": refrain(8), "max_tokens": 24, **STREAM}),
}


def test_split_over_two_vllms_is_the_same_as_whole(stack: Stack) -> None:
    stack.start_gateway(("prefill", "decode"), disaggregation={"enabled": "on", "min_tokens": 64})
    prefill, decode = stack.vllms
    split = {}
    for name, (path, body) in {"first": (CHAT, {"messages": question(9), "max_tokens": 4}), **REQUESTS}.items():
        before = computed(prefill), computed(decode), fetched(decode)
        split[name] = stack.send(path, body)
        assert (split[name].upstream, split[name].route) == ("b", "only; split=a")
        if name != "first":  # the two must get to know each other, for which NIXL has five seconds
            assert computed(prefill) - before[0] == fetched(decode) - before[2] >= 500
            assert computed(decode) == before[1]
    several = {"messages": question(9), "max_tokens": 4, "n": 2, "temperature": 0.5}
    assert stack.send(CHAT, several).route.endswith('whole="several answers"')
    stack.start_gateway(("prefill", "decode"), disaggregation={"enabled": "off"})
    for name, (path, body) in REQUESTS.items():
        whole = stack.send(path, body, "blue")
        assert whole.text == split[name].text != ""
        assert (whole.prompt, whole.cached) == (split[name].prompt, split[name].cached)
    stack.start_gateway()


def computed(vllm: Vllm) -> float:
    """The prompt tokens that it has computed itself."""
    return vllm.counter("vllm:prompt_tokens_by_source_total", source="local_compute")


def fetched(vllm: Vllm) -> float:
    """The prompt tokens that it has fetched from the other or from LMCache."""
    return vllm.counter("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def test_after_a_restart_of_all_but_redis_the_hit_comes_from_there(stack: Stack) -> None:
    text, chunks = document(10), stack.chunks()
    kept(stack, chunks, stack.ask(text, "What lies beside item 3?", "red"))
    stack.stop_engines()
    stack.start_engines()
    found = stack.redis_hits()
    assert stack.ask(text, "What lies beside item 4?", "blue").cached == 0
    assert stack.redis_hits() == found
    again = stack.ask(text, "What lies beside item 4?", "red")
    assert again.expected == 0, again.route
    assert again.cached >= MOST * again.prompt
    vllm = stack.vllm(again.upstream)
    assert vllm.counter("vllm:external_prefix_cache_hits_total") == again.cached
    assert stack.redis_hits() - found >= again.cached // CHUNK
