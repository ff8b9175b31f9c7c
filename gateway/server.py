"""How a gateway is put on the network: uvicorn, with the short path as its protocol."""

from __future__ import annotations

import uvicorn

from gateway.app import Gateway
from gateway.wire import WireProtocol

KEEP_ALIVE_SECONDS = 75


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
