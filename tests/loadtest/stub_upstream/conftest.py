"""A stub upstream and its clients: httpx, both SDKs, and a bare socket."""

from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest

from loadtest.stub_upstream import StubUpstream
from tests.loadtest.stub_upstream.talk import Socket


@pytest.fixture
async def u() -> AsyncIterator[StubUpstream]:
    async with StubUpstream() as stub:
        yield stub


@pytest.fixture
async def http(u: StubUpstream) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=u.url, trust_env=False) as client:
        yield client


@pytest.fixture
async def sdk(u: StubUpstream) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=u.url + "/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(u: StubUpstream) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=u.url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
async def wire(u: StubUpstream) -> AsyncIterator[Socket]:
    wire = Socket(u)
    yield wire
    wire.leave()
