"""The stored form of a KV block: a versioned, tagged, checksummed envelope around an opaque payload. Never pickle.

    magic "WGKV" · version u16 · reserved u16 · header length u32 · payload length u64 · xxh3-128 of all else (16 bytes)
    header: tagged fields (`blocks.pack`): layout, tenant, index, parent, digest, token ids, digest of the extras
    payload: the block's keys and values, exactly as the engine laid them out

The reader knows every byte before the payload beforehand, since it knows which block it asked for. So `decode` compares
with what it wants instead of trusting what it is given: a record that is short, torn, flipped, of another version,
layout, tenant or block (a hash collision) is a `BadBlock`, never a wrong payload.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

from cache.prefix.blocks import Block, pack

MAGIC = b"WGKV"
VERSION = 1

_PREFIX = struct.Struct("<4sHHIQ")
_CHECKSUM_BYTES = 16

Buffer = bytes | bytearray | memoryview


class BadBlock(Exception):
    """A record is not what was asked for. `reason`: short, magic, version, checksum or foreign-<field>."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"bad KV block record: {reason}")
        self.reason = reason


def tenant_tag(salt: bytes) -> bytes:
    """16 bytes that stand for a tenant outside this process; the salt itself is never stored."""
    return hashlib.sha256(b"warmgate tenant tag 1\n" + salt).digest()[:16]


class Codec:
    """Writes and reads the records of one layout, each with a payload of `payload_bytes`."""

    def __init__(self, layout: bytes, payload_bytes: int) -> None:
        self.layout = layout
        self.payload_bytes = payload_bytes

    def record_bytes(self, block: Block, tenant: bytes) -> int:
        """Length of the block's record; the longest is that of any block but the first of a chain."""
        return _PREFIX.size + _CHECKSUM_BYTES + len(self._header(block, tenant)) + self.payload_bytes

    def allocate(self, block: Block, tenant: bytes) -> tuple[bytearray, memoryview]:
        """A record without checksum, unreadable until `seal`, and the view of its payload, to be filled first."""
        record = bytearray(self.record_bytes(block, tenant))
        return record, self.begin(memoryview(record), block, tenant)

    def begin(self, record: memoryview, block: Block, tenant: bytes) -> memoryview:
        """`allocate` in memory that is there already, exactly `record_bytes` long; returns the view of the payload."""
        header = self._header(block, tenant)
        start = _PREFIX.size + _CHECKSUM_BYTES
        _PREFIX.pack_into(record, 0, MAGIC, VERSION, 0, len(header), self.payload_bytes)
        record[_PREFIX.size : start] = bytes(_CHECKSUM_BYTES)
        record[start : start + len(header)] = header
        return record[start + len(header) :]

    def seal(self, record: bytearray | memoryview) -> None:
        """Writes the checksum; the payload must not change after it."""
        record[_PREFIX.size : _PREFIX.size + _CHECKSUM_BYTES] = _checksum(memoryview(record))

    def decode(self, record: Buffer, block: Block, tenant: bytes) -> memoryview:
        """The payload of a record that is proven to be `block` of `tenant` in this layout; else raises `BadBlock`."""
        fields = self._fields(block, tenant)
        header = pack((tag, value) for tag, _, value in fields)
        view = memoryview(record).cast("B")
        start = _PREFIX.size + _CHECKSUM_BYTES
        if len(view) < start:
            raise BadBlock("short")
        magic, version, _, header_bytes, payload_bytes = _PREFIX.unpack_from(view)
        if magic != MAGIC:
            raise BadBlock("magic")
        if version != VERSION:
            raise BadBlock("version")
        if len(view) != start + header_bytes + payload_bytes:
            raise BadBlock("short")
        if _checksum(view) != view[_PREFIX.size : start]:
            raise BadBlock("checksum")
        if view[start : start + header_bytes] != header:
            raise BadBlock(f"foreign-{_first_difference(view[start : start + header_bytes], fields)}")
        if payload_bytes != self.payload_bytes:
            raise BadBlock("foreign-size")
        return view[start + header_bytes :]

    def _header(self, block: Block, tenant: bytes) -> bytes:
        return pack((tag, value) for tag, _, value in self._fields(block, tenant))

    def _fields(self, block: Block, tenant: bytes) -> list[tuple[bytes, str, bytes]]:
        return [
            (b"l", "layout", self.layout),
            (b"t", "tenant", tenant_tag(tenant)),
            (b"i", "index", struct.pack("<I", block.index)),
            (b"p", "parent", block.parent or b""),
            (b"k", "tokens", block.tokens),
            (b"x", "extra", hashlib.sha256(block.extra).digest()),  # holds the salt, so only its digest is stored
            (b"d", "digest", block.digest),
        ]


def _checksum(record: memoryview) -> bytes:
    hasher = xxhash.xxh3_128(record[: _PREFIX.size])
    hasher.update(record[_PREFIX.size + _CHECKSUM_BYTES :])
    return hasher.digest()


def _first_difference(header: memoryview, fields: list[tuple[bytes, str, bytes]]) -> str:
    at = 0
    for tag, name, value in fields:
        packed = pack([(tag, value)])
        if header[at : at + len(packed)] != packed:
            return name
        at += len(packed)
    return "length"
