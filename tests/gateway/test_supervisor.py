"""The supervisor: one port, workers that are replaced when they die, an orderly end."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cache.stores.environment import SUSPECT
from gateway.config import Config, ConfigError
from gateway.source import Source, adopted, waiting
from gateway.supervisor import Backoff, StartError, Supervisor
from gateway.supervisor.greeting import greeting, overview
from gateway.supervisor.listening import bind
from gateway.supervisor.probe import get
from tests.waiting import PATIENCE, until

FAKE = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
QUICK = Backoff(first=0.05, most=0.2)
LOOPBACK = "127.0.0.1"


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], Source]:
    def write(text: str) -> Source:
        path = tmp_path / "warmgate.yaml"
        path.write_text(text)
        return Source(path)

    return write


@contextlib.asynccontextmanager
async def running(source: Source) -> AsyncIterator[tuple[Supervisor, asyncio.Task[None]]]:
    supervisor = Supervisor(source, worker_command=FAKE, engine_command=FAKE, backoff=QUICK)
    task = asyncio.create_task(supervisor.run())
    try:
        await until(lambda: supervisor.ready or task.done(), "it is ready")
        yield supervisor, task
    finally:
        supervisor.stop()
        with contextlib.suppress(StartError):
            await task


@contextlib.asynccontextmanager
async def begun(supervisor: Supervisor, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """The body of an answer that has begun to come."""
    reader, writer = await asyncio.open_connection(LOOPBACK, supervisor.config.listen.port)
    writer.write(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % path.encode())
    await reader.readuntil(b"\r\n\r\n")
    yield reader
    writer.close()


async def ask(supervisor: Supervisor, path: str) -> Any:
    status, body = await get(LOOPBACK, supervisor.config.listen.port, path, timeout=10)
    assert status == 200
    return body


NO_ENGINE = "listen: {port: 0, workers: %d}\nengine: off\nledger: off\ncache: {disk: off, ttl: %ds}\n"


async def test_every_worker_gets_the_configuration_and_its_share_of_connections(source):
    async with running(source(NO_ENGINE % (2, 60))) as (supervisor, _):
        answers = [await ask(supervisor, "/who") for _ in range(40)]
    assert len({answer["pid"] for answer in answers}) == 2
    assert all(answer["config"]["listen"]["port"] == supervisor.config.listen.port > 0 for answer in answers)


async def test_a_dead_worker_is_replaced_and_waiting_connections_are_served(source, capfd):
    async with running(source(NO_ENGINE % (1, 60))) as (supervisor, _):
        before = (await ask(supervisor, "/who"))["pid"]
        status, _ = await get(LOOPBACK, supervisor.config.listen.port, "/die")
        assert status == 0
        after = [(await ask(supervisor, "/who"))["pid"] for _ in range(5)]
    assert len(set(after)) == 1
    assert after[0] != before
    assert "the gateway worker 1 died (exit code 9); it is started again in 0.05 s" in capfd.readouterr().err


async def test_a_reload_that_needs_a_restart_changes_nothing_and_says_so(source, capfd):
    async with running(source(NO_ENGINE % (1, 60))) as (supervisor, _):
        changed = (NO_ENGINE % (1, 99)).replace("disk: off", "disk: off, memory: off")
        source(changed)
        supervisor.reload()
        assert (await ask(supervisor, "/who"))["config"]["cache"]["ttl"] == 60
    said = capfd.readouterr().err
    assert "was not reloaded: a change of cache.memory needs a restart" in said
    assert "configuration reloaded" not in said


async def test_a_disk_cache_whose_worker_crashed_is_begun_anew(source, tmp_path):
    """LMDB trusts its file: a damaged page can end whoever reads it, worker after worker."""
    folder = tmp_path / "kept"
    folder.mkdir()
    text = f"listen: {{port: 0, workers: 1}}\nengine: off\nledger: off\ncache: {{disk: {{path: {folder}}}}}\n"
    async with running(source(text)) as (supervisor, _):
        os.kill((await ask(supervisor, "/who"))["pid"], signal.SIGTERM)
        await ask(supervisor, "/who")
        assert not list(folder.iterdir())
        os.kill((await ask(supervisor, "/who"))["pid"], signal.SIGBUS)
        await ask(supervisor, "/who")
        assert [path.name for path in folder.iterdir()] == [SUSPECT]


async def test_no_connection_is_lost_while_workers_are_killed(source):
    async with running(source(NO_ENGINE % (2, 60))) as (supervisor, _):
        for child in supervisor.workers:
            child.signal(signal.SIGKILL)
        answers = await asyncio.gather(*(ask(supervisor, "/who") for _ in range(20)))
    assert len({answer["pid"] for answer in answers}) == 2


def test_the_engine_gets_its_kv_tiers_and_no_process_list_shows_their_password(source, monkeypatch):
    monkeypatch.setenv("KV_STORE", "redis://:hidden@127.0.0.1:1/1")
    text = "listen: {port: 0}\nengine: {kv_cache: {device: 1MiB, host: 2MiB, remote: env:KV_STORE}}\n"
    supervisor = Supervisor(source(text), worker_command=FAKE, engine_command=FAKE, backoff=QUICK)
    engine = supervisor._engine
    assert engine is not None
    assert engine.command[-4:] == ["--kv-cache", "1048576", "--kv-host", "2097152"]
    assert engine.secrets == {"ENGINE_KV_REMOTE": "redis://:hidden@127.0.0.1:1/1"}
    assert "hidden" not in repr(engine)


async def test_the_engine_is_an_upstream_that_is_trusted_with_salts(source):
    text = "listen: {port: 0}\nengine: {block_size: 16}\nupstreams: [{name: a, url: 'http://h'}]\n"
    async with running(source(text + "cache: {disk: off}\nledger: off\n")) as (supervisor, _):
        a, engine = (await ask(supervisor, "/who"))["config"]["upstreams"]
        assert (a["name"], a["cache_salt"]) == ("a", False)
        assert (engine["name"], engine["cache_salt"], engine["models"]) == ("engine", True, None)
        assert (await get(LOOPBACK, int(engine["url"].rpartition(":")[2]), "/health"))[0] == 200


async def test_an_open_request_is_answered_before_the_end(source, capfd):
    async with running(source(NO_ENGINE % (1, 60))) as (supervisor, task), begun(supervisor, "/slow") as slow:
        supervisor.stop()
        assert await slow.read() == b"{}"
        await task
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, supervisor.config.listen.port)
    assert "cut off" not in capfd.readouterr().err


async def test_a_second_signal_ends_at_once(source):
    async with running(source(NO_ENGINE % (1, 60))) as (supervisor, task), begun(supervisor, "/endless") as slow:
        supervisor.stop()
        await asyncio.sleep(0)
        supervisor.stop()
        await task
        with contextlib.suppress(ConnectionError):
            assert await slow.read() == b""


async def test_signals_of_the_operating_system(source):
    async with running(source(NO_ENGINE % (1, 60))) as (supervisor, task):
        source(NO_ENGINE % (1, 90))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: supervisor.config.cache.ttl == 90, "the configuration is read anew")
        os.kill(os.getpid(), signal.SIGTERM)
        await task


class TestReload:
    async def test_reaches_every_worker_without_replacing_it(self, source):
        async with running(source(NO_ENGINE % (2, 60))) as (supervisor, _):
            before = {child.process.pid for child in supervisor.workers if child.process}
            source(NO_ENGINE % (2, 90))
            supervisor.reload()
            async with asyncio.timeout(PATIENCE):
                seen: dict[int, float] = {}
                while set(seen.values()) != {90.0} or seen.keys() != before:
                    answer = await ask(supervisor, "/who")
                    seen[answer["pid"]] = answer["config"]["cache"]["ttl"]

    async def test_a_faulty_configuration_changes_nothing_and_is_explained(self, source, capfd):
        async with running(source(NO_ENGINE % (1, 60))) as (supervisor, _):
            source("cache: {tll: 1h}")
            supervisor.reload()
            assert (await ask(supervisor, "/who"))["config"]["cache"]["ttl"] == 60
        assert "unknown key 'cache.tll'; did you mean 'cache.ttl'?" in capfd.readouterr().err

    def test_what_cannot_change_while_running_stays(self):
        old = Config.model_validate(
            {"listen": {"port": 9}, "engine": {}, "upstreams": [{"name": "engine", "url": "http://e"}]}
        )
        new = Config.model_validate(
            {"listen": {"port": 8}, "engine": "off", "upstreams": [{"name": "b", "url": "http://b"}]}
        )
        taken = adopted(new, old)
        assert (taken.listen.port, taken.engine) == (9, old.engine)
        assert [upstream.name for upstream in taken.upstreams] == ["b", "engine"]
        assert adopted(taken, old) == taken
        assert waiting(new, old) == ["listen", "engine"]
        assert waiting(taken, old) == []


class TestCannotStart:
    async def test_a_port_in_use(self, source):
        with socket.create_server((LOOPBACK, 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is already in use"):
                Supervisor(source(f"listen: {{port: {port}}}\nengine: off"))

    async def test_a_port_that_another_gateway_shares_among_its_workers(self, source):
        others = bind(LOOPBACK, 0, 2)
        try:
            with pytest.raises(StartError, match="already in use"):
                bind(LOOPBACK, others[0].getsockname()[1], 2)
        finally:
            for item in others:
                item.close()

    @pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
    def test_an_address_that_is_not_ours(self, host: str):
        with pytest.raises(StartError, match="is not an address of this machine"):
            bind(host, 0, 1)

    async def test_a_child_that_says_what_is_wrong_is_not_tried_again(self, source, monkeypatch):
        monkeypatch.setenv("FAKE_EXIT", "2")
        async with running(source(NO_ENGINE % (1, 60))) as (_, task):
            with pytest.raises(StartError) as caught:
                await task
        assert caught.value.told

    async def test_a_child_that_keeps_dying_is_given_up(self, source, monkeypatch, capfd):
        monkeypatch.setenv("FAKE_EXIT", "1")
        async with running(source(NO_ENGINE % (1, 60))) as (_, task):
            with pytest.raises(StartError, match=r"the gateway worker 1 could not be started \(exit code 1\)"):
                await task
        assert capfd.readouterr().err.count("it is started again") == QUICK.early_deaths - 1

    async def test_a_program_that_is_not_there(self, source):
        supervisor = Supervisor(source(NO_ENGINE % (1, 60)), worker_command=["/no/such/program"])
        with pytest.raises(StartError):
            await supervisor.run()

    def test_a_secret_that_is_not_there(self, source):
        with pytest.raises(ConfigError, match="admin.key: the environment variable NOT_SET_AT_ALL is not set"):
            source("admin: {key: env:NOT_SET_AT_ALL}").read()

    def test_curated_answers_that_collide(self, source, tmp_path: Path):
        entry = "- {ask: ['Why?'], answer: so}\n"
        (tmp_path / "faq.yaml").write_text(entry * 2)
        with pytest.raises(ConfigError, match="faq.path: two entries answer"):
            source("faq: {path: faq.yaml}").read()

    def test_the_engines_name_is_taken(self, source):
        with pytest.raises(ConfigError, match="is the embedded engine's"):
            source("engine: on\nupstreams: [{name: engine, url: 'http://h'}]").read()


class TestWords:
    def test_the_greeting_shows_a_request_to_try_and_the_dashboard(self):
        text = greeting(Config(), "small")
        assert "curl -i http://127.0.0.1:8080/v1/chat/completions" in text
        assert '"model": "small"' in text
        assert "http://127.0.0.1:8080/dashboard" in text

    def test_the_greeting_names_the_variable_that_holds_the_key_and_an_address_that_works_here(self):
        config = Config.model_validate(
            {"listen": {"host": "0.0.0.0"}, "tenants": [{"name": "a", "keys": ["env:A_KEY"]}], "models": {"m": {}}}
        )
        text = greeting(config, None)
        assert '-H "authorization: Bearer $A_KEY"' in text
        assert "http://127.0.0.1:8080" in text
        assert '"model": "m"' in text

    def test_the_overview_names_all_that_would_run(self):
        config = Config.model_validate(
            {
                "upstreams": [{"name": "a", "url": "http://h", "models": ["m1", "m2"]}],
                "models": {"fast": {"target": "m1"}},
                "cache": {"redis": {"url": "env:REDIS"}},
            }
        )
        text = overview(config)
        assert "a: http://h (openai; m1, m2)" in text
        assert "fast stands for m1" in text
        assert "env:REDIS" in text
        assert "256 MiB, s3fifo" in text
