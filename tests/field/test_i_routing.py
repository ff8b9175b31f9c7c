"""Field reports, part I: routing. Where a request goes when its prefix is held, and loads that nobody counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.upstreams.prefix_index import PrefixIndex
from loadtest.stub_upstream import Reply, StubUpstream, answer, error, json_body
from tests.field.embedded import BLOCK, EmbeddedEngine, embedded_engines, tokenizer_folder
from tests.field.reading import ASKS
from tests.harness import FakeClock, Running, running_gateway, upstream

CHAT = "/v1/chat/completions"
QUIET = {"probe": 0}
SHARED = "All of them begin with the same long text. " * 40


@contextlib.asynccontextmanager
async def fleet(count: int, **config: Any) -> AsyncIterator[tuple[list[StubUpstream], Running]]:
    """A gateway over so many upstreams of one model."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(StubUpstream()) for _ in range(count)]
        upstreams = [upstream(stub.url, f"w{i + 1}", models=["m1"]) for i, stub in enumerate(stubs)]
        whole = {"upstreams": upstreams, "routing": QUIET, **config}
        yield stubs, await stack.enter_async_context(running_gateway(whole, FakeClock()))


def asking(number: int, path: str = CHAT) -> dict[str, Any]:
    """A request of its own behind the shared prefix, for any path."""
    said = f"{SHARED} {number}"
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": said, "temperature": 0},
        "/v1/embeddings": {"input": [said]},
        "/v1/score": {"text_1": said, "text_2": "x"},
        "/v1/responses": {"input": said, "temperature": 0, "store": False},
    }
    turns = {"messages": [{"role": "user", "content": said}], "temperature": 0, "max_tokens": 9}
    return {"model": "m1", **bodies.get(path, turns)}


def loads(gateway: Running) -> list[tuple[int, int, float]]:
    """Of each upstream: requests under way, as the pool and as the policy counts them, and tokens still to compute."""
    members = gateway.app.runtime.pool.members
    return [(member.in_flight, member.engine.running, member.engine.pending) for member in members]


async def at_rest(gateway: Running) -> None:
    """Every gauge of load is back at zero, soon."""
    async with asyncio.timeout(5):
        while any(any(load) for load in loads(gateway)):
            await asyncio.sleep(0.01)


async def test_o53_new_prompts_do_not_go_to_the_busy_worker_with_the_small_tree() -> None:
    async with fleet(2) as ((_, w2), gateway):
        first, second = gateway.app.runtime.pool.members
        index: PrefixIndex = gateway.app.runtime.router.index
        index.add(index.slot("w2"), range(10_000))
        first.reports(50)
        w2.always(answer().delayed(0.3))
        replies = await asyncio.gather(*(gateway.chat(asking(n)) for n in range(20)))
        went = Counter(reply.headers["x-warmgate-upstream"] for reply in replies)
        assert went["w2"] >= 18
        first.reports(0)
        await at_rest(gateway)
        assert second.engine.running == 0


PATHS = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score")
ENDINGS: dict[str, Callable[[], Reply]] = {
    "well": lambda: answer().delayed(0.3),
    "errors": lambda: error(500).delayed(0.3),
    "timeouts": lambda: answer().delayed(60),
    "aborts": lambda: answer().delayed(60),
}


@pytest.mark.parametrize(
    ("paths", "ending"), [*(((path,), "well") for path in PATHS), *((PATHS, end) for end in ENDINGS if end != "well")]
)
async def test_o54_every_path_counts_its_load_whatever_the_end(paths: tuple[str, ...], ending: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(StubUpstream()) for _ in range(4)]
        times = {"timeouts": {"first_byte": "1s"}} if ending == "timeouts" else {}
        upstreams = [upstream(stub.url, f"w{i}", models=["m1"], **times) for i, stub in enumerate(stubs)]
        config = {"upstreams": upstreams, "routing": QUIET, "retry": {"rounds": 0}}
        gateway = await stack.enter_async_context(running_gateway(config, FakeClock()))
        for stub in stubs:
            stub.always(ENDINGS[ending]())
            stub.on("/v1/score", json_body({"score": 1}).delayed(0.3 if ending in ("well", "errors") else 60))
        client = httpx.AsyncClient(base_url=gateway.url, timeout=30, limits=httpx.Limits(max_connections=None))
        await stack.enter_async_context(client)
        asked = [(paths[n % len(paths)], n) for n in range(200)]
        tasks = [asyncio.create_task(client.post(path, json=asking(n, path))) for path, n in asked]
        async with asyncio.timeout(20):
            while sum(stub.n for stub in stubs) < 200:
                await asyncio.sleep(0.01)
        assert max(load[0] for load in loads(gateway)) <= 2 * 200 / 4
        if ending == "aborts":
            assert sum(load[0] for load in loads(gateway)) == 200
            for task in tasks:
                task.cancel()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        if ending == "well":
            assert {reply.status_code for reply in replies if isinstance(reply, httpx.Response)} == {200}
        await at_rest(gateway)
        assert max(stub.peak_running for stub in stubs) <= 2 * 200 / 4
        assert max(stub.n for stub in stubs) <= 2 * sum(stub.n for stub in stubs) / 4


def tiny_chat(text: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}]
    return {"model": "tiny", "temperature": 0, "max_tokens": 4, "ignore_eos": True, "messages": turns, **more}


async def computed(gateway: Running, body: dict[str, Any]) -> tuple[str, int, int, str]:
    """Where it went, the tokens that were held there and those of the whole prompt, and what was answered."""
    response = await gateway.chat(body)
    assert response.status_code == 200, response.text
    usage, said = response.json()["usage"], response.json()["choices"][0]["message"]["content"]
    held = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return response.headers["x-warmgate-upstream"], held, usage["prompt_tokens"], said


async def told(gateway: Running, name: str, true: Callable[[dict[str, int]], bool]) -> None:
    """Waits until what is known of an upstream is as it shall be."""
    exact = gateway.app.runtime.router.exact
    async with asyncio.timeout(20):
        while not true(exact.counts().get(name, {})):
            await asyncio.sleep(0.02)


async def test_o55_a_restarted_worker_is_not_believed_to_hold_what_it_lost(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    async with embedded_engines(2) as engines:
        upstreams = [engine.upstream(f"w{i}", folder) for i, engine in enumerate(engines)]
        config = {"upstreams": upstreams, "routing": QUIET, "cache": {"memory": "off"}}
        async with running_gateway(config) as gateway:
            where, held, prompt, said = await computed(gateway, tiny_chat(SHARED))
            assert held == 0
            await told(gateway, where, lambda counts: counts["blocks"] >= prompt // BLOCK - 4)
            again = await computed(gateway, tiny_chat(SHARED))
            assert (again[0], again[3]) == (where, said)
            assert again[1] >= prompt - 4 * BLOCK
            engine: EmbeddedEngine = engines[int(where[1])]
            await engine.stop()
            await engine.start()
            other = f"w{1 - int(where[1])}"
            elsewhere = [await computed(gateway, tiny_chat(f"{n} {SHARED}")) for n in range(4)]  # one of them tells
            assert {name for name, *_ in elsewhere} <= {where, other}
            await told(gateway, where, lambda counts: counts.get("restarts", 0) + counts.get("silences", 0) > 0)
            *_, text = await computed(gateway, tiny_chat(SHARED))
            assert text == said
            final = await computed(gateway, tiny_chat(SHARED))
            assert final[1] >= prompt - 4 * BLOCK, "one recompute, and it is held again"
            assert final[3] == said


async def test_o56_a_clock_in_the_prompt_costs_what_is_behind_it_and_is_noticed(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    text = "You are a careful assistant. " * 20

    def prompts(clock_at_head: bool) -> list[list[dict[str, str]]]:
        question = {"role": "user", "content": "How do I begin? " + "Tell me all of it, step by step. " * 3}
        found, history = [], [question, {"role": "assistant", "content": "At the beginning."}]
        for n in range(10):
            clock = f"It is 12:00:{n:02}."
            system = f"{clock} {text}" if clock_at_head else f"{text} {clock}"
            history = [*history, {"role": "user", "content": f"And then, {n}?"}]
            found.append([{"role": "system", "content": system}, *history])
        return found

    shares, found = {}, {}
    async with embedded_engines(2) as engines:
        upstreams = [engine.upstream(f"w{i}", folder) for i, engine in enumerate(engines)]
        config = {"upstreams": upstreams, "routing": QUIET, "cache": {"memory": "off"}}
        for at_head in (True, False):
            clock = FakeClock()
            async with running_gateway(config, clock) as gateway:
                usages = []
                for messages in prompts(at_head):
                    reply = await gateway.chat(tiny_chat("") | {"messages": messages})
                    usages.append(reply.json()["usage"])
                    enough = usages[-1]["prompt_tokens"] // BLOCK - 4
                    name = reply.headers["x-warmgate-upstream"]
                    await told(gateway, name, lambda counts, enough=enough: counts["blocks"] >= enough)
                    clock.advance(1)
                held = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[1:]]
                shares[at_head] = sum(held) / (len(held) * len(text))
                (found[at_head],) = (await gateway.client.get("/admin/prefix-health")).json()["findings"]
    assert shares[True] < 0.1
    assert shares[False] > 0.9
    for at_head, offset in ((True, len("It is 12:00:")), (False, len(text) + len(" It is 12:00:"))):
        flag = found[at_head]
        assert (flag["kind"], flag["path"], flag["offset"]) == ("timestamp", "messages[0].content", offset)
        assert flag["seen"] == 9


async def test_o56_nothing_is_added_to_a_prompt_or_moved_in_it() -> None:
    async with fleet(2) as (stubs, gateway):
        body = b'{"model": "m1",  "messages": [{"content": "12:00:01 be brief", "role":"system"}], "temperature":0}'
        for path in (CHAT, "/v1/score"):
            for stub in stubs:
                stub.on("/v1/score", json_body({}))
            await gateway.client.post(path, content=body, headers={"content-type": "application/json"})
        assert {call.body for stub in stubs for call in stub.calls} == {body}


class TestAllDown:
    @pytest.mark.parametrize("api", ASKS)
    async def test_the_caller_gets_a_503_in_the_form_of_the_api_and_when_to_come_back(self, api: str) -> None:
        path, body = ASKS[api]
        async with fleet(3, retry={"rounds": 1, "base": "10ms"}) as (stubs, gateway):
            for stub in stubs:
                await stub.stop()
            for more in ({}, {"stream": True}):
                response = await asyncio.wait_for(gateway.client.post(path, json=body | more), 5)
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) >= 1
                wrong = response.json()
                assert (wrong["type"] == "error") if api == "messages" else (wrong["error"]["code"] is not None)
                assert "reached" in wrong["error"]["message"]
            await at_rest(gateway)
            assert not gateway.app.runtime.flights

    async def test_a_caller_who_allows_it_gets_the_stale_answer(self) -> None:
        path, body = ASKS["chat"]
        clock = FakeClock()
        async with StubUpstream() as u, StubUpstream() as v:
            upstreams = [upstream(stub.url, name, models=["m1"]) for name, stub in (("u", u), ("v", v))]
            config = {"upstreams": upstreams, "routing": QUIET, "cache": {"ttl": "10s"}, "retry": {"rounds": 0}}
            async with running_gateway(config, clock) as gateway:
                assert (await gateway.client.post(path, json=body)).status_code == 200
                clock.advance(60)
                await u.stop()
                await v.stop()
                for header, status in (({}, 503), ({"cache-control": "stale-if-error=3600"}, 200)):
                    response = await gateway.client.post(path, json=body, headers=header)
                    assert response.status_code == status
                assert "detail=stale" in response.headers["cache-status"]
                await at_rest(gateway)

    async def test_a_path_that_passes_through_gets_it_too(self) -> None:
        async with fleet(2) as (stubs, gateway):
            for stub in stubs:
                await stub.stop()
            response = await gateway.client.post("/v1/score", json=asking(1, "/v1/score"))
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            await at_rest(gateway)

    async def test_they_are_used_again_as_soon_as_they_are_back(self) -> None:
        async with fleet(2, retry={"rounds": 0}) as (stubs, gateway):
            for stub in stubs:
                await stub.stop()
            for n in range(8):
                assert (await gateway.chat(asking(n))).status_code == 503
            for stub in stubs:
                await stub.start()
            assert (await gateway.chat(asking(9))).status_code == 200
