"""A reader for GGUF files: metadata and tensors, nothing else.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The file is
untrusted: every length is checked against the bytes that are really there before anything is allocated, and any
contradiction is a `ModelError` that names the file.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import ModelError
from engine.model.quants import TYPES, Floats, TensorType

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4


class TensorInfo(NamedTuple):
    """Where one tensor lies. `shape` is row-major (numpy's order), the reverse of the file's."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int
    size: int


class GGUF:
    """An open GGUF file: `metadata`, `tensors`, and `read(name)` as float32. The file stays mapped, not copied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is empty"
            raise ModelError(f"cannot read the model file {path}: {reason}") from error
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._broken("it ends too early or is damaged") from error

    def read(self, name: str) -> Floats:
        """The tensor as float32 in its row-major shape. Raises `ModelError` if the file does not hold it."""
        info = self.tensors.get(name)
        if info is None:
            raise self._broken(f"tensor {name!r} is missing")
        raw = np.frombuffer(self._data, np.uint8, info.size, info.offset)
        return info.type.decode(raw.reshape(-1, info.type.size)).reshape(info.shape)

    def digest(self) -> str:
        """SHA-256 of the whole file: the identity of these weights in stored KV blocks."""
        return hashlib.sha256(self._data).hexdigest()

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is not a usable GGUF file: {reason}")

    def _parse(self) -> None:
        if self._take(4) != b"GGUF":
            raise self._broken("it does not start with the GGUF magic")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._broken(f"its version {version & 0xFFFFFFFF} is not 2 or 3")
        tensor_count, pair_count = self._count(24), self._count(13)
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        headers = [self._tensor_header() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._broken("its alignment is out of range")
        base = math.ceil(self._at / alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in headers:
            size = math.prod(shape) // kind.block * kind.size
            if base + offset + size > len(self._data):
                raise self._broken(f"tensor {name!r} reaches beyond the end of the file (is the download complete?)")
            self.tensors[name] = TensorInfo(shape, kind, base + offset, size)

    def _tensor_header(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string()
        rank = self._number("<I")
        if not 1 <= rank <= 4:
            raise self._broken(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        kind = TYPES.get(code := self._number("<I"))
        if kind is None:
            known = ", ".join(t.name for t in TYPES.values())
            raise self._broken(f"tensor {name!r} has type {code}; supported are {known}")
        if math.prod(shape) <= 0 or shape[-1] % kind.block:
            raise self._broken(f"tensor {name!r} has the impossible shape {shape}")
        return name, shape, kind, self._number("<Q")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self._broken(f"metadata holds the unknown type {kind}")
        item = self._number("<I")
        if item in _SCALARS:
            count = self._count(struct.calcsize(_SCALARS[item]))
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return [self._value(item, depth + 1) for _ in range(self._count(8))]

    def _count(self, least_size: int) -> int:
        """A number of things that take at least `least_size` bytes each: more than fit in the file is a lie."""
        count = self._number("<Q")
        if count * least_size > len(self._data) - self._at:
            raise self._broken("it announces more than it holds")
        return count

    def _string(self) -> str:
        return self._take(self._count(1)).decode("utf-8", "surrogateescape")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise self._broken("it ends too early")
        self._at += count
        return piece
