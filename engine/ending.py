"""How requests end that are still open when the process must: with one error, in the form in which they began."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import RequestError
from engine.replies import as_event, error_body, refusal


class Ending:
    """Stands around the app. By `now` a stream ends with an error event, and what has no answer yet gets a 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: set[asyncio.Task[None]] = set()
        self._over = False

    def now(self) -> None:
        """Ends what is open; to be called when no more requests are taken."""
        self._over = True
        for task in self._open:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = streams = False

        async def sending(message: Message) -> None:
            nonlocal begun, streams
            if message["type"] == "http.response.start":
                begun, streams = True, any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            else:
                streams = streams and message.get("more_body", False)
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if not self._over:
                raise
            error = RequestError("the engine is shutting down", status=503, code="shutting_down")
            with contextlib.suppress(asyncio.CancelledError):  # once more, as the client does not read
                if streams:
                    await send({"type": "http.response.body", "body": as_event(error_body(error))})
                elif not begun:
                    await refusal(error)(scope, receive, send)
        finally:
            self._open.discard(task)
