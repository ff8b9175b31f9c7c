"""What the gateway does not understand passes through untouched, and the list of models that it can serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import orjson

from gateway.http import Request, Response, begun
from gateway.ledger import Row
from gateway.runtime import Runtime
from gateway.tenants import Caller, Denied
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.headers import through_to_caller, through_to_upstream
from gateway.upstreams.pool import Member


async def pass_through(runtime: Runtime, request: Request, request_id: str, row: Row, caller: Caller) -> Response:
    """Sends any other ``/v1/…`` request to the upstream of the model it names, or else to the first upstream."""
    row.outcome = "bypass"
    name = _model_named(request)
    if caller.models is not None:
        if name is None:
            raise Denied(403, "This key is limited to some models, and this request names none.", "model_not_allowed")
        caller.require(name)
    member = await _member(runtime, name, request)
    row.model, row.upstream = runtime.planner.model(name).target if name else "", member.name
    headers = through_to_upstream(request, request_id, member.proof(request))
    with member.loaded():
        response = await member.send(request.method, request.path, request.query, headers, request.body)
    if response.status >= 400:
        row.outcome, row.reason = "error", f"status {response.status}"
    kept = [*through_to_caller(response.headers), (b"x-warmgate-upstream", member.name.encode())]
    kept.append((b"cache-status", b"warmgate; fwd=bypass"))
    return Response(response.status, kept, await begun(_body(response, member)))


async def list_models(runtime: Runtime, request: Request, caller: Caller) -> bytes:
    """OpenAI's list of models: those of all upstreams and every alias, as far as the caller may use them."""
    served = await runtime.pool.models(request)
    owners = {**served, **dict.fromkeys(runtime.config.models, "warmgate")}
    allowed = [name for name in owners if caller.models is None or name in caller.models]
    data = [{"id": name, "object": "model", "created": 0, "owned_by": owners[name]} for name in sorted(allowed)]
    return orjson.dumps({"object": "list", "data": data})


async def _member(runtime: Runtime, name: str | None, request: Request) -> Member:
    if not runtime.pool.members:
        raise UpstreamError("connect", "no upstream is configured", sent=False)
    if name is not None:
        serving = await runtime.pool.serving(runtime.planner.model(name).target, request)
        if serving:
            return serving[0]
    return runtime.pool.members[0]


async def _body(response: UpstreamResponse, member: Member) -> AsyncGenerator[bytes, None]:
    with member.loaded():
        try:
            yield b""
            async for chunk in response.chunks():
                yield chunk
        finally:
            response.close()


def _model_named(request: Request) -> str | None:
    """The model in a JSON body; None when there is none to be read."""
    if not request.body:
        return None
    try:
        body: Any = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        return None
    name = body.get("model") if isinstance(body, dict) else None
    return name if isinstance(name, str) else None
