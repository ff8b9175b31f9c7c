"""A caller who leaves on seeing the end mark, as the OpenAI client does, has had the whole answer, and it is kept."""

import httpx
import pytest

from loadtest.stub_upstream import StubUpstream, answer
from tests.harness import Running, running_gateway, upstream

BODY = {"model": "m1", "temperature": 0, "stream": True, "messages": [{"role": "user", "content": "Say A"}]}


async def leave_at_the_end_mark(gateway: Running) -> None:
    async with (
        httpx.AsyncClient(base_url=gateway.url, verify=False) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
    pytest.fail("there was no end mark")


@pytest.mark.parametrize("ending", ["at once", "late"])
async def test_the_answer_is_kept_and_counted_as_complete(ending: str) -> None:
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url)]}) as gateway:
        if ending == "late":
            u.always(answer().pause(before=99, seconds=0.2).ending("stall"))
        await leave_at_the_end_mark(gateway)
        again = await gateway.chat(BODY)
        assert "hit" in again.headers["cache-status"]
        assert u.n == 1
        rows = (await gateway.client.get("/admin/ledger?by=outcome")).json()["groups"]
        assert {row["outcome"]: row["requests"] for row in rows} == {"miss": 1, "exact": 1}


async def test_the_upstream_connection_is_used_again() -> None:
    async with StubUpstream() as u, running_gateway({"upstreams": [upstream(u.url)]}) as gateway:
        for seed in range(5):
            await gateway.chat(BODY | {"seed": seed})
        assert u.n == 5
        assert u.accepted <= 2, "one for the list of models, and one for all calls"
