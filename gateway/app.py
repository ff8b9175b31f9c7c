"""The ASGI application: ``/v1`` goes to the pipeline, everything else (admin, health, metrics) is FastAPI's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi import Request as PageRequest
from fastapi.responses import JSONResponse

from gateway.admin import admin_routes
from gateway.clock import Clock
from gateway.config import Config
from gateway.dashboard.routes import dashboard_routes
from gateway.direct import Direct
from gateway.heads import Heads
from gateway.health import health_routes
from gateway.http import Request, Response, Stream
from gateway.judging import keep_judging
from gateway.pipeline import Pipeline
from gateway.receive import ClientGone, Unreadable, read_request
from gateway.reload import Source, reload
from gateway.runtime import Runtime
from gateway.sentinels.rounds import Sentinels
from gateway.shortcut import Shortcut
from gateway.vitals import packed

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def create_app(config: Config, *, clock: Clock | None = None, source: Source | None = None) -> Gateway:
    """The gateway as an ASGI application; its lifespan opens and closes the stores. ``source`` reads the configuration
    anew.
    """
    return Gateway(Runtime(config, clock), source)


class Gateway:
    """Splits the traffic; everything under ``/v1/`` takes the short way past the web framework."""

    def __init__(self, runtime: Runtime, source: Source | None) -> None:
        self.runtime = runtime
        self._source = source
        self.shortcut = Shortcut(runtime)
        self.heads = Heads(self.shortcut, runtime)
        self.pipeline = Pipeline(runtime, self.shortcut)
        self.direct = Direct(runtime, self.pipeline)
        runtime.on_change += [self.shortcut.forget, self.heads.forget]
        self.sentinels = Sentinels(runtime)
        runtime.ledger.watch(lambda: packed(runtime))
        self._pages = FastAPI(title="Warmgate", docs_url=None, redoc_url=None, lifespan=self._lifespan)
        self._pages.add_exception_handler(404, _nowhere)
        self._pages.include_router(health_routes(runtime))
        self._pages.include_router(admin_routes(runtime, source))
        self._pages.include_router(dashboard_routes(runtime))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            await self._serve(scope, receive, send)
        else:
            await self._pages(scope, receive, send)

    def reload(self) -> None:
        """Reads the configuration anew and takes it into use; raises `ReloadError`."""
        reload(self.runtime, self._source)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        await self.runtime.open()
        self.runtime.background(self.sentinels.run())
        self.runtime.background(keep_judging(self.runtime))
        try:
            yield
        finally:
            await self.runtime.close()

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            request = await read_request(scope, receive, self.runtime.config.limits.max_body)
            await self._answer(request, send)
        except Unreadable as error:
            refused = self.pipeline.refused(error.request, error.status, str(error), error.code)
            refused.headers.append((b"connection", b"close"))
            await _send_whole(refused, send)
        except (ClientGone, asyncio.CancelledError):
            return  # the caller has left (`WireProtocol.connection_lost`), or the server ends

    async def _answer(self, request: Request, send: Send) -> None:
        response = await self.pipeline.answer(request)
        if isinstance(response.body, bytes):
            await _send_whole(response, send)
            return
        await _send_stream(response, response.body, send)


async def _send_stream(response: Response, body: Stream, send: Send) -> None:
    more, failure = asyncio.Event(), None
    body.wake = more.set
    try:
        await send({"type": "http.response.start", "status": response.status, "headers": response.headers})
        while not body.ended:
            more.clear()
            data = body.take()
            if data or body.ended:
                await send({"type": "http.response.body", "body": data, "more_body": not body.ended})
            else:
                await more.wait()
    except Exception as error:
        failure = error
        raise
    finally:
        body.close(failure)


async def _nowhere(request: PageRequest, error: Exception) -> JSONResponse:
    """Most who come here gave a client the address without its ``/v1``, so the answer has OpenAI's form."""
    detail = getattr(error, "detail", "Not Found")
    message = detail if detail != "Not Found" else f"There is no {request.url.path} here; the API is below /v1."
    refusal = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
    return JSONResponse({"error": refusal, "detail": message}, 404)


async def _send_whole(response: Response, send: Send) -> None:
    assert isinstance(response.body, bytes)
    headers = [*response.headers, (b"content-length", b"%d" % len(response.body))]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
