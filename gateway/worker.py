"""One gateway worker: a uvicorn server on a socket it inherits, run by the supervisor.

`python -m gateway.worker FD GRACE SOURCE`: FD is a listening socket, GRACE the seconds that open requests have at the
end, SOURCE (JSON) where the configuration was read from. The configuration itself comes as one JSON line on standard
input; each further line is a new one to take over while serving. The end of standard input means that the supervisor
is gone: the worker drains and ends.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys

import uvicorn
import uvloop

from gateway.app import Gateway, create_app
from gateway.config import Config
from gateway.reload import ReloadError, reload
from gateway.server import Server, server_config
from gateway.source import Source

GARBAGE = 20_000
"""New objects after which cycles are looked for; the request path makes next to none."""
LINE_LIMIT = 64 << 20  # a configuration with very many tenants is still one line

log = logging.getLogger("warmgate.worker")


def main(fd: int, grace: float, source: Source) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with socket.socket(fileno=fd) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(listener, grace, source))


async def serve(listener: socket.socket, grace: float, source: Source) -> None:
    """Until SIGTERM, or until the supervisor is gone."""
    configs = await _standard_input()
    line = await configs.readline()
    if not line:
        return

    def read_again() -> Config:
        """For POST /admin/reload: this worker now, all of them by way of the supervisor."""
        config = source.read()
        os.kill(os.getppid(), signal.SIGHUP)
        return config

    app = create_app(Config.model_validate_json(line), source=read_again)
    server = Server(server_config(app, grace=grace))
    gc.freeze()  # what is loaded stays; the collector need not look at it again and again
    gc.set_threshold(GARBAGE)
    following = asyncio.create_task(_follow(configs, app, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        following.cancel()


async def _follow(configs: asyncio.StreamReader, app: Gateway, server: uvicorn.Server) -> None:
    """Hands each new configuration to the app."""
    while line := await configs.readline():
        config = Config.model_validate_json(line)
        try:
            reload(app.runtime, lambda config=config: config)
        except ReloadError as error:
            log.error("the old configuration stays: %s", error)
    server.should_exit = True


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Source.from_json(sys.argv[3]))
