"""A request head says what the caller said, and nothing that the caller smuggled into it."""

import pytest

from gateway.upstreams.client import UpstreamError
from gateway.upstreams.request import request_head


def head(
    *headers: tuple[bytes, bytes], method: str = "POST", target: bytes = b"/v1/chat/completions", length: int = 2
) -> bytes:
    return request_head(method, target, b"u.example:81", list(headers), length)


def test_a_head_as_sent() -> None:
    assert head((b"Authorization", b"Bearer k"), (b"x-y", b"")) == (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: u.example:81\r\n"
        b"Authorization: Bearer k\r\nx-y: \r\ncontent-length: 2\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("method", "length", "shown"),
    [("GET", 0, None), ("HEAD", 0, None), ("POST", 0, b"0"), ("PUT", 0, b"0"), ("GET", 3, b"3")],
)
def test_content_length_is_that_of_the_body(method: str, length: int, shown: bytes | None) -> None:
    line = None if shown is None else b"content-length: " + shown
    assert (line in head(method=method, length=length).split(b"\r\n")) is (line is not None)
    assert head(method=method, length=length).count(b"content-length") == (line is not None)


@pytest.mark.parametrize(
    "name",
    ["Host", "Connection", "Content-Length", "EXPECT", "Keep-Alive", "TE", "Trailer", "transfer-encoding", "Upgrade"],
)
def test_framing_and_hop_by_hop_headers_are_the_connections_own(name: str) -> None:
    assert head((name.encode(), b"evil"), (b"x-y", b"1")) == head((b"x-y", b"1"))


@pytest.mark.parametrize("value", [b"a\r\nx-admin: 1", b"a\nb", b"a\rb", b"a\0b", b"a\r\n\r\nGET / HTTP/1.1\r\n\r\n"])
def test_line_breaks_in_values_are_refused(value: bytes) -> None:
    with pytest.raises(UpstreamError) as caught:
        head((b"x-y", value))
    assert (caught.value.kind, caught.value.sent) == ("protocol", False)


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"content-length ", b"a\r\nb", b"\xc3\xa9", b"(x)"])
def test_names_that_are_no_tokens_are_refused(name: bytes) -> None:
    with pytest.raises(UpstreamError) as caught:
        head((name, b"1"))
    assert caught.value.kind == "protocol"


@pytest.mark.parametrize("target", [b"", b"/a b", b"/a\r\nx: y", b"/a\tb", b"/\0"])
def test_targets_that_break_the_request_line_are_refused(target: bytes) -> None:
    with pytest.raises(UpstreamError):
        head(target=target)


@pytest.mark.parametrize("method", ["", "GET /x HTTP/1.1\r\n", "G T", "GÉT"])
def test_methods_that_break_the_request_line_are_refused(method: str) -> None:
    with pytest.raises(UpstreamError):
        head(method=method)
