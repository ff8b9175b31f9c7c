"""The engine's HTTP server: OpenAI's chat and text completions, plain and as SSE, plus health and metrics.

The port is bound before the model is loaded, so that `/health` can say 503 meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from engine import metrics
from engine.api import MAX_PROMPTS, ChatRequest, CommonRequest, CompletionRequest, parse
from engine.config import EngineConfig
from engine.core import Generation
from engine.ending import Ending
from engine.errors import ModelError, RequestError
from engine.guide import wants_json
from engine.output import Delta
from engine.replies import as_event, as_json, error_body, refusal
from engine.responses import Answer, ChatAnswer, CompletionAnswer
from engine.worker import Worker

log = logging.getLogger("engine")

MAX_BODY = 32 << 20
GRACE = 10.0
"""Seconds that open requests have at the end."""
_LAST_WORDS = 5
"""Seconds in which clients must then take what ends theirs."""


class EngineApp:
    """The routes over one `Worker`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.asgi = FastAPI(title="Warmgate engine", docs_url=None, redoc_url=None, openapi_url=None)
        routes = (
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
        )
        for method, path, handler in routes:
            self.asgi.add_api_route(path, handler, methods=[method], response_class=Response, response_model=None)
        self.asgi.add_exception_handler(RequestError, _on_request_error)
        self.asgi.add_exception_handler(HTTPException, _on_http_error)
        self.asgi.add_exception_handler(Exception, _on_failure)

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, await self._body(request))
        self._check_model(body.model)
        body.refuse_unsupported()
        messages = [message.plain(i) for i, message in enumerate(body.messages)]
        prompt = self._worker.template.render(messages, body.tools)
        ids = await self._encode(prompt)
        return await self._answer(request, body, [ids], ChatAnswer)

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await self._body(request))
        self._check_model(body.model)
        body.refuse_unsupported()
        return await self._answer(request, body, await self._prompts(body), CompletionAnswer)

    async def models(self) -> Response:
        return as_json({"object": "list", "data": [self._card()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return as_json(self._card())

    async def health(self) -> Response:
        return as_json({"status": "ok"}) if self._worker.ready else as_json({"status": "loading"}, 503)

    async def metrics(self) -> Response:
        self._check_ready()
        text = metrics.render(self._worker.core, self._worker.config.name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def reset_prefix_cache(self) -> Response:
        self._check_ready()
        await self._worker.ask(self._worker.core.reset_prefix_cache)
        return as_json({"status": "ok"})

    def _card(self) -> dict[str, Any]:
        card = {"id": self._worker.config.name, "object": "model", "created": 0, "owned_by": "warmgate"}
        return card | ({"max_model_len": self._worker.core.context} if self._worker.ready else {})

    async def _body(self, request: Request) -> bytes:
        self._check_ready()
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY:
                raise RequestError(f"the request body is larger than {MAX_BODY} bytes", status=413)
            pieces.append(piece)
        return b"".join(pieces)

    def _check_ready(self) -> None:
        if not self._worker.ready:
            raise RequestError("the model is still loading", status=503, code="loading")

    def _check_model(self, name: str) -> None:
        if name != self._worker.config.name:
            raise RequestError(
                f"the model {name!r} does not exist here; this engine serves {self._worker.config.name!r}",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def _encode(self, text: str) -> list[int]:
        """Token ids; in a thread, since a long text takes long and everyone else waits for the event loop."""
        return await asyncio.to_thread(self._worker.core.tokenizer.encode, text)

    async def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        given: Any = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if len(given) > MAX_PROMPTS:
            raise RequestError(f"the request has {len(given)} prompts; at most {MAX_PROMPTS} are taken", param="prompt")
        prompts = [await self._encode(item) if isinstance(item, str) else list(item) for item in given]
        if not prompts:
            raise RequestError("the prompt is empty", param="prompt")
        return prompts

    async def _answer(
        self, request: Request, body: CommonRequest, prompts: list[list[int]], kind: type[Answer]
    ) -> Response:
        core, choices = self._worker.core, len(prompts) * body.choices
        if any(not 0 <= token < core.spec.vocab for prompt in prompts for token in prompt):
            raise RequestError(f"the prompt has token ids outside 0 … {core.spec.vocab - 1}", param="prompt")
        transfer = body.kv_transfer_params
        if body.offered and len(prompts) > 1:
            raise RequestError("only one prompt can be computed for another engine", param="kv_transfer_params")
        guide = None
        if body.response_format is not None and wants_json(body.response_format):
            guide = await asyncio.to_thread(self._worker.grammars.guide, body.response_format)
        answer = kind(self._worker.config.name, core.tokenizer, choices, sum(map(len, prompts)))
        answer.reports, answer.per_prompt = body.top() is not None, body.choices
        jobs: list[Generation] = []
        for index in range(choices):
            prompt = prompts[index // body.choices]
            jobs.append(
                Generation(
                    id=f"{answer.id}-{index}",
                    prompt=prompt,
                    max_tokens=core.check(len(prompt), 1 if body.offered else body.limit()),
                    sampling=body.sampling(index % body.choices, core.spec.vocab),
                    stops=body.stops,
                    salt=body.salt,
                    priority=body.priority,
                    ignore_eos=body.ignore_eos,
                    guide=guide and guide.copy(),
                    offered=body.offered,
                    source=transfer.source if transfer is not None and len(prompts) == 1 else None,
                )
            )
        pieces = self._run(jobs)
        if body.stream:
            return StreamingResponse(self._events(body, answer, pieces), media_type="text/event-stream")
        async with _closing_on_disconnect(request, pieces):
            async for index, delta in pieces:
                answer.take(index, delta)
        return as_json(answer.whole())

    async def _run(self, jobs: list[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all jobs as they come, (choice, delta); cancels what is left when it is closed."""
        if len(jobs) == 1:
            async with contextlib.aclosing(self._worker.generate(jobs[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        merged: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with contextlib.aclosing(self._worker.generate(jobs[index])) as deltas:
                    async for delta in deltas:
                        merged.put_nowait((index, delta))
                merged.put_nowait(None)
            except RequestError as error:
                merged.put_nowait(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(jobs))]
        try:
            left = len(jobs)
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(
        self, body: CommonRequest, answer: Answer, pieces: AsyncGenerator[tuple[int, Delta], None]
    ) -> AsyncIterator[bytes]:
        opened: set[int] = set()
        async with contextlib.aclosing(pieces):
            try:
                async for index, delta in pieces:
                    answer.take(index, delta)
                    if index not in opened:
                        opened.add(index)
                        if (opening := answer.opening(index)) is not None:
                            yield as_event(opening)
                    if delta.text or delta.logprobs or delta.finish_reason:
                        yield as_event(answer.event(index, delta))
            except RequestError as error:
                yield as_event(error_body(error))
                return
        if body.wants_usage:
            yield as_event(answer.usage_event())
        yield b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def _closing_on_disconnect(
    request: Request, pieces: AsyncGenerator[tuple[int, Delta], None]
) -> AsyncIterator[None]:
    """Ends the work inside when the client of a plain request leaves: nobody would read the answer."""
    task = asyncio.current_task()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        async with contextlib.aclosing(pieces):
            yield
    except asyncio.CancelledError:
        if not watcher.done():
            raise
        raise RequestError("the client closed the connection", status=499) from None
    finally:
        watcher.cancel()


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refusal(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"the engine has no {request.method} {request.url.path}"  # nothing else here raises these
    return refusal(RequestError(sentence, status=error.status_code))


async def _on_failure(request: Request, error: Exception) -> Response:
    return refusal(RequestError("the engine failed on this request", status=500))


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises `ModelError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # only if told TCP, asyncio sends at once
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ModelError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to `run`: uvicorn would raise them again after the shutdown and so spoil the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: EngineConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises `ModelError` if the address or the model cannot be had.

    Ends the process with exit code 1 if the engine breaks down, so that whoever started it starts another.
    """
    listener = bind(config.host, config.port)
    worker = Worker(config)
    app = Ending(EngineApp(worker).asgi)
    patience = math.ceil(GRACE) + _LAST_WORDS
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=patience)
    )

    async def serve() -> None:
        host, port = listener.getsockname()[:2]

        def end() -> None:
            server.should_exit = True
            asyncio.get_running_loop().call_later(GRACE, app.now)

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end)
        worker.start(on_ready=lambda: log.info("serving %r on http://%s:%d", config.name, host, port), on_failure=end)
        await server.serve(sockets=[listener])

    try:
        asyncio.run(serve())
    finally:
        worker.stop()
    if worker.failure is not None:
        raise ModelError(worker.failure)
    if worker.broken:
        raise SystemExit("engine: it broke down; the log says how")
