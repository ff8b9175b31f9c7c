"""Reading a request off the wire: the whole body, within bounds, decompressed; an oversized one is drained, so that
the caller can still read why it was refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from gateway.encoding import EncodingError, TooLarge, UnknownCoding, decode_body
from gateway.http import Request

DRAIN_BYTES = 8
"""Bodies of up to this many times the limit are read and dropped; a caller that sends more is cut off."""
DRAIN_SECONDS = 10.0


class ClientGone(Exception):
    """The caller left before its request was complete."""


class Unreadable(Exception):
    """The body cannot be taken; says the status, the sentence, and OpenAI's error code."""

    def __init__(self, request: Request, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.request = request
        self.status = status
        self.code = code


async def read_request(
    scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limit: int
) -> Request:
    """The request with its body, at most ``limit`` bytes before and after decompression; raises `Unreadable`,
    `ClientGone`.
    """
    request = Request(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers=list(scope["headers"]),
        body=b"",
        raw_path=scope.get("raw_path") or scope["path"].encode(),
    )
    length = request.header(b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        if request.header(b"expect") is None:  # whoever asks first has not begun to send
            await _drain(receive, limit * DRAIN_BYTES)
        raise _too_large(request, limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        parts.append(part)
        if size > limit:
            if message.get("more_body"):
                await _drain(receive, limit * DRAIN_BYTES)
            raise _too_large(request, limit)
        if not message.get("more_body"):
            break
    request.body = parts[0] if len(parts) == 1 else b"".join(parts)
    coding = request.header(b"content-encoding")
    if coding:
        try:
            request.body = decode_body(request.body, coding.encode("latin-1"), limit)
        except TooLarge:
            raise _too_large(request, limit) from None
        except UnknownCoding as error:
            raise Unreadable(
                request, 415, f"The request body cannot be read: {error}.", "unsupported_encoding"
            ) from None
        except EncodingError as error:
            raise Unreadable(
                request, 400, f"The request body cannot be decompressed: {error}.", "invalid_encoding"
            ) from None
        headers = [(name, value) for name, value in request.headers if name != b"content-encoding"]
        request = replace(request, headers=headers)
    return request


async def _drain(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], most: int) -> None:
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while most > 0:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                most -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return


def _too_large(request: Request, limit: int) -> Unreadable:
    return Unreadable(request, 413, f"The request body is larger than {limit} bytes.", "request_too_large")


def is_loopback(client: object) -> bool:
    """Whether the peer is on this machine; a Unix socket has no address, and is."""
    if not isinstance(client, tuple | list) or not client:
        return True
    try:
        return ip_address(str(client[0])).is_loopback
    except ValueError:
        return False
