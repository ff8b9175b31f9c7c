"""Upstreams that come and go: by a watched file, by DNS, by the endpoints of a Kubernetes service; and who is gone
finishes what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ConfigError, Upstream, load_config
from gateway.upstreams import discovery
from gateway.upstreams.discovery import Discovery
from loadtest.stub_upstream import StubUpstream, answer
from tests.field.reading import text_of_stream
from tests.harness import Running, running_gateway, upstream
from tests.waiting import until

ASK = {"model": "m1", "temperature": 1, "messages": [{"role": "user", "content": "Say A"}]}


def names(gateway: Running) -> set[str]:
    return {member.name for member in gateway.app.runtime.pool.members}


@contextlib.asynccontextmanager
async def looking(config: dict[str, Any], **more: Any) -> AsyncIterator[Discovery]:
    found = Discovery(lambda: None, **more)
    found.apply(Config.model_validate(config))
    await found.open()
    try:
        yield found
    finally:
        await found.close()


def urls(found: Discovery) -> list[str]:
    return [one.url for one in found.upstreams()]


class TestFile:
    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "FILE_EVERY", 0.02)

    async def test_who_is_in_it_is_used_and_who_is_no_longer_finishes_its_answers(self, tmp_path: Path) -> None:
        file = tmp_path / "upstreams.yaml"
        async with StubUpstream() as a, StubUpstream() as b:
            gate = asyncio.Event()
            a.always(answer(deltas=["one ", "two ", "three"]).held(gate, before=2))
            file.write_text(json.dumps({"upstreams": [upstream(a.url, "a", models=["m1"])]}))
            async with running_gateway({"upstreams_file": str(file), "engine": "off"}) as gateway:
                assert names(gateway) == {"a"}
                async with gateway.client.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as reply:
                    assert reply.headers["x-warmgate-upstream"] == "a"
                    file.write_text(json.dumps({"upstreams": [upstream(b.url, "b", models=["m1"])]}))
                    await until(lambda: names(gateway) == {"b"})
                    assert (await gateway.chat(ASK)).headers["x-warmgate-upstream"] == "b"
                    gate.set()
                    assert text_of_stream(await reply.aread()) == "one two three"
                assert (a.n, a.closed_by_peer) == (1, [])

    async def test_a_fault_in_it_is_reported_and_changes_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "upstreams.yaml"
        good = json.dumps({"upstreams": [upstream("http://127.0.0.1:9", "a")]})
        file.write_text(good)
        async with looking(
            {"upstreams": [upstream("http://127.0.0.1:9", "own")], "upstreams_file": str(file)}
        ) as found:
            assert [one.name for one in found.upstreams()] == ["own", "a"]
            for fault, word in (
                ("upstreams: [", "line 1"),
                ("upstreams: [{name: a, url: 'http://127.0.0.1:9', role: any}]", "role"),
                ("upstreams: [{name: own, url: 'http://127.0.0.1:9'}]", "used twice"),
            ):
                caplog.clear()
                file.write_text(fault)
                await until(lambda word=word: word in caplog.text)
                assert [one.name for one in found.upstreams()] == ["own", "a"]
            caplog.clear()
            file.unlink()
            await until(lambda: "does not exist" in caplog.text)
            assert [one.name for one in found.upstreams()] == ["own", "a"]

    def test_with_such_a_file_no_engine_is_started_unasked(self) -> None:
        assert Config.model_validate({"upstreams_file": "x.yaml"}).engine is None


class Names:
    """A name server in miniature: what it answers can be changed, or it fails."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] | None = addresses
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self.addresses


class TestDns:
    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "DNS_EVERY", 0.02)

    PATTERN = upstream(
        "http://engines.internal:8000/base",
        "e",
        dns=True,
        models=["m1"],
        kv_events={"connect": "tcp://{host}:5557", "replay": "tcp://{host}:5558"},
    )

    async def test_each_address_is_an_upstream_like_the_pattern(self) -> None:
        answers = Names("10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1")
        async with looking({"upstreams": [self.PATTERN]}, resolve=answers) as found:
            assert answers.asked[0] == ("engines.internal", 8000)
            first, second, third = found.upstreams()
            assert (first.name, first.url) == ("e-10.0.0.1-8000", "http://10.0.0.1:8000/base")
            assert second.name == "e-10.0.0.2-8000"
            assert (third.name, third.url) == ("e-fd00--1-8000", "http://[fd00::1]:8000/base")
            assert third.kv_events is not None
            assert (third.kv_events.connect, third.kv_events.replay) == ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558")
            assert first.models == ("m1",)
            assert not any(one.dns for one in (first, second, third))

    async def test_addresses_come_and_go_and_a_failing_server_leaves_what_was_known(self) -> None:
        answers = Names("10.0.0.1")
        async with looking({"upstreams": [self.PATTERN]}, resolve=answers) as found:
            answers.addresses = ("10.0.0.1", "10.0.0.3")
            await until(lambda: len(found.upstreams()) == 2)
            answers.addresses = None
            asked = len(answers.asked)
            await until(lambda: len(answers.asked) > asked + 3)
            assert len(found.upstreams()) == 2
            answers.addresses = ("10.0.0.3",)
            await until(lambda: urls(found) == ["http://10.0.0.3:8000/base"])

    async def test_a_reload_keeps_what_is_known_of_an_unchanged_pattern(self) -> None:
        answers = Names("10.0.0.1")
        async with looking({"upstreams": [self.PATTERN]}, resolve=answers) as found:
            answers.addresses = None
            found.apply(Config.model_validate({"upstreams": [self.PATTERN], "engine": "off"}))
            assert urls(found) == ["http://10.0.0.1:8000/base"]
            found.apply(Config.model_validate({"upstreams": [self.PATTERN | {"weight": 2}]}))
            assert urls(found) == []

    async def test_the_machines_own_resolver_is_asked(self) -> None:
        async with StubUpstream() as u:
            config = {"upstreams": [upstream(f"http://localhost:{u.port}", "e", dns=True)], "engine": "off"}
            async with running_gateway(config) as gateway:
                assert f"e-127.0.0.1-{u.port}" in names(gateway)
                assert (await gateway.chat(ASK)).status_code == 200

    @pytest.mark.parametrize("way", ["dns: true", "kubernetes: {service: s}"])
    def test_a_certificate_is_for_a_name(self, tmp_path: Path, way: str) -> None:
        path = tmp_path / "warmgate.yaml"
        path.write_text(f"upstreams: [{{name: e, url: 'https://engines.internal', {way}}}]")
        with pytest.raises(ConfigError, match="certificate"):
            load_config(path, {}, {})


def a_slice(name: str, *addresses: str, version: int, port: int = 8000, **conditions: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True, **conditions}} for address in addresses],
    }


class ApiServer:
    """As much of Kubernetes' API server as lists and watches EndpointSlices, over HTTP."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.refusing = 0
        self._watching: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> ApiServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()

    def tell(self, kind: str, item: Any) -> None:
        """An event to all who watch."""
        self.raw(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        for writer in self._watching:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def cut(self) -> None:
        """Ends all watches, as a server that restarts."""
        for writer in self._watching:
            writer.close()
        self._watching.clear()

    @property
    def watchers(self) -> int:
        return len(self._watching)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                target = first.split()[1]
                self.requests.append((target, headers))
                if self.refusing:
                    self.refusing -= 1
                    writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")
                elif "watch=true" in target:
                    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    self._watching.append(writer)
                else:
                    body = json.dumps(
                        {"metadata": {"resourceVersion": str(self.version)}, "items": self.items}
                    ).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


class TestKubernetes:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.upstreams.kubernetes.FIRST_PAUSE", 0.02)

    @pytest.fixture
    def account(self, tmp_path: Path) -> Path:
        (tmp_path / "token").write_text("secret-token\n")
        (tmp_path / "namespace").write_text("llm")
        return tmp_path

    @contextlib.asynccontextmanager
    async def following(self, account: Path, *items: dict[str, Any]) -> AsyncIterator[tuple[ApiServer, Discovery]]:
        async with ApiServer() as server:
            server.items = list(items)
            service = {"service": "vllm", "port": "http", "api": server.url}
            config = {"upstreams": [upstream("http://vllm", "v", kubernetes=service)]}
            async with looking(config, account=account) as found:
                await until(lambda: server.watchers == 1)
                yield server, found

    async def test_the_service_is_listed_and_then_watched_with_the_pods_own_token(self, account: Path) -> None:
        async with self.following(account, a_slice("s1", "10.1.0.1", "10.1.0.2", version=5)) as (server, found):
            assert urls(found) == ["http://10.1.0.1:8000", "http://10.1.0.2:8000"]
            (listed, headers), (watched, _) = server.requests
            assert listed.startswith("/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices?")
            assert "labelSelector=kubernetes.io%2Fservice-name%3Dvllm" in listed
            assert headers["authorization"] == "bearer secret-token"
            assert "resourceVersion=1" in watched

    async def test_changes_are_followed(self, account: Path) -> None:
        async with self.following(account, a_slice("s1", "10.1.0.1", version=5)) as (server, found):
            server.tell("ADDED", a_slice("s2", "10.1.0.9", version=6, port=8001))
            await until(lambda: urls(found) == ["http://10.1.0.1:8000", "http://10.1.0.9:8001"])
            server.tell("MODIFIED", a_slice("s1", "10.1.0.1", version=7, ready=False))
            await until(lambda: urls(found) == ["http://10.1.0.9:8001"])
            server.tell("MODIFIED", a_slice("s2", "10.1.0.9", version=8, terminating=True))
            await until(lambda: urls(found) == [])
            server.tell("MODIFIED", a_slice("s2", "10.1.0.9", version=9))
            await until(lambda: len(urls(found)) == 1)
            server.tell("DELETED", a_slice("s2", "10.1.0.9", version=10))
            await until(lambda: urls(found) == [])

    async def test_a_watch_that_ends_goes_on_where_it_ended(self, account: Path) -> None:
        async with self.following(account, a_slice("s1", "10.1.0.1", version=5)) as (server, found):
            server.tell("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
            await asyncio.sleep(0.05)
            server.raw(b"")  # the last chunk
            await until(lambda: len(server.requests) == 3)
            assert "resourceVersion=77" in server.requests[-1][0]
            assert urls(found) == ["http://10.1.0.1:8000"]

    @pytest.mark.parametrize(
        "trouble",
        [
            {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}},
            {"type": "MODIFIED", "object": {"metadata": 5}},
            {"type": "MODIFIED", "object": {"metadata": {}, "endpoints": [{"addresses": "10.0.0.1"}]}},
            {"type": "MODIFIED"},
            [],
            "cut",
        ],
    )
    async def test_whatever_goes_wrong_it_begins_anew_and_meanwhile_believes_what_it_knew(
        self, account: Path, trouble: Any
    ) -> None:
        async with self.following(account, a_slice("s1", "10.1.0.1", version=5)) as (server, found):
            server.refusing, server.version = 3, 40
            server.items = [a_slice("s1", "10.1.0.2", version=40)]
            if trouble == "cut":
                server.cut()
            else:
                server.raw(json.dumps(trouble).encode() + b"\n")
            await until(lambda: server.refusing == 0)
            assert urls(found) == ["http://10.1.0.1:8000"]
            await until(lambda: urls(found) == ["http://10.1.0.2:8000"])

    async def test_requests_go_to_the_endpoints(self, account: Path) -> None:
        async with StubUpstream() as u, ApiServer() as server:
            server.items = [a_slice("s1", "127.0.0.1", version=5, port=u.port)]
            service = {"service": "vllm", "namespace": "llm", "port": "http", "api": server.url}
            config = {"upstreams": [upstream("http://vllm", "v", kubernetes=service)], "engine": "off"}
            async with running_gateway(config) as gateway:
                reply = await gateway.chat(ASK)
                assert (reply.status_code, reply.headers["x-warmgate-upstream"]) == (200, f"v-127.0.0.1-{u.port}")
                server.tell("DELETED", server.items[0])
                await until(lambda: not names(gateway))
                assert (await gateway.chat(ASK)).status_code == 503


def test_a_pattern_alone_is_no_upstream() -> None:
    found = Discovery(lambda: None)
    found.apply(Config(upstreams=(Upstream(name="e", url="http://e:1", dns=True),)))
    assert found.upstreams() == ()
