"""Starts gateway workers and the embedded engine, keeps them alive, drains them at the end.

Each worker has a listening socket of its own on the shared port (SO_REUSEPORT, so that the kernel spreads connections
evenly). The supervisor holds all of them open: when a worker dies, connections wait in its socket's backlog for the
worker that takes its place, and none is lost. The supervisor never touches a request.
"""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from cache.stores.disk import suspect
from gateway.config import ENGINE_UPSTREAM, Config, ConfigError, EngineConfig, Secret, Upstream
from gateway.source import Source, adopted, unchangeable, waiting
from gateway.supervisor.children import Child, end, ending, environment, python_module
from gateway.supervisor.greeting import address, greeting
from gateway.supervisor.listening import StartError, bind, free_port
from gateway.supervisor.probe import get

USAGE_ERROR = 2  # a child that exits with this said in one sentence what must be changed: starting it again is no use
DRAIN_SECONDS = 30.0
FLUSH_SECONDS = 5.0  # for a worker to close its stores after its last request
ENGINE_SECONDS = 10.0  # for the engine to end, once nobody waits for it any more
PROGRESS_SECONDS = 10.0
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def say(message: str) -> None:
    print(f"warmgate: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before a dead child is started again: doubling, and back to the first after a good run."""

    first: float = 0.5
    most: float = 10.0
    good_run: float = 30.0
    early_deaths: int = 5  # this many in a row before the first readiness: it will not start


class Supervisor:
    """Runs one deployment. Raises ConfigError and StartError where it cannot."""

    def __init__(
        self,
        source: Source,
        *,
        worker_command: list[str] | None = None,
        engine_command: list[str] | None = None,
        backoff: Backoff = Backoff(),
    ) -> None:
        self._source = source
        self._worker_command = worker_command or python_module("gateway.worker")
        self._engine_command = engine_command
        self._backoff = backoff
        self.ready = False
        self._stopping = asyncio.Event()
        self._failure: StartError | None = None
        config = source.read()
        self._engine = self._engine_child(config.engine) if config.engine else None
        self._sockets = bind(config.listen.host, config.listen.port, config.listen.workers)
        self.config = self._completed(config, self._sockets[0].getsockname()[1])
        self.workers = [self._worker_child(index, item) for index, item in enumerate(self._sockets)]

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartError when a child cannot be started."""
        loop = asyncio.get_running_loop()
        terminal = os.isatty(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.stop() if terminal and _hung_up() else self.reload())
        children = [*self.workers, *([self._engine] if self._engine else [])]
        tasks = [asyncio.create_task(self._announce()), *(asyncio.create_task(self._keep(child)) for child in children)]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        await self._stopping.wait()
        tasks[0].cancel()
        await self._drain()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure:
            raise self._failure

    def stop(self) -> None:
        """Drain and end; a second call ends everything at once."""
        if self._stopping.is_set():
            for child in [*self.workers, *([self._engine] if self._engine else [])]:
                child.signal(signal.SIGKILL)
        self._stopping.set()

    def reload(self) -> None:
        """Reads the configuration again and hands it to every worker; what is wrong with it changes nothing."""
        try:
            config = self._source.read()
        except ConfigError as error:
            say("the configuration was not reloaded:")
            for message in error.messages:
                say(f"  {message}")
            return
        if fixed := unchangeable(config, self.config):
            say(f"the configuration was not reloaded: a change of {', '.join(fixed)} needs a restart")
            return
        for name in waiting(config, self.config):
            say(f"changes of '{name}' take effect at the next start")
        self.config = adopted(config, self.config)
        for child in self.workers:
            child.send()
        say("configuration reloaded")

    # Children

    def _worker_child(self, index: int, listener: socket.socket) -> Child:
        command = [*self._worker_command, str(listener.fileno()), str(DRAIN_SECONDS), self._source.to_json()]
        return Child(f"gateway worker {index + 1}", command, (listener.fileno(),), self._worker_feed)

    def _worker_feed(self) -> bytes:
        return self.config.model_dump_json().encode() + b"\n"

    def _engine_child(self, engine: EngineConfig) -> Child:
        self._engine_port = free_port()
        command = [*(self._engine_command or engine_command()[0])]
        command += ["--host", "127.0.0.1", "--port", str(self._engine_port), "--model", engine.model]
        command += ["--device", engine.device, "--dtype", engine.dtype, "--block-size", str(engine.block_size)]
        command += ["--speculate", engine.speculate]
        if isinstance(engine.kv_cache.device, int):
            command += ["--kv-cache", str(engine.kv_cache.device)]
        if engine.kv_cache.host is not None:
            command += ["--kv-host", str(engine.kv_cache.host)]
        remote = engine.kv_cache.remote
        address = remote.resolve() if isinstance(remote, Secret) else remote
        return Child("engine", command, secrets={"ENGINE_KV_REMOTE": address} if address else {})

    def _completed(self, config: Config, port: int) -> Config:
        """The configuration as workers see it: the port that was bound, the embedded engine among the upstreams."""
        upstreams = config.upstreams
        if self._engine:
            url = f"http://127.0.0.1:{self._engine_port}"
            upstreams += (Upstream(name=ENGINE_UPSTREAM, url=url, cache_salt=True),)
        listen = config.listen.model_copy(update={"port": port})
        return config.model_copy(update={"listen": listen, "upstreams": upstreams})

    async def _keep(self, child: Child) -> None:
        """Starts the child, and starts it again whenever it dies, until the end."""
        loop, wait, early = asyncio.get_running_loop(), self._backoff.first, 0
        while not self._stopping.is_set():
            began = loop.time()
            process = await child.start()
            if self._stopping.is_set():  # meanwhile; the draining did not see this process yet
                process.terminate()
            code = await process.wait()
            if self._stopping.is_set():
                return
            if not self.ready:
                early += 1
                if code == USAGE_ERROR or early >= self._backoff.early_deaths:
                    self._fail(
                        StartError(f"the {child.name} could not be started ({ending(code)})", told=code == USAGE_ERROR)
                    )
                    return
            if loop.time() - began >= self._backoff.good_run:
                wait = self._backoff.first
            if child in self.workers and -code in CRASHES and self.config.cache.disk is not None:
                suspect(self.config.cache.disk.path)  # a damaged file could end every worker in turn
            say(f"the {child.name} died ({ending(code)}); it is started again in {wait:g} s")
            await self._pause(wait)
            wait = min(wait * 2, self._backoff.most)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._fail(StartError(f"a process could not be supervised: {error}"))

    def _fail(self, error: StartError) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            pass

    async def _drain(self) -> None:
        """Workers first, with time for their open answers; the engine after them, since those answers need it."""
        if not self._failure:
            say(f"stopping; open requests have {DRAIN_SECONDS:g} s to finish")
        for listener in self._sockets:
            listener.close()
        if not await end(self.workers, DRAIN_SECONDS + FLUSH_SECONDS):
            say("some requests took too long and were cut off")
        if self._engine:
            await end([self._engine], ENGINE_SECONDS)

    # Readiness

    async def _announce(self) -> None:
        """Says what is being waited for, and at the end how to try it."""
        host, port = self.config.listen.host, self.config.listen.port
        if self._engine and self.config.engine:
            say(f"starting the engine with the model {self.config.engine.model}")
        elif not self.config.upstreams and self.config.upstreams_file is None:
            say("no engine and no upstreams: only remembered and curated answers can be given")
        number = len(self.workers)
        say(f"starting {number} gateway worker{'s' if number > 1 else ''} on {address(host, port)}")
        model = None
        if self._engine:
            await self._until_ok("the engine", "127.0.0.1", self._engine_port, "/health")
            model = await _first_model("127.0.0.1", self._engine_port)
        await self._until_ok("the gateway", self._sockets[0].getsockname()[0], port, "/readyz")
        self.ready = True
        print(greeting(self.config, model), flush=True)

    async def _until_ok(self, what: str, host: str, port: int, path: str) -> None:
        loop = asyncio.get_running_loop()
        began = told = loop.time()
        while (await get(host, port, path))[0] != 200:
            if loop.time() - told >= PROGRESS_SECONDS:
                told = loop.time()
                say(f"still waiting for {what} ({told - began:.0f} s)")
            await asyncio.sleep(0.1)


async def _first_model(host: str, port: int) -> str | None:
    _, body = await get(host, port, "/v1/models")
    return body["data"][0]["id"] if body and body.get("data") else None


def engine_command() -> tuple[list[str], dict[str, str]]:
    """How the embedded engine is run: command and environment. Raises StartError when it is not installed."""
    if not all(map(find_spec, ("torch", "tokenizers"))):
        raise StartError(
            "the embedded engine is not installed; install it with: pip install 'warmgate[engine]', "
            "or do without it: warmgate serve --no-engine"
        )
    return python_module("engine"), environment()


def _hung_up() -> bool:
    """Whether the terminal this was started on is gone (then SIGHUP does not mean reload)."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return True
    return False
