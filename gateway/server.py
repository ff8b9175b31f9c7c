"""How a gateway is put on the network: uvicorn, with the short path as its protocol."""

from __future__ import annotations

import socket

import uvicorn

from gateway.app import Gateway
from gateway.wire import WireProtocol

KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """Lets the gateway know that it is to drain, before it waits for open requests to end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        if isinstance(app, Gateway):
            app.runtime.closing.set()
        await super().shutdown(sockets)


def server_config(app: Gateway, *, port: int = 0, grace: float = 30.0) -> uvicorn.Config:
    """uvicorn's settings. No header of a caller is believed about who it is, so no proxy headers are read.

    ``grace``: seconds that open requests have at the end.
    """
    return uvicorn.Config(
        app,
        port=port,
        http=WireProtocol,
        ws="none",
        interface="asgi3",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(grace),
    )
