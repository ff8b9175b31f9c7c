"""The stub upstream: which script answers which call, and what a test can see of it all."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from loadtest.stub_upstream.answers import model_card
from loadtest.stub_upstream.call import Call
from loadtest.stub_upstream.connection import Connection
from loadtest.stub_upstream.reply import Reply, Wire
from loadtest.stub_upstream.script import answer, error, json_body

PATIENCE = 20.0  # seconds for what must come about; only a fault takes so long
Script = Reply | Callable[[Call], Reply]


class StubUpstream:
    """`async with StubUpstream() as u:` serves on a free loopback port until the block ends.

    What a call is answered with, first match: a script for its path (`on`), the queue (`reply`), the standing script
    (`always`, or `u.script = …`), a good answer. Every POST is a call and counts in `n`; GETs (models, health) don't,
    and only `on` applies to them.
    """

    def __init__(
        self,
        *,
        models: tuple[str, ...] = ("m1",),
        base_path: str = "/v1",
        host: str = "127.0.0.1",
        port: int = 0,
        keep_calls: bool = True,
    ) -> None:
        """base_path: where the APIs are; any other path is a 404. keep_calls: false for long runs by hand."""
        self.models = models
        self.calls: list[Call] = []
        self.other_calls: list[Call] = []  # the uncounted ones
        self.n = 0
        self.running = 0  # calls being answered
        self.peak_running = 0
        self.accepted = 0  # connections
        self.script: Script = answer()
        self._base_path = base_path
        self._host = host
        self._port = port
        self._keep_calls = keep_calls
        self._queue: deque[Script] = deque()
        self._by_path: dict[str, Script] = {}
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "StubUpstream":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, after a `stop` on the same port as before."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self._host, self._port, backlog=1024, reuse_address=True
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse new connections and drop those that are open, as a process that dies."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drop()
        while self._connections:
            await self._change()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """Without base path."""
        return f"http://{self._host}:{self._port}"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    @property
    def closed_by_peer(self) -> list[Call]:
        """The calls whose connection the client closed before their answer was written."""
        return [call for call in self.calls if call.closed_by_peer.is_set()]

    def reply(self, *scripts: Script) -> None:
        """Answer the next calls like this, one each."""
        self._queue.extend(scripts)

    def always(self, script: Script) -> None:
        """Answer every call like this that nothing else is said for."""
        self.script = script

    def on(self, path: str, script: Script) -> None:
        """Answer every request for this path like this, GETs included."""
        self._by_path[path] = script

    async def wait_calls(self, n: int, timeout: float = PATIENCE) -> None:
        """Wait until `n` calls have come. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while self.n < n:
                await self._change()

    async def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Wait until no call is being answered. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while self.running:
                await self._change()

    async def wait_closed(self, call: Call, timeout: float = 1.0) -> None:
        """Wait until the client has closed the connection of a call that is being answered. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await call.closed_by_peer.wait()

    # The connections' side

    def arrived(self, call: Call) -> Wire:
        """Count a call and decide its reply."""
        if call.path.startswith(self._base_path + "/"):
            call.api = call.path.removeprefix(self._base_path)
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        if call.method == "POST":
            self.n += 1
            call.number = self.n
        if self._keep_calls:
            (self.calls if call.number else self.other_calls).append(call)
        self._tell()
        try:
            script = self._script_for(call)
            return (script if isinstance(script, Reply) else script(call)).wire(call)
        except Exception as failure:  # a script is a test's code; whatever is wrong with it shall be seen there
            return error(500, f"the stub's script failed: {failure!r}").wire(call)

    def left(self, call: Call, *, answered: bool, by_peer: bool) -> None:
        """A call is over: answered as the script says, or cut off by the client, or by `stop`."""
        call.ended = time.monotonic()
        if answered:
            call.answered.set()
        elif by_peer:
            call.closed_by_peer.set()
        self.running -= 1
        self._tell()

    def connected(self, connection: Connection) -> None:
        self.accepted += 1
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._tell()

    def _tell(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()

    def _script_for(self, call: Call) -> Script:
        if call.path in self._by_path:
            return self._by_path[call.path]
        if call.number:
            return self._queue.popleft() if self._queue else self.script
        name = call.api.removeprefix("/models/")
        if call.api == "/models":
            return json_body({"object": "list", "data": [model_card(model) for model in self.models]})
        if name in self.models:
            return json_body(model_card(name))
        if call.path == "/health":
            return json_body({"status": "ok"})
        return error(404, f"the stub has no {call.path}", "not_found_error")
