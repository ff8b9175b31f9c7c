"""The operator's side: ``/admin``. With ``admin.key`` set it asks for it; without, it answers on loopback only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cache.response.faq import FaqError, read_faq
from cache.response.tags import EVERYTHING, before, soft
from gateway.access import plain, require_operator
from gateway.dialects import DIALECTS
from gateway.plan import BadRequest, read_body
from gateway.reload import ReloadError, Source, reload
from gateway.reporting import outcomes, rows_response, sums_response
from gateway.runtime import Runtime
from gateway.tenants import Denied
from gateway.vitals import of_all_workers
from policies.freshness import freshness

_TARGETS = ("key", "tag", "model", "tenant", "namespace", "before", "all")


def admin_routes(runtime: Runtime, source: Source | None) -> APIRouter:
    """The routes under ``/admin``."""

    def operator(request: Request) -> None:
        require_operator(runtime, request)

    router = APIRouter(prefix="/admin", dependencies=[Depends(operator)])

    @router.get("/status")
    async def status() -> dict[str, Any]:
        return {
            "outcomes": await outcomes(runtime),
            "worker": runtime.ledger.worker,
            "workers": await of_all_workers(runtime),
            "faq_entries": len(runtime.faq.entries),
        }

    @router.post("/explain")
    async def explain(request: Request, path: str = "/v1/chat/completions", tenant: str = "default") -> JSONResponse:
        """What would happen to a request with this body (and these headers), and why. Nothing is sent or stored."""
        dialect = DIALECTS.get(path)
        if dialect is None:
            raise HTTPException(400, f"The path {path} is passed through; explained are {', '.join(DIALECTS)}.")
        posted = plain(request, await request.body())
        try:
            plan = runtime.planner.plan(posted, dialect, runtime.tenants.caller(tenant), read_body(posted.body))
        except (BadRequest, Denied) as error:
            raise HTTPException(400, str(error)) from None
        now = runtime.clock.time()
        found = await runtime.recall.find(plan.identity, now) if plan.may_recall else None
        state = None
        if found is not None:
            entry = found.entry
            expires = runtime.generations.fresh_until(entry.generations, entry.born, entry.expires)
            state = freshness(now - entry.born, expires - now, plan.lifetime.while_revalidate, plan.directives)
        curated = plan.may_serve and runtime.curated(plan) is not None
        return JSONResponse(
            {
                "would": "faq"
                if curated
                else "hit"
                if state not in (None, "expired")
                else "miss"
                if plan.verdict.cacheable
                else "bypass",
                "cacheable": plan.verdict.cacheable,
                "reason": plan.verdict.reason,
                "key": plan.identity.key.hex() or None,
                "fingerprint": plan.identity.fingerprint.hex() or None,
                "excluded": {name: why for name, why in dialect.excluded.items() if name in plan.body},
                "model": {"asked": plan.model.name, "target": plan.model.target, "revision": plan.model.revision},
                "tenant": plan.caller.tenant,
                "namespace": plan.namespace,
                "tags": plan.tags,
                "ttl": plan.lifetime.ttl,
                "may_store": plan.may_keep,
                "may_join": plan.may_join,
                "entry": None if found is None else {"tier": found.tier, "state": state, "age": now - found.entry.born},
            }
        )

    @router.post("/purge")
    async def purge(order: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        """Purges by one of key, tag, model, tenant, namespace (with tenant), before, all."""
        scope = purge_scope(order, runtime)
        everywhere = await runtime.purge(soft(scope) if order.get("soft") else scope)
        return {"purged": scope, "soft": bool(order.get("soft")), "everywhere": everywhere}

    @router.get("/ledger")
    async def ledger(request: Request) -> Response:
        return await sums_response(runtime, request.query_params, None)

    @router.get("/ledger/rows")
    async def ledger_rows(request: Request) -> Response:
        return await rows_response(runtime, request.query_params, None)

    @router.post("/reload")
    async def reload_config() -> dict[str, Any]:
        try:
            reload(runtime, source)
        except ReloadError as error:
            raise HTTPException(400, str(error)) from None
        return {"reloaded": True}

    @router.get("/faq")
    async def get_faq() -> PlainTextResponse:
        path = runtime.config.faq.path
        return PlainTextResponse(path.read_text(encoding="utf-8") if path is not None and path.exists() else "[]\n")

    @router.put("/faq")
    async def put_faq(request: Request) -> dict[str, Any]:
        path = runtime.config.faq.path
        if path is None:
            raise HTTPException(400, "No faq.path is configured.")
        try:
            text = (await request.body()).decode()
            faq = read_faq(text)
        except UnicodeDecodeError:
            raise HTTPException(400, "The file is not UTF-8.") from None
        except FaqError as error:
            raise HTTPException(400, str(error)) from None
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        runtime.read_faq()
        return {"entries": len(faq.entries), "collisions": faq.collisions()}

    return router


def purge_scope(order: dict[str, Any], runtime: Runtime) -> str:
    """The generation scope of a purge order; raises HTTP 400."""
    named = [name for name in _TARGETS if order.get(name) not in (None, False)]
    if "namespace" in named and "tenant" in named:
        named.remove("tenant")
    unknown = order.keys() - {*_TARGETS, "soft"}
    if len(named) != 1 or unknown:
        raise HTTPException(
            400, f"A purge names exactly one of {', '.join(_TARGETS)} (namespace may come with tenant)."
        )
    name, value = named[0], order[named[0]]
    if name == "all":
        return EVERYTHING
    if name == "before":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= runtime.clock.time():
            raise HTTPException(400, "'before' must be a moment in the past, in seconds since 1970.")
        return before(value)
    if not isinstance(value, str) or not value:
        raise HTTPException(400, f"'{name}' must be a text.")
    if name == "model":
        return f"model:{runtime.planner.model(value).target}"
    if name == "namespace":
        return f"namespace:{order.get('tenant', 'default')}/{value}"
    return f"{name}:{value}"
