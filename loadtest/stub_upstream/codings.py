"""Content codings as a server applies them to a stream."""

import sys
import zlib
from collections.abc import Callable

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Compress = Callable[[bytes], bytes]
Flush = Callable[[], bytes]


def compressor(coding: str) -> tuple[Compress, Flush, Flush]:
    """Three functions: compress, flush (all so far can be decoded then), finish. Raises KeyError if unknown."""
    return {"gzip": _gzip, "deflate": _deflate, "br": _brotli, "zstd": _zstd}[coding]()


def _gzip() -> tuple[Compress, Flush, Flush]:
    stream = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return stream.compress, lambda: stream.flush(zlib.Z_SYNC_FLUSH), stream.flush


def _deflate() -> tuple[Compress, Flush, Flush]:
    stream = zlib.compressobj()
    return stream.compress, lambda: stream.flush(zlib.Z_SYNC_FLUSH), stream.flush


def _brotli() -> tuple[Compress, Flush, Flush]:
    stream = brotli.Compressor(quality=4)
    return stream.process, stream.flush, stream.finish


def _zstd() -> tuple[Compress, Flush, Flush]:
    stream = zstd.ZstdCompressor()
    return stream.compress, lambda: stream.flush(stream.FLUSH_BLOCK), stream.flush
