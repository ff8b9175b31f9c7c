"""``/healthz`` (alive), ``/readyz`` (able to serve) and ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from gateway.metrics import render
from gateway.runtime import Runtime


def health_routes(runtime: Runtime) -> APIRouter:
    """Open to everyone who can reach the port; they tell nothing of any tenant's content."""
    router = APIRouter()

    @router.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @router.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> JSONResponse:
        """A dead store is no reason to take a gateway out of service; it is named."""
        shared = runtime.shared
        stores = {shared.name: shared.breaker.state} if shared is not None else {}
        return JSONResponse({"status": "ready", "stores": stores})

    @router.get("/metrics")
    async def metrics() -> Response:
        body, content_type = await render(runtime)
        return Response(body, media_type=content_type)

    return router
