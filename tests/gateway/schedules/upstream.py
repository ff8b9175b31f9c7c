"""An upstream in the process itself: each call says which call it is, takes its time, and may fail at any point."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import orjson

from gateway.http import Headers
from gateway.upstreams.client import UpstreamError, UpstreamResponse
from loadtest.stub_upstream.answers import Content, chat_plain, chat_stream
from tests.gateway.schedules.model import Call, Ending, Model, Moment


class SimulatedUpstream:
    """Stands in for `Member.send`. ``tick`` gives the present moment; ``refreshes``: requests with one in the air."""

    def __init__(self, model: Model, random: Random, tick: Callable[[], Moment]) -> None:
        self._model = model
        self._random = random
        self._tick = tick
        self.refreshing: set[str] = set()
        self.under_way = 0

    async def send(
        self, method: str, path: str, query: bytes, headers: Headers, body: bytes, *, once: bool = False
    ) -> UpstreamResponse:
        random, asked = self._random, orjson.loads(body)
        request_id = next(value for name, value in headers if name == b"x-request-id").decode()
        number, question = len(self._model.calls), asked["messages"][-1]["content"]
        parts = [f"call {number}:", *(f" part {part}" for part in range(random.randint(0, 3))), " end"]
        call = Call(number, question, int(request_id), request_id in self.refreshing, "".join(parts), self._tick())
        self._model.calls.append(call)
        self.under_way += 1
        try:
            await asyncio.sleep(random.choice([0.0, 0.0, 0.5, 1.0, 2.0, 4.0]))
            if random.random() < 0.08:
                raise UpstreamError("reset", "the upstream is gone", sent=True)
        except BaseException as error:
            self._over(call, "failed" if isinstance(error, UpstreamError) else "dropped")
            raise
        if random.random() < 0.08:
            return self._respond(call, 500, b"application/json", [b'{"error":{"message":"no","type":"server_error"}}'])
        finish = "length" if random.random() < 0.08 else "stop"
        content = Content(number, asked, [parts], [finish], usage=None)
        if asked.get("stream"):
            return self._respond(call, 200, b"text/event-stream", chat_stream(content), finish)
        return self._respond(call, 200, b"application/json", [orjson.dumps(chat_plain(content))], finish)

    def _respond(
        self, call: Call, status: int, kind: bytes, steps: list[bytes], finish: str = "stop"
    ) -> UpstreamResponse:
        source = _Connection(lambda: self._over(call, "dropped"))
        response = UpstreamResponse(source, status, [(b"content-type", kind)])
        ending: Ending = "failed" if status >= 400 else "cut off" if finish == "length" else "whole"
        source.task = asyncio.get_running_loop().create_task(self._say(call, response, steps, ending))
        return response

    async def _say(self, call: Call, response: UpstreamResponse, steps: list[bytes], ending: Ending) -> None:
        random = self._random
        breaks_at = random.randrange(len(steps)) if random.random() < 0.1 else None
        for at, step in enumerate(steps, 1):
            await asyncio.sleep(random.choice([0.0, 0.0, 0.0, 0.5, 1.0]))
            if at - 1 == breaks_at:
                self._over(call, "failed")
                response.fail(UpstreamError("reset", "the upstream broke off", sent=True))
                return
            response.receive(step)
            if at < len(steps):
                response.arrived()
        self._over(call, ending)
        response.finish()

    def _over(self, call: Call, ending: Ending) -> None:
        if call.ending is None:
            call.ended, call.ending = self._tick(), ending
            self.under_way -= 1


class _Connection:
    """What one call's bytes come from."""

    task: asyncio.Task[None]

    def __init__(self, on_abandon: Callable[[], None]) -> None:
        self._on_abandon = on_abandon

    def expect_body(self) -> None: ...

    def resume(self) -> None: ...

    def abandon(self) -> None:
        self._on_abandon()
        self.task.cancel()
