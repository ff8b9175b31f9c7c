"""Stands in for a gateway worker (same arguments, same standard input) and for an engine, without what they do.

GET /readyz, /health, /v1/models; /who gives the process id and the configuration; /slow begins to answer
and ends after a second, /endless after a minute; /die
ends the process in the middle of the request. With FAKE_EXIT set it exits with that code at once.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

config: dict[str, Any] = {}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(9)
        answers: dict[str, Any] = {
            "/who": {"pid": os.getpid(), "config": config},
            "/v1/models": {"data": [{"id": "fake"}]},
        }
        body = json.dumps(answers.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        time.sleep({"/slow": 1, "/endless": 60}.get(self.path, 0))
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    if code := os.environ.get("FAKE_EXIT"):
        sys.exit(int(code))
    if "--port" in sys.argv:
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
    else:
        config.update(json.loads(sys.stdin.readline()))
        threading.Thread(target=follow, daemon=True).start()
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = socket.socket(fileno=int(sys.argv[1]))
    server.daemon_threads = False  # server_close() waits for open requests
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(0.05)
    server.server_close()


def follow() -> None:
    for line in sys.stdin:
        config.clear()
        config.update(json.loads(line))


if __name__ == "__main__":
    main()
