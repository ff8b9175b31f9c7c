"""Serves the page to everyone, since it holds no numbers, and the numbers to whom they belong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from gateway.access import viewer
from gateway.dashboard.live import events
from gateway.dashboard.overview import RANGES, Asked, overview
from gateway.ledger import LedgerClosed
from gateway.reporting import rows_response, sums_response
from gateway.runtime import Runtime

_HERE = Path(__file__).parent
_FILES = {path.name: path for folder in ("page", "vendor") for path in (_HERE / folder).iterdir()}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FRESH = 1.0  # seconds that viewers of the same numbers share them
_GUARDED = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def dashboard_routes(runtime: Runtime) -> APIRouter:
    """The routes under ``/dashboard``."""
    router = APIRouter(prefix="/dashboard")
    told: dict[Asked, tuple[float, asyncio.Future[bytes]]] = {}

    async def tell(asked: Asked) -> bytes:
        """The overview as JSON; viewers who ask for the same at about the same time get the same."""
        now = asyncio.get_running_loop().time()
        for old in [key for key, (at, _) in told.items() if now - at > _FRESH]:
            del told[old]
        if asked not in told:
            told[asked] = (now, asyncio.ensure_future(_packed(runtime, asked)))
        return await asyncio.shield(told[asked][1])

    def asked_by(request: Request) -> Asked:
        given, seen_by = request.query_params, viewer(runtime, request)
        tenant = given.get("tenant") if seen_by.tenant is None else seen_by.tenant
        span = given.get("range", "1h")
        if span not in RANGES:
            raise HTTPException(400, f"'range' must be one of {', '.join(RANGES)}.")
        return Asked(span, tenant, given.get("model"), seen_by.tenant is None)

    @router.get("")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/")
    async def folder() -> Response:
        return RedirectResponse("/dashboard")

    @router.get("/assets/{name}")
    async def asset(name: str) -> Response:
        return _file(name)

    @router.get("/api/overview")
    async def api_overview(request: Request) -> Response:
        try:
            return _private(Response(await tell(asked_by(request)), media_type="application/json"))
        except LedgerClosed as error:
            raise HTTPException(503, str(error)) from None

    @router.get("/api/live")
    async def api_live(request: Request) -> Response:
        stream = events(asked_by(request), tell, runtime.closing)
        headers = {"x-accel-buffering": "no"}
        return _private(StreamingResponse(stream, media_type="text/event-stream", headers=headers))

    @router.get("/api/ledger")
    async def api_ledger(request: Request) -> Response:
        return _private(await sums_response(runtime, request.query_params, viewer(runtime, request).tenant))

    @router.get("/api/rows")
    async def api_rows(request: Request) -> Response:
        return _private(await rows_response(runtime, request.query_params, viewer(runtime, request).tenant))

    return router


async def _packed(runtime: Runtime, asked: Asked) -> bytes:
    found = await overview(runtime, asked)
    found["viewer"] = {"tenant": None if asked.operator else asked.tenant}
    return orjson.dumps(found)


def _file(name: str) -> Response:
    path = _FILES.get(name)
    if path is None or path.suffix not in _TYPES:
        raise HTTPException(404, "There is no such file.")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={**_GUARDED, "cache-control": "no-cache"})


def _private(response: Response) -> Response:
    response.headers["cache-control"] = "no-store"
    response.headers["x-content-type-options"] = "nosniff"
    return response
