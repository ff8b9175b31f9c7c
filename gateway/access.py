"""Who may look at ``/admin`` and ``/dashboard``: the operator sees all, a tenant by its key only its own.

The operator shows ``admin.key``; where none is configured, whoever is on this machine is the operator, but not a web
page that this machine's browser happens to have open.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

from gateway.config import SecretError
from gateway.http import Request as GatewayRequest
from gateway.receive import is_loopback
from gateway.runtime import Runtime
from gateway.tenants import Denied, presented_key


@dataclass(frozen=True, slots=True)
class Viewer:
    """``tenant`` None: the operator."""

    tenant: str | None


def require_operator(runtime: Runtime, request: Request) -> None:
    """Lets the operator pass; raises HTTP 401, 403 or 503."""
    configured = runtime.config.admin.key
    if configured is None:
        if not is_loopback(request.scope.get("client")) or not _is_direct(request):
            raise HTTPException(403, "Without admin.key, /admin and /dashboard answer on loopback only.")
        return
    if not _shows_admin_key(runtime, request):
        raise HTTPException(401, "The admin key is missing or wrong.")


def viewer(runtime: Runtime, request: Request) -> Viewer:
    """Who looks at the dashboard; raises HTTP 401, 403 or 503."""
    if not runtime.tenants.is_open and presented_key(plain(request, b"")) is not None:
        if runtime.config.admin.key is not None and _shows_admin_key(runtime, request):
            return Viewer(None)
        try:
            return Viewer(runtime.tenants.identify(plain(request, b"")).tenant)
        except Denied:
            raise HTTPException(401, "This key is neither the admin key nor a tenant's.") from None
    require_operator(runtime, request)
    return Viewer(None)


def plain(request: Request, body: bytes) -> GatewayRequest:
    """A FastAPI request as the gateway's own."""
    return GatewayRequest(request.method, request.url.path, b"", list(request.scope["headers"]), body)


def _shows_admin_key(runtime: Runtime, request: Request) -> bool:
    configured, shown = runtime.config.admin.key, presented_key(plain(request, b""))
    try:
        return configured is not None and shown is not None and configured.matches(shown)
    except SecretError as error:
        raise HTTPException(503, f"admin.key cannot be read: {error}.") from None


def _is_direct(request: Request) -> bool:
    """Whether a request from this machine is meant for this machine: not through a proxy that serves another name, not
    by a page of another origin, nor by one whose name was made to point here (DNS rebinding).
    """
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    name = urlsplit(f"//{host}").hostname or ""
    if origin is not None and urlsplit(origin).netloc != host:
        return False
    if request.headers.get("sec-fetch-site") == "cross-site":
        return False
    try:
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False
