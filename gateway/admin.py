"""The operator's side: ``/admin``. With ``admin.key`` set it asks for it; without, it answers on loopback only."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import orjson
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cache.response.faq import FaqError, read_faq
from cache.response.tags import EVERYTHING, before, place_of, soft
from gateway.access import plain, require_operator
from gateway.dialects import DIALECTS
from gateway.explanation import explanation
from gateway.judging import report as agreement_report
from gateway.ladder import report as ladder_report
from gateway.plan import NAME_FORM, BadRequest, is_name, read_body
from gateway.prefix_health import report as prefix_report
from gateway.reload import ReloadError, Source, reload
from gateway.reporting import effective_response, outcomes, rows_response, sums_response
from gateway.runtime import Runtime
from gateway.sentinels.report import report
from gateway.tenants import Denied
from gateway.vitals import of_all_workers

_KEY = re.compile("[0-9a-f]{32}")
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

    @router.get("/sentinels")
    async def sentinels() -> dict[str, Any]:
        """The lights of all workers, the red ones first, and what looking costs."""
        return report(await of_all_workers(runtime), runtime.clock.time())

    @router.get("/effective")
    async def effective(request: Request) -> list[dict[str, Any]]:
        """Installed and effective compute of each upstream, ``from`` (``-1h``) ``to`` (now)."""
        return await effective_response(runtime, request.query_params)

    @router.get("/ladder")
    async def ladder() -> dict[str, Any]:
        """What an ideal response cache would have answered, and to what the rest was lost."""
        told = [worker["misses"] for worker in (await of_all_workers(runtime)).values()]
        since = min(one["since"] for one in told)
        return ladder_report(told, await outcomes(runtime, since) or {})

    @router.get("/prefix-health")
    async def prefix_health() -> dict[str, Any]:
        """How much of the prompts is shared, what keeps more of them from being, and the change that would mend it."""
        return prefix_report(worker["prefixes"] for worker in (await of_all_workers(runtime)).values())

    @router.get("/agreement")
    async def agreement() -> list[dict[str, Any]]:
        """How often held-out answers agreed with those kept, by place, and which places are doubted or disarmed."""
        return agreement_report(runtime, await of_all_workers(runtime), None)

    @router.post("/arm")
    async def arm(request: Request) -> dict[str, Any]:
        """Lets what is kept of a place answer again: ``model``, and its ``tenant`` and ``namespace``."""
        try:
            order = orjson.loads(await request.body())
        except orjson.JSONDecodeError:
            order = None
        place = place_to_arm(order, runtime)
        disarmed = place in runtime.generations.disarmed
        return {"armed": place, "was_disarmed": disarmed, "everywhere": await runtime.arm(place, armed=True)}

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
        return JSONResponse(await explanation(runtime, plan, posted))

    @router.post("/purge")
    async def purge(request: Request) -> dict[str, Any]:
        """Purges by one of key, tag, model, tenant, namespace (with tenant), before, all."""
        try:
            order = orjson.loads(await request.body())
        except orjson.JSONDecodeError:
            order = None
        if not isinstance(order, dict):
            raise HTTPException(400, 'A purge is a JSON object such as {"tag": "news"}.')
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
            later = reload(runtime, source)
        except ReloadError as error:
            raise HTTPException(400, str(error)) from None
        return {"reloaded": True, "at_next_start": later}

    @router.get("/faq")
    async def get_faq() -> PlainTextResponse:
        path = runtime.config.faq.path
        try:
            return PlainTextResponse(path.read_text(encoding="utf-8") if path is not None and path.exists() else "[]\n")
        except (OSError, UnicodeDecodeError) as error:
            raise HTTPException(500, _sentence(f"{path} cannot be read", error)) from None

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
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise HTTPException(500, _sentence(f"{path} cannot be written", error)) from None
        runtime.read_faq()
        return {"entries": len(faq.entries), "collisions": faq.collisions()}

    return router


def place_to_arm(order: object, runtime: Runtime) -> str:
    """The place that an order names; raises HTTP 400."""
    named = {"tenant": "default", "namespace": "", **order} if isinstance(order, dict) else {}
    if named.keys() != {"tenant", "namespace", "model"} or not all(isinstance(part, str) for part in named.values()):
        raise HTTPException(400, 'Name what to arm as {"model": "m1"}, with its "tenant" and "namespace", if any.')
    return place_of(named["tenant"], named["namespace"], runtime.planner.model(named["model"]).target)


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
    if name in ("tag", "namespace") and not is_name(value):
        raise HTTPException(400, f"Nothing is kept under this {name}: it would be {NAME_FORM}.")
    if name == "key" and not _KEY.fullmatch(value):
        raise HTTPException(400, "'key' must be the 32 digits of a key as /admin/explain shows it.")
    if name == "model":
        return f"model:{runtime.planner.model(value).target}"
    if name == "namespace":
        return f"namespace:{order.get('tenant', 'default')}/{value}"
    return f"{name}:{value}"


def _sentence(what: str, error: OSError | UnicodeDecodeError) -> str:
    return f"{what}: {error.strerror if isinstance(error, OSError) else 'it is not UTF-8'}."
