"""``/healthz`` (alive), ``/readyz`` (able to serve) and ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from gateway.metrics import render
from gateway.runtime import Runtime

_STATES = {"closed": "ok", "half-open": "probing", "open": "open"}
"""A store's circuit as those know it who need not know of circuits."""


def health_routes(runtime: Runtime) -> APIRouter:
    """Open to everyone who can reach the port; they tell nothing of any tenant's content."""
    router = APIRouter()

    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """A dead store is no reason to take a gateway out of service; it is named."""
        shared = runtime.shared
        stores = {shared.name: _STATES[shared.breaker.state]} if shared is not None else {}
        return JSONResponse({"status": "ready", "stores": stores})

    @router.get("/metrics")
    async def metrics() -> Response:
        body, content_type = await render(runtime)
        return Response(body, media_type=content_type)

    return router
