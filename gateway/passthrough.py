"""What the gateway does not understand passes through untouched, and the list of models that it can serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import orjson

from gateway.http import Request, Response, Stream
from gateway.ledger import Call, Row
from gateway.plan import read_body
from gateway.relay import UNUSED
from gateway.runtime import Runtime
from gateway.tenants import Caller, Denied
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from gateway.upstreams.headers import through_to_caller, through_to_upstream
from gateway.upstreams.pool import Member, for_whole
from gateway.upstreams.router import Asked, Route

_DOTS = frozenset((".", ".."))
"""A server behind us might follow them out of ``/v1``, with our key."""

_SPELLED = "/%!$&'()*+,;=:@~"
"""What stays in a path as the caller wrote it."""


async def pass_through(runtime: Runtime, request: Request, request_id: str, row: Row, caller: Caller) -> Response:
    """Sends any other ``/v1/…`` request to an upstream of the model it names, or else to the first upstream. Another is
    tried only if the request cannot have reached the one before.
    """
    row.outcome = "bypass"
    if not _DOTS.isdisjoint(request.path.split("/")):
        raise Denied(404, "A path with '.' or '..' in it leads nowhere here.", "not_found")
    name = _model_named(request)
    if caller.models is not None:
        if name is None:
            raise Denied(403, "This key is limited to some models, and this request names none.", "model_not_allowed")
        read_body(request.body)  # refuses a body of which the upstream might read another model than we do
        caller.require(name)
    if not runtime.pool.members:
        raise UpstreamError("connect", "no upstream is configured", sent=False)
    model = runtime.planner.model(name).target if name else ""
    serving = await runtime.pool.serving(model, request) if model else []
    row.model = model if serving else ""
    members: Sequence[Member] = for_whole(serving or runtime.pool.members)[: len(serving) or 1]
    asked = Asked(model, len(request.body))
    row.usage = None if request.method == "POST" else UNUSED

    def counted(member: Member, status: int) -> None:
        """Tells the ledger of a call. What it used nobody knows, unless it was refused; only POST computes."""
        usage = UNUSED if status >= 300 else row.usage
        names = (row.tenant, row.model, row.endpoint, member.name)
        runtime.spent(Call(runtime.clock.time(), *names, "bypass", stream=False, usage=usage))

    while True:
        route = runtime.router.route(asked, members)
        try:
            response = await _send(route.member, request, request_id)
            break
        except UpstreamError as error:
            route.failed()
            route.close()
            if error.sent:
                counted(route.member, 0)
            members = [member for member in members if member is not route.member]
            if error.sent or not members:
                raise
        except BaseException:
            route.close()
            counted(route.member, 0)
            raise
    row.upstream = route.member.name
    if response.status >= 400:
        row.outcome, row.reason = "error", f"status {response.status}"
    kept = [*through_to_caller(response.headers), (b"x-warmgate-upstream", row.upstream.encode())]
    kept += [(b"x-warmgate-route", route.header), (b"cache-status", b"warmgate; fwd=bypass")]
    return Response(response.status, kept, _Through(response, route, partial(counted, route.member, response.status)))


async def _send(member: Member, request: Request, request_id: str) -> UpstreamResponse:
    headers = through_to_upstream(request, request_id, member.proof(request))
    path = quote(request.raw_path, _SPELLED)
    once = request.method in ("POST", "PATCH")  # what these do is not known, and must not be done twice
    return await member.send(request.method, path, request.query, headers, request.body, once=once)


def one_model(runtime: Runtime, name: str, caller: Caller) -> bytes | None:
    """An alias of the gateway's own, in OpenAI's form; None for any other name, of which upstreams know more."""
    if name not in runtime.config.models:
        return None
    caller.require(name)
    return orjson.dumps({"id": name, "object": "model", "created": 0, "owned_by": "warmgate"})


async def list_models(runtime: Runtime, request: Request, caller: Caller) -> bytes:
    """OpenAI's list of models: those of all upstreams and every alias, as far as the caller may use them."""
    served = await runtime.pool.models(request)
    owners = {**served, **dict.fromkeys(runtime.config.models, "warmgate")}
    allowed = [name for name in owners if caller.models is None or name in caller.models]
    data = [{"id": name, "object": "model", "created": 0, "owned_by": owners[name]} for name in sorted(allowed)]
    return orjson.dumps({"object": "list", "data": data})


class _Through(Stream):
    """An upstream's body as it comes."""

    def __init__(self, response: UpstreamResponse, route: Route, over: Callable[[], None]) -> None:
        super().__init__()
        self._over = over
        self._response = response
        self._route = route
        response.on_arrival = lambda: self.wake()

    def take(self) -> bytes:
        data = self._response.take()
        if data and self._route.waiting:
            self._route.begun(first_token=False)
        self.ended = self._response.ended
        return data

    def leave(self) -> None:
        self._response.close()
        self._route.close()
        self._over()


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
