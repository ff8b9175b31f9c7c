"""Content codings (RFC 9110, 8.4.1): gzip, deflate, br, zstd and identity, decoded in bounded steps.

A few hundred compressed bytes can hold gigabytes. Every decoder therefore produces its output in small pieces and
counts them against a limit, so that memory never grows past the limit by more than one piece.
"""

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE = 64 * 1024  # bytes of output asked of a decompressor at a time
ZSTD_WINDOW_LOG = 23  # 8 MiB, the largest window that HTTP allows (RFC 9659)
SUPPORTED = (b"gzip", b"deflate", b"br", b"zstd")


class EncodingError(Exception):
    """The body cannot be decoded: corrupt, or cut short."""


class TooLarge(EncodingError):
    """The decoded body would be larger than the limit."""


class UnknownCoding(EncodingError):
    """The content coding is none of those supported here."""


class Decoder(Protocol):
    """Decodes one body, piece by piece."""

    def feed(self, data: bytes) -> bytes:
        """Decode the next bytes of the body. Raises EncodingError if they are corrupt, TooLarge past the limit."""
        ...

    def finish(self) -> bytes:
        """What is left after the last byte. Raises EncodingError if the body was cut short."""
        ...


def decoder(coding: bytes, limit: int | None = None) -> Decoder:
    """A decoder for one Content-Encoding value; `limit` bounds the decoded bytes in all. Raises UnknownCoding."""
    try:
        return _DECODERS[coding.strip().lower()](limit)
    except KeyError:
        raise UnknownCoding(f"content coding {coding.decode('latin-1')!r} is not supported") from None


def decode_body(body: bytes, coding: bytes, limit: int) -> bytes:
    """Decode a whole body. Raises UnknownCoding, TooLarge (before memory grows past the limit) or EncodingError."""
    stream = decoder(coding, limit)
    return stream.feed(body) + stream.finish()


class _Identity:
    def __init__(self, limit: int | None) -> None:
        self._room = sys.maxsize if limit is None else limit

    def feed(self, data: bytes) -> bytes:
        self._room -= len(data)
        if self._room < 0:
            raise TooLarge("the body is larger than the limit")
        return data

    def finish(self) -> bytes:
        return b""


class _Bounded(ABC):
    """What the decompressors share: the count of output bytes, and the end."""

    def __init__(self, limit: int | None) -> None:
        self._room = sys.maxsize if limit is None else limit

    def feed(self, data: bytes) -> bytes:
        pieces = []
        try:
            for piece in self._pieces(data):
                self._room -= len(piece)
                if self._room < 0:
                    raise TooLarge("the decoded body is larger than the limit")
                pieces.append(piece)
        except (zlib.error, brotli.error, zstd.ZstdError) as error:
            raise EncodingError("the body does not follow its content coding") from error
        return b"".join(pieces)

    def finish(self) -> bytes:
        if not self._ended():
            raise EncodingError("the encoded body was cut short")
        return b""

    @abstractmethod
    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """The output for the next bytes of input, at most about PIECE bytes at a time."""

    @abstractmethod
    def _ended(self) -> bool:
        """Whether the input so far is a whole encoded body."""


class _Gzip(_Bounded):
    """One or more gzip members in a row (RFC 1952)."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            yield from _inflate(self._member, data)
            data = self._member.unused_data

    def _ended(self) -> bool:
        return self._member.eof


class _Deflate(_Bounded):
    """zlib format as the RFC says, or the bare deflate stream that some servers send under the same name."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._head = b""
        self._stream = None

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        if self._stream is None:
            data = self._head = self._head + data
            if len(data) < 2:
                return
            wrapped = data[0] & 0x0F == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
        yield from _inflate(self._stream, data)
        if self._stream.unused_data:
            raise EncodingError("bytes after the end of the encoded body")

    def _ended(self) -> bool:
        return self._stream is not None and self._stream.eof


class _Brotli(_Bounded):
    """RFC 7932."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._stream = brotli.Decompressor()

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        piece = self._stream.process(data, output_buffer_limit=PIECE)
        while piece:
            yield piece
            if len(piece) < PIECE or self._stream.is_finished():
                return
            piece = self._stream.process(b"", output_buffer_limit=PIECE)

    def _ended(self) -> bool:
        return self._stream.is_finished()


class _Zstd(_Bounded):
    """One or more frames in a row (RFC 8878)."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._frame = _zstd_frame()

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._frame.eof:
                self._frame = _zstd_frame()
            yield self._frame.decompress(data, PIECE)
            while not self._frame.eof and not self._frame.needs_input:
                yield self._frame.decompress(b"", PIECE)
            data = self._frame.unused_data if self._frame.eof else b""

    def _ended(self) -> bool:
        return self._frame.eof


def _inflate(stream: "zlib._Decompress", data: bytes) -> Iterator[bytes]:
    while not stream.eof:
        piece = stream.decompress(data, PIECE)
        data = stream.unconsumed_tail
        yield piece
        if not data and len(piece) < PIECE:  # a full piece may have more behind it even when all input is taken
            return


def _zstd_frame() -> "zstd.ZstdDecompressor":
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


_DECODERS = {
    b"": _Identity,
    b"identity": _Identity,
    b"gzip": _Gzip,
    b"x-gzip": _Gzip,
    b"deflate": _Deflate,
    b"br": _Brotli,
    b"zstd": _Zstd,
}
