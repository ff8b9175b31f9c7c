"""Content codings decode exactly, in pieces of any size, never past the limit, and say when data is cut or corrupt."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest

from gateway.encoding import SUPPORTED, EncodingError, TooLarge, UnknownCoding, decode_body, decoder, zstd

TEXT = "Nothing is computed twice. 你好🙂\n".encode() * 500
BOMB = bytes(64 * 1024 * 1024)


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


ENCODERS: list[tuple[bytes, Callable[[bytes], bytes]]] = [
    (b"gzip", gzip.compress),
    (b"x-gzip", gzip.compress),
    (b"deflate", zlib.compress),
    (b"deflate", raw_deflate),
    (b"br", lambda data: brotli.compress(data, quality=4)),
    (b"zstd", zstd.compress),
]
every_coding = pytest.mark.parametrize(("coding", "encode"), ENCODERS, ids=["gz", "x-gz", "zlib", "raw", "br", "zstd"])


@every_coding
def test_whole_body_is_decoded(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    assert decode_body(encode(TEXT), coding, len(TEXT)) == TEXT
    assert decode_body(encode(b""), coding, 0) == b""


@every_coding
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_pieces_of_any_size_give_the_same_text(coding: bytes, encode: Callable[[bytes], bytes], size: int) -> None:
    body, stream = encode(TEXT), decoder(coding)
    pieces = [stream.feed(body[i : i + size]) for i in range(0, len(body), size)]
    assert b"".join(pieces) + stream.finish() == TEXT


@every_coding
def test_output_larger_than_one_piece_is_complete(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    text = bytes(range(256)) * 4096
    assert decode_body(encode(text), coding, len(text)) == text


@every_coding
def test_a_cut_body_is_refused_wherever_it_is_cut(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    body = encode(b"one two three " * 20)
    for end in range(len(body)):
        with pytest.raises(EncodingError):
            decode_body(body[:end], coding, 10_000)


@every_coding
def test_bytes_after_the_end_are_refused(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    with pytest.raises(EncodingError):
        decode_body(encode(TEXT) + b"trailing garbage", coding, len(TEXT))


@every_coding
def test_one_byte_over_the_limit_is_too_large(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    with pytest.raises(TooLarge):
        decode_body(encode(TEXT), coding, len(TEXT) - 1)


@every_coding
def test_a_bomb_is_refused_before_memory_grows(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    body, limit = encode(BOMB), 1024 * 1024
    assert len(body) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decode_body(body, coding, limit)
        assert tracemalloc.get_traced_memory()[1] < 4 * limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("coding", "encode"), [(b"gzip", gzip.compress), (b"zstd", zstd.compress)])
def test_members_in_a_row_are_one_body(coding: bytes, encode: Callable[[bytes], bytes]) -> None:
    assert decode_body(encode(b"one ") + encode(b"two"), coding, 100) == b"one two"


@pytest.mark.parametrize("coding", [c for c in SUPPORTED if c != b"deflate"])
def test_garbage_is_refused(coding: bytes) -> None:
    with pytest.raises(EncodingError):
        decode_body(b"\xff{}" * 50, coding, 10_000)


def test_a_zstd_window_over_eight_megabytes_is_refused() -> None:
    wide = {int(zstd.CompressionParameter.window_log): 25, int(zstd.CompressionParameter.content_size_flag): 0}
    compressor = zstd.ZstdCompressor(options=wide)
    body = compressor.compress(b"x" * 1000) + compressor.flush()
    with pytest.raises(EncodingError):
        decode_body(body, b"zstd", 10_000)


@pytest.mark.parametrize("coding", [b"", b"identity", b" Identity "])
def test_identity_passes_bytes_on_up_to_the_limit(coding: bytes) -> None:
    assert decode_body(b"abc", coding, 3) == b"abc"
    with pytest.raises(TooLarge):
        decode_body(b"abcd", coding, 3)


def test_coding_names_are_case_insensitive() -> None:
    assert decode_body(gzip.compress(b"abc"), b" GZip ", 3) == b"abc"


@pytest.mark.parametrize("coding", [b"compress", b"gzip, br", b"gzip\xff"])
def test_unknown_codings_are_named(coding: bytes) -> None:
    with pytest.raises(UnknownCoding):
        decoder(coding)
