"""From an upstream's response into a `Reading`, as fast as its sink takes it, without a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.encoding import Decoder, EncodingError
from gateway.reading import WINDOW, Reading
from gateway.upstreams.client import UpstreamError, UpstreamResponse

RUN_OUT = 1.0
"""Seconds that an upstream has to end its response once its stream has ended."""


class Pump:
    """Feeds a reading with a response, as fast as its sink takes it. ``over`` is called once: when the answer has
    landed, or with what it failed of where that could not be told in an answer's own form.
    """

    def __init__(
        self,
        response: UpstreamResponse,
        codec: Decoder | None,
        reading: Reading,
        over: Callable[[Exception | None], None],
    ) -> None:
        self._response, self._codec, self._reading, self._over = response, codec, reading, over
        self._stopped = False

    def start(self) -> None:
        """Begins with what is there."""
        self._response.on_arrival = self._reading.sink.on_room = self._pump
        self._pump()

    def stop(self) -> None:
        """The rest of the response is not wanted."""
        self._stopped = True
        self._response.close()

    def _pump(self) -> None:
        response, codec, reading = self._response, self._codec, self._reading
        if self._stopped:
            return
        try:
            while not reading.done and not reading.sink.full:
                data = response.take()
                if data:
                    if decoded := codec.feed(data) if codec is not None else data:
                        reading.feed(decoded)
                elif not response.ended:
                    return
                else:
                    if codec is not None and (decoded := codec.finish()):
                        reading.feed(decoded)
                    if not reading.done:
                        reading.end()
        except Exception as error:
            if not self._told(error):
                self.stop()
                self._over(error)
                return
        if reading.done:
            self._stopped = True
            run_out(response)
            self._over(None)

    def _told(self, error: Exception) -> bool:
        """Whether the callers could be told in the answer's own form."""
        if not isinstance(error, UpstreamError | EncodingError):
            return False
        try:
            self._reading.fail(error)
        except Exception:
            return False
        return True


async def read_from(response: UpstreamResponse, codec: Decoder | None, reading: Reading) -> None:
    """Reads a response to its end; raises what a `Pump` may fail of."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(error: Exception | None) -> None:
        if over.done():
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)

    pump = Pump(response, codec, reading, settle)
    try:
        pump.start()
        await over
    except asyncio.CancelledError:
        pump.stop()
        raise


def run_out(response: UpstreamResponse) -> None:
    """Reads what comes behind a stream's end, so that the connection can be used again; not for long, and not much."""
    if response.ended:
        response.on_arrival = None
        return
    late = asyncio.get_running_loop().call_later(RUN_OUT, response.close)
    left = WINDOW

    def more() -> None:
        nonlocal left
        try:
            left -= len(response.take())
            over = response.ended or left < 0
        except UpstreamError:
            over = True
        if over:
            late.cancel()
            response.close()

    response.on_arrival = more
    more()
