"""Requests for the short and the full path: a hit in its plainest form, and everything odd that can be done to it."""

from __future__ import annotations

import orjson

from tests.raw import post

CHAT = "/v1/chat/completions"
KNOWN = orjson.dumps({"model": "m1", "temperature": 0, "messages": [{"role": "user", "content": "known"}]})
STREAM = KNOWN[:-1] + b',"stream":true}'
USAGE = STREAM[:-1] + b',"stream_options":{"include_usage":true}}'
HIT = post(CHAT, KNOWN)


def head_of(*lines: bytes, body: bytes = KNOWN) -> bytes:
    return b"\r\n".join([*lines, b"", b""]) + body


def line(name_and_value: bytes) -> bytes:
    """A hit with this header line besides."""
    return HIT.replace(b"\r\nContent-Type", b"\r\n" + name_and_value + b"\r\nContent-Type", 1)


def length(spelling: bytes) -> bytes:
    """A hit with its length told in another way."""
    return HIT.replace(b"Content-Length: %d" % len(KNOWN), spelling)


def first(spelling: bytes) -> bytes:
    """A hit with another first line."""
    return HIT.replace(b"POST /v1/chat/completions HTTP/1.1", spelling, 1)


N = b"%d" % len(KNOWN)
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(KNOWN), KNOWN)
EXTENDED_CHUNKS = CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)
UPGRADE = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
ODD: dict[str, bytes] = {
    "names in lower case": HIT.replace(b"Content-Length", b"content-length").replace(b"Host", b"host"),
    "names in upper case": HIT.replace(b"Content-Length", b"CONTENT-LENGTH").replace(b"Host", b"HOST"),
    "no host": HIT.replace(b"Host: h\r\n", b""),
    "two hosts": line(b"Host: other"),
    "host without a value": HIT.replace(b"Host: h", b"Host: "),
    "no blank behind the colon": HIT.replace(b"Host: h", b"Host:h"),
    "two blanks": HIT.replace(b"Host: h", b"Host:  h"),
    "a tab": HIT.replace(b"Host: h", b"Host:\th"),
    "a blank at the end": HIT.replace(b"Host: h", b"Host: h "),
    "a tab at the end": HIT.replace(b"Host: h", b"Host: h\t"),
    "a blank before the colon": HIT.replace(b"Host: h", b"Host : h"),
    "a blank before the name": HIT.replace(b"Host: h", b" Host: h"),
    "a folded line": HIT.replace(b"Host: h", b"Host: h\r\n folded"),
    "a folded length": HIT.replace(b"Content-Length: ", b"Content-Length:\r\n "),
    "bare LF everywhere": HIT.replace(b"\r\n", b"\n"),
    "bare LF once": HIT.replace(b"Host: h\r\n", b"Host: h\n"),
    "bare LF at the end": HIT.replace(b"\r\n\r\n", b"\n\n"),
    "bare CR once": HIT.replace(b"Host: h\r\n", b"Host: h\r"),
    "CR in a value": HIT.replace(b"Host: h", b"Host: h\rx"),
    "NUL in a value": HIT.replace(b"Host: h", b"Host: h\x00"),
    "NUL in a name": HIT.replace(b"Host: h", b"Ho\x00st: h"),
    "NUL in the path": first(b"POST /v1/chat/comp\x00letions HTTP/1.1"),
    "eight bits in a value": HIT.replace(b"Host: h", b"Host: h\xe9"),
    "eight bits in a name": HIT.replace(b"Host: h", b"H\xf6st: h"),
    "DEL in a value": HIT.replace(b"Host: h", b"Host: h\x7f"),
    "no name": line(b": x"),
    "no colon": line(b"nonsense"),
    "an unknown header": line(b"X-Forwarded-For: 1.2.3.4"),
    "a cookie": line(b"Cookie: a=b"),
    "a request id that may not stand in a line": line(b"X-Request-Id: a b"),
    "a request id that is too long": line(b"X-Request-Id: " + b"a" * 129),
    "two request ids": line(b"X-Request-Id: a\r\nX-Request-Id: b"),
    "no length": length(b"X: y"),
    "length 0": length(b"Content-Length: 0"),
    "one too short": length(b"Content-Length: %d" % (len(KNOWN) - 1)),
    "one too long": length(b"Content-Length: %d" % (len(KNOWN) + 1)),
    "length twice the same": length(b"Content-Length: %s\r\nContent-Length: %s" % (N, N)),
    "length twice, larger first": length(b"Content-Length: 999\r\nContent-Length: %s" % N),
    "length twice, smaller first": length(b"Content-Length: 3\r\nContent-Length: %s" % N),
    "length as a list": length(b"Content-Length: %s, %s" % (N, N)),
    "length with a sign": length(b"Content-Length: +%s" % N),
    "a negative length": length(b"Content-Length: -1"),
    "length in hexadecimal": length(b"Content-Length: 0x%x" % len(KNOWN)),
    "length with zeros": length(b"Content-Length: 00000%s" % N),
    "length with a blank": length(b"Content-Length: %s %s" % (N[:1], N[1:])),
    "length beyond 64 bits": length(b"Content-Length: 36893488147419103233"),
    "length in other digits": length("Content-Length: ١".encode()),
    "length with a decimal point": length(b"Content-Length: %s.0" % N),
    "length with underscores": length(b"Content-Length: 1_%s" % N[1:]),
    "chunked": length(b"Transfer-Encoding: chunked").replace(KNOWN, CHUNKS),
    "chunked and a length": length(b"Content-Length: %s\r\nTransfer-Encoding: chunked" % N).replace(KNOWN, CHUNKS),
    "a length and chunked": length(b"Transfer-Encoding: chunked\r\nContent-Length: %s" % N).replace(KNOWN, CHUNKS),
    "chunked by another name": length(b"Transfer-Encoding: xchunked\r\nContent-Length: %s" % N),
    "chunked with a tab": length(b"Transfer-Encoding:\tchunked").replace(KNOWN, CHUNKS),
    "chunked in capitals": length(b"TRANSFER-ENCODING: CHUNKED").replace(KNOWN, CHUNKS),
    "chunked before gzip": length(b"Transfer-Encoding: chunked, gzip").replace(KNOWN, CHUNKS),
    "chunked twice": length(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked").replace(KNOWN, CHUNKS),
    "identity": length(b"Transfer-Encoding: identity\r\nContent-Length: %s" % N),
    "chunks with trailers": length(b"Transfer-Encoding: chunked").replace(KNOWN, CHUNKS[:-2] + b"X: y\r\n\r\n"),
    "chunks with extensions": length(b"Transfer-Encoding: chunked").replace(KNOWN, EXTENDED_CHUNKS),
    "expecting": line(b"Expect: 100-continue"),
    "expecting something else": line(b"Expect: the-unexpected"),
    "closing": line(b"Connection: close"),
    "closing and keeping": line(b"Connection: close, keep-alive"),
    "two connections": line(b"Connection: keep-alive\r\nConnection: close"),
    "upgrading to WebSocket": line(b"Connection: Upgrade\r\nUpgrade: websocket"),
    "upgrading to HTTP/2": line(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x"),
    "upgrade without a connection": line(b"Upgrade: websocket"),
    "HTTP/1.0": first(b"POST /v1/chat/completions HTTP/1.0"),
    "HTTP/1.0 kept alive": first(b"POST /v1/chat/completions HTTP/1.0\r\nConnection: keep-alive"),
    "HTTP/1.2": first(b"POST /v1/chat/completions HTTP/1.2"),
    "HTTP/2.0": first(b"POST /v1/chat/completions HTTP/2.0"),
    "HTTP/11": first(b"POST /v1/chat/completions HTTP/11"),
    "http in lower case": first(b"POST /v1/chat/completions http/1.1"),
    "no version": first(b"POST /v1/chat/completions"),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "GET": first(b"GET /v1/chat/completions HTTP/1.1"),
    "PUT": first(b"PUT /v1/chat/completions HTTP/1.1"),
    "post in lower case": first(b"post /v1/chat/completions HTTP/1.1"),
    "HEAD": first(b"HEAD /v1/chat/completions HTTP/1.1"),
    "OPTIONS": first(b"OPTIONS /v1/chat/completions HTTP/1.1"),
    "CONNECT": b"CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n",
    "an unknown method": first(b"BREW /v1/chat/completions HTTP/1.1"),
    "two blanks in the first line": first(b"POST  /v1/chat/completions HTTP/1.1"),
    "a tab in the first line": first(b"POST\t/v1/chat/completions HTTP/1.1"),
    "a blank at its end": first(b"POST /v1/chat/completions HTTP/1.1 "),
    "a blank at its beginning": first(b" POST /v1/chat/completions HTTP/1.1"),
    "an absolute target": first(b"POST http://h/v1/chat/completions HTTP/1.1"),
    "a query": first(b"POST /v1/chat/completions?a=b HTTP/1.1"),
    "an empty query": first(b"POST /v1/chat/completions? HTTP/1.1"),
    "a fragment": first(b"POST /v1/chat/completions#a HTTP/1.1"),
    "a slash at the end": first(b"POST /v1/chat/completions/ HTTP/1.1"),
    "two slashes": first(b"POST //v1/chat/completions HTTP/1.1"),
    "two slashes within": first(b"POST /v1//chat/completions HTTP/1.1"),
    "dots": first(b"POST /v1/x/../chat/completions HTTP/1.1"),
    "an escaped letter": first(b"POST /v1/ch%61t/completions HTTP/1.1"),
    "another case": first(b"POST /v1/Chat/completions HTTP/1.1"),
    "another endpoint": first(b"POST /v1/completions HTTP/1.1"),
    "admin": first(b"POST /admin/purge HTTP/1.1"),
    "line ends before": b"\r\n\r\n" + HIT,
    "one LF before": b"\n" + HIT,
    "line ends behind": HIT + b"\r\n",
    "many line ends behind": HIT + b"\r\n" * 20,
    "a blank behind": HIT + b" ",
    "a head of 15 KB": line(b"User-Agent: " + b"u" * 15_000),
    "a head of 17 KB": line(b"User-Agent: " + b"u" * 17_000),
    "a head of 100 KB": line(b"User-Agent: " + b"u" * 100_000),
    "a head of 1 MB": line(b"User-Agent: " + b"u" * 1_000_000),
    "a thousand headers": line(b"\r\n".join(b"X-Stainless-%d: y" % i for i in range(1000))),
    "a header name of 10 KB": line(b"X-Stainless-" + b"a" * 10_000 + b": y"),
    "Content-Encoding identity": line(b"Content-Encoding: identity"),
    "Content-Encoding gzip of what is not": line(b"Content-Encoding: gzip"),
    "no-cache": line(b"Cache-Control: no-cache"),
    "only-if-cached": line(b"Cache-Control: only-if-cached"),
    "max-age=0": line(b"Cache-Control: max-age=0"),
    "a namespace": line(b"X-Warmgate-Namespace: n"),
    "a key in both headers": line(b"Authorization: Bearer a\r\nX-Api-Key: b"),
    "Basic credentials": line(b"Authorization: Basic YTpi"),
    "only a head, and the end": HIT[: -len(KNOWN)],
    "a NUL body": length(b"Content-Length: 4").replace(KNOWN, b"\0\0\0\0"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "nothing but a NUL": b"\x00",
    "nothing but CR": b"\r",
}  # fmt: skip
