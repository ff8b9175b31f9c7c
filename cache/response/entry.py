"""An entry: a stored answer with its proof, and its binary form.

Layout, little-endian: ``b"WGE"``, format version (1 byte), xxh3-128 of all that follows (16 bytes), then fingerprint
(32), born, expires, kept_until (3 × float64, unix seconds), length of the head (uint32), head (JSON), message (the
rest). Never pickle: what comes back from a store is read as plain bytes and believed only when version, checksum and
fingerprint agree.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import orjson
from xxhash import xxh3_128_digest

FORMAT = 1
_MAGIC = b"WGE" + bytes([FORMAT])
_FIXED = struct.Struct("<32sdddI")
_START = len(_MAGIC) + 16


class BadEntry(ValueError):
    """The stored bytes are not a whole entry of this format for this request; the message names the reason in a word
    or two.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer and how long it lives.

    ``born`` is when its upstream call began, so that a purge during the call covers it. It is fresh until ``expires``
    and may serve as a stale answer until ``kept_until`` (all unix seconds). ``generations`` holds each purge scope of
    the entry with its generation at birth; the entry lives only as long as they are current. ``message`` is the answer
    in the dialect's plain form.
    """

    fingerprint: bytes
    born: float
    expires: float
    kept_until: float
    dialect: str
    model: str
    upstream: str
    generations: dict[str, int]
    message: bytes
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes it is counted as against the memory bound: the message and a flat share for the objects around it."""
        return len(self.message) + 1024


def encode(entry: Entry) -> bytes:
    """The binary form."""
    head: dict[str, Any] = {
        "dialect": entry.dialect,
        "model": entry.model,
        "upstream": entry.upstream,
        "generations": entry.generations,
        "usage": entry.usage,
    }
    packed = orjson.dumps(head)
    fixed = _FIXED.pack(entry.fingerprint, entry.born, entry.expires, entry.kept_until, len(packed))
    rest = b"".join((fixed, packed, entry.message))
    return b"".join((_MAGIC, xxh3_128_digest(rest), rest))


def decode(data: bytes, fingerprint: bytes) -> Entry:
    """Reads the binary form; raises `BadEntry` unless it is whole and answers the request with this ``fingerprint``."""
    if data[:3] != _MAGIC[:3]:
        raise BadEntry("not an entry")
    if data[: len(_MAGIC)] != _MAGIC:
        raise BadEntry("other format version")
    rest = data[_START:]
    if len(rest) < _FIXED.size or data[len(_MAGIC) : _START] != xxh3_128_digest(rest):
        raise BadEntry("checksum")
    stored, born, expires, kept_until, length = _FIXED.unpack_from(rest)
    if stored != fingerprint:
        raise BadEntry("other request")
    end = _FIXED.size + length
    try:
        head = orjson.loads(rest[_FIXED.size : end])
        return Entry(
            fingerprint=stored,
            born=born,
            expires=expires,
            kept_until=kept_until,
            dialect=head["dialect"],
            model=head["model"],
            upstream=head["upstream"],
            generations=head["generations"],
            message=rest[end:],
            usage=head["usage"],
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise BadEntry("head") from None
