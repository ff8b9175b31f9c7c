"""The official clients in front of a gateway in front of an upstream that always says the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import orjson
from pydantic import BaseModel

from gateway.dialects import Dialect
from loadtest.stub_upstream import Call, Reply, StubUpstream, events, json_body
from tests.gateway.dialects.reading import stream_of
from tests.harness import Running, running_gateway, upstream

JSON_TEXT = '{"city": "Paris", "celsius": 21}'


class Weather(BaseModel):
    """What `JSON_TEXT` says."""

    city: str
    celsius: int


def speaks(dialect: Dialect, message: Mapping[str, Any]) -> Callable[[Call], Reply]:
    """An upstream that always gives this message, in the form that is asked for."""

    def reply(call: Call) -> Reply:
        if not call.json.get("stream"):
            return json_body({"id": f"upstream-{call.number}", "created": 1, "created_at": 1, **message})
        return events(*(part + b"\n\n" for part in stream_of(dialect, message, call.json).split(b"\n\n")[:-1]))

    return reply


@asynccontextmanager
async def gateway_before(
    script: Callable[[Call], Reply] | None = None, **more: Any
) -> AsyncIterator[tuple[StubUpstream, Running]]:
    """``more``: of the upstream's configuration."""
    async with StubUpstream() as u:
        if script is not None:
            u.always(script)
        async with running_gateway({"upstreams": [upstream(u.url, models=["m1"], **more)]}) as gateway:
            yield u, gateway


def openai_client(gateway: Running) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=http)


def async_openai_client(gateway: Running) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=http)


def anthropic_client(gateway: Running) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, http_client=http)


def async_anthropic_client(gateway: Running) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, http_client=http)


def shown(answer: BaseModel) -> Any:
    """An answer as the client understood it, without its identity."""
    return said_only(orjson.loads(answer.model_dump_json(exclude={"id", "created", "created_at"})))


def said_only(value: Any) -> Any:
    """A message without nulls, and without what the clients add of their own."""
    added = ("parsed", "parsed_arguments", "parsed_output", "index")
    if isinstance(value, dict):
        return {k: said_only(v) for k, v in value.items() if k not in added and v is not None}
    return [said_only(item) for item in value] if isinstance(value, list) else value
