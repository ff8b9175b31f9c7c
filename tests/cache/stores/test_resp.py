"""The Redis client: one write a turn, replies in order, every way a server can misbehave."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from cache.stores import deadlines, resp
from cache.stores.address import Address
from cache.stores.base import StoreError
from cache.stores.resp import Client
from tests.cache.stores.fake_redis import NIL, OK, Command, HangUp, fake_redis
from tests.services import RedisServer, free_port, redis_server


def echo(command: Command) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(command[-1]), command[-1])


async def test_commands_of_one_turn_go_out_in_one_write() -> None:
    async with fake_redis(echo) as fake:
        client = Client(fake.url, timeout=2)
        await client.open()
        fake.reads.clear()
        replies = await asyncio.gather(*[client.execute(b"GET", b"k%d" % i) for i in range(100)])
        assert replies == [b"k%d" % i for i in range(100)]
        assert [len(batch) for batch in fake.reads] == [100]
        await client.close()


async def test_no_task_per_command() -> None:
    async with fake_redis(echo) as fake:
        client = Client(fake.url, timeout=2)
        await client.open()
        before = len(asyncio.all_tasks())
        futures = [client.execute(b"GET", b"k") for _ in range(50)]
        assert len(asyncio.all_tasks()) == before
        await asyncio.gather(*futures)
        await client.close()


async def test_commands_sent_while_connecting_wait_for_the_connection() -> None:
    async with fake_redis(echo) as fake:
        client = Client(fake.url, timeout=2)
        assert await asyncio.gather(client.execute(b"GET", b"a"), client.execute(b"GET", b"b")) == [b"a", b"b"]
        assert fake.connections == 1
        await client.close()


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_replies_may_come_in_any_pieces(size: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies = b"%0\r\n" + b"$5\r\nab\r\nc\r\n" + NIL + b":7\r\n" + b"-OOM no\r\n" + b"*2\r\n+a\r\n$0\r\n\r\n"
        await reader.read(10_000)
        for start in range(0, len(replies), size):
            writer.write(replies[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = Client(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=2)
        replies = await asyncio.gather(*[client.execute(b"X") for _ in range(5)], return_exceptions=True)
        assert replies[:3] == [b"ab\r\nc", None, 7]
        assert isinstance(replies[3], StoreError)
        assert replies[4] == [b"a", b""]
        await client.close()


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'\r\n", "full"),
        (b"-READONLY You can't write against a read only replica.\r\n", "readonly"),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", "readonly"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "busy"),
        (b"-BUSY Redis is busy running a script\r\n", "busy"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "busy"),
        (b"-NOAUTH Authentication required.\r\n", "denied"),
        (b"-NOPERM this user has no permissions\r\n", "denied"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "moved"),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", "data"),
        (b"-ERR something new\r\n", "protocol"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_error_replies_fall_into_few_classes_and_keep_the_connection(reply: bytes, kind: str) -> None:
    async with fake_redis(lambda command: reply if command[0] == b"GET" else OK) as fake:
        client = Client(fake.url, timeout=2)
        with pytest.raises(StoreError) as failed:
            await client.execute(b"GET", b"k")
        assert failed.value.kind == kind
        assert str(failed.value) == reply[1:-2].decode()
        assert await client.execute(b"PING") == b"OK"
        assert fake.connections == 1
        await client.close()


@pytest.mark.parametrize("half", [b"", b"$100\r\nhalf a val", b"*2\r\n$1\r\na\r\n", b"$"])
async def test_a_half_reply_and_a_hang_up_fail_the_call_and_the_next_connection_works(half: bytes) -> None:
    replies: list[bytes] = []

    def script(command: Command) -> bytes:
        if command[0] != b"GET":
            return OK
        if not replies:
            replies.append(half)
            raise HangUp(half)
        return echo(command)

    async with fake_redis(script) as fake:
        client = Client(fake.url, timeout=2)
        first = await asyncio.gather(*[client.execute(b"GET", b"k") for _ in range(3)], return_exceptions=True)
        assert [error.kind for error in first if isinstance(error, StoreError)] == ["unavailable"] * 3
        assert len({id(error) for error in first}) == 3, "one exception raised by many would gather tracebacks"
        assert await client.execute(b"GET", b"k2") == b"k2"
        assert fake.connections == 2
        await client.close()


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n", b"$abc\r\n", b"\x00\x01\x02\r\n"], ids=repr
)
async def test_what_is_not_resp_closes_the_connection(nonsense: bytes) -> None:
    async with fake_redis(lambda command: nonsense) as fake:
        client = Client(fake.url, timeout=2)
        await client.open()
        with pytest.raises(StoreError) as failed:
            await client.execute(b"GET", b"k")
        assert failed.value.kind in ("protocol", "unavailable")
        await client.close()


async def test_a_reply_that_nobody_asked_for_closes_the_connection_before_it_can_answer_the_wrong_call() -> None:
    async with fake_redis(lambda command: echo(command) + echo([b"stray"])) as fake:
        client = Client(fake.url, timeout=2)
        await asyncio.gather(client.open(), return_exceptions=True)
        for i in range(5):
            try:
                assert await client.execute(b"GET", b"k%d" % i) == b"k%d" % i
            except StoreError:
                pass
        assert fake.connections > 1
        await client.close()


async def test_an_endless_reply_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp, "MAX_REPLY", 1 << 20)
    async with fake_redis(lambda command: b"$999999999\r\n" + bytes(3 << 20) if command[0] == b"GET" else OK) as fake:
        client = Client(fake.url, timeout=5)
        await client.open()
        with pytest.raises(StoreError) as failed:
            await client.execute(b"GET", b"k")
        assert failed.value.kind == "protocol"
        await client.close()


async def test_a_reply_that_comes_too_late_answers_nobody_else() -> None:
    held: list[Command] = []

    def script(command: Command) -> bytes | None:
        if command[-1] == b"slow":
            held.append(command)
            return None
        return b"".join(echo(late) for late in held) + echo(command)

    async with fake_redis(script) as fake:
        client = Client(fake.url, timeout=0.05)
        await client.open()
        with pytest.raises(StoreError) as failed:
            await client.execute(b"GET", b"slow")
        assert failed.value.kind == "timeout"
        assert await client.execute(b"GET", b"quick") == b"quick"
        assert fake.connections == 1
        await client.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_answer_that_arrived_while_the_loop_was_held_up_is_not_late(
    redis: RedisServer, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "GRACE", 2.0)  # enough on the busiest machine

    async def main() -> None:
        client = Client(redis.url, timeout=0.03)
        await client.open()
        reading, writing = socket.socketpair()
        asyncio.get_running_loop().add_reader(reading, lambda: (reading.recv(1), time.sleep(0.3)))
        for _ in range(3):
            writing.send(b"x")
            replies = [client.execute(b"ECHO", b"%d" % i) for i in range(3)]
            assert await asyncio.gather(*replies) == [b"0", b"1", b"2"]
        asyncio.get_running_loop().remove_reader(reading)
        reading.close()
        writing.close()
        await client.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_a_connection_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp, "STALL", 0.05)
    async with fake_redis(lambda command: echo(command) if fake.connections > 1 else None) as fake:
        client = Client(fake.url, timeout=0.05)
        with pytest.raises(StoreError):
            await client.execute(b"GET", b"k")
        async with asyncio.timeout(2):
            while fake.connections < 2:
                await asyncio.sleep(0.01)
        assert await client.execute(b"GET", b"k") == b"k"
        await client.close()


async def test_a_server_that_does_not_read_is_not_sent_more_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp, "MAX_UNSENT", 1 << 20)
    with redis_server() as server:
        client = Client(server.url, timeout=0.3)
        await client.open()
        server.pause()
        value = bytes(1 << 20)
        failures: list[BaseException | None] = []
        for _ in range(30):
            client.execute(b"SET", b"k", value).add_done_callback(lambda call: failures.append(call.exception()))
            await asyncio.sleep(0)
        await asyncio.sleep(0.4)
        kinds = [failure.kind for failure in failures if isinstance(failure, StoreError)]
        assert kinds.count("busy") > 10
        await client.close()


async def test_an_unreachable_server_fails_calls_at_once() -> None:
    client = Client(f"redis://127.0.0.1:{free_port()}", timeout=5)
    await client.open()
    started = asyncio.get_running_loop().time()
    for _ in range(100):
        with pytest.raises(StoreError, match="cannot connect"):
            await client.execute(b"GET", b"k")
    assert asyncio.get_running_loop().time() - started < 0.5
    await client.close()


async def test_a_server_that_accepts_and_says_nothing_does_not_hold_calls_back() -> None:
    async with fake_redis(echo, greet=lambda command: None) as fake:
        client = Client(fake.url, timeout=0.05, connect_timeout=0.2)
        with pytest.raises(StoreError) as failed:
            await client.execute(b"GET", b"k")
        assert failed.value.kind == "timeout"
        await client.close()


async def test_a_server_without_hello_is_spoken_to_in_the_old_protocol() -> None:
    def redis5(command: Command) -> bytes:
        return b"-ERR unknown command `HELLO`\r\n" if command[0] == b"HELLO" else OK

    for login, expected in [
        ("", []),
        (":secret@", [[b"AUTH", b"secret"]]),
        ("user:p%40ss@", [[b"AUTH", b"user", b"p@ss"]]),
    ]:
        async with fake_redis(echo, greet=redis5) as fake:
            client = Client(fake.url.replace("//", f"//{login}") + "/3", timeout=2)
            assert await client.execute(b"GET", b"k") == b"k"
            assert [c for c in fake.commands if c[0] != b"HELLO"] == [*expected, [b"SELECT", b"3"], [b"GET", b"k"]]
            await client.close()


async def test_a_login_that_is_refused_is_said_and_holds_nobody_up() -> None:
    with redis_server(password="right") as server:
        for login in ("", ":wrong@", "nobody:right@"):
            client = Client(f"redis://{login}127.0.0.1:{server.port}", timeout=2)
            with pytest.raises(StoreError) as failed:
                await client.execute(b"GET", b"k")
            assert failed.value.kind == "denied"
            assert "wrong" not in str(failed.value).lower().replace("wrongpass", "")
            await client.close()
        client = Client(server.url, timeout=2)
        assert await client.execute(b"PING") is not None
        await client.close()


async def test_databases_are_kept_apart(redis: RedisServer) -> None:
    zero, one = Client(redis.url, timeout=2), Client(redis.unix_url + "?db=1", timeout=2)
    await zero.execute(b"SET", b"k", b"0", b"PX", 60_000)
    assert await one.execute(b"GET", b"k") is None
    await asyncio.gather(zero.close(), one.close())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for this machine that signed itself; its key lies beside it as key.pem."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "cert.pem"


async def test_tls_with_a_private_authority(certificate: Path) -> None:
    key = certificate.with_name("key.pem")
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with redis_server(*options, "--tls-auth-clients", "no"):
        url = f"rediss://127.0.0.1:{port}"
        for query, works in [(f"?ca={certificate}", True), ("?verify=no", True), ("", False)]:
            client = Client(url + query, timeout=5)
            if works:
                await client.execute(b"SET", b"k", b"v" * 100_000, b"PX", 60_000)
                assert await client.execute(b"GET", b"k") == b"v" * 100_000
            else:
                with pytest.raises(StoreError, match="certificate"):
                    await client.execute(b"PING")
            await client.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", Address()),
        ("redis://h:1/2", Address("h", 1, db=2)),
        ("redis://[::1]:7/", Address("::1", 7)),
        ("redis://u:p%3A%2F@h", Address("h", user="u", password="p:/")),
        ("redis://:p@h", Address("h", password="p")),
        ("unix:///run/redis.sock", Address(path="/run/redis.sock")),
        ("unix://:p@/run/r%20s.sock?db=4", Address(path="/run/r s.sock", db=4, password="p")),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "redis://"),
        ("redis://:secret@h/x", "must be a number"),
        ("unix://", "path of a socket"),
        ("redis://h:port", "[Pp]ort"),
        ("rediss://h?ca=/nowhere/ca.pem", "certificates"),
    ],
)
def test_a_bad_address_is_explained_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as failed:
        Address.parse(url)
    assert "secret" not in str(failed.value)


def test_an_address_never_shows_its_password() -> None:
    address = Address.parse("redis://u:secret@h")
    assert "secret" not in f"{address} {address!r}"


def test_tls_is_verified_unless_switched_off() -> None:
    checked, unchecked = (Address.parse(f"rediss://h{query}").tls for query in ("", "?verify=no"))
    assert checked is not None and checked.verify_mode == ssl.CERT_REQUIRED and checked.check_hostname
    assert unchecked is not None and unchecked.verify_mode == ssl.CERT_NONE


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the first loop's connection is left, as after a fork
def test_one_client_serves_one_event_loop_after_another(redis: RedisServer) -> None:
    client = Client(redis.url, timeout=2)

    async def ask() -> object:
        return await client.execute(b"ECHO", b"hello")

    async def ask_and_close() -> object:
        try:
            return await ask()
        finally:
            await client.close()

    assert asyncio.run(ask()) == b"hello"
    assert asyncio.run(ask_and_close()) == b"hello"
    gc.collect()
