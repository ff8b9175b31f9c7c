"""The GGUF reader: every type against the reference decoder, and files that lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.model.gguf import GGUF
from engine.model.quants import TYPES
from engine.model.weights import locate, open_model

gguf = pytest.importorskip("gguf")


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(*, version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def opened(tmp_path: Path, raw: bytes) -> GGUF:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return GGUF(path)


@pytest.mark.parametrize("code", sorted(TYPES))
def test_every_type_decodes_as_the_reference_does(code: int) -> None:
    kind = TYPES[code]
    rng = np.random.default_rng(code)
    raw = rng.integers(0, 256, (7, kind.size), dtype=np.uint8)
    if kind.name in ("F32", "F16", "BF16"):
        raw = np.frombuffer(rng.normal(size=7).astype("<f4" if kind.size == 4 else "<f2").tobytes(), np.uint8)
        raw = raw.reshape(7, kind.size)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(code)).reshape(7, kind.block)
        np.testing.assert_array_equal(kind.decode(raw.copy()), expected)


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    metadata: dict[str, Any] = {"a": "ü", "b": [1, 2, 3], "c": ["x", "y"], "d": True, "e": 0.5}
    writer.add_string("a", "ü")
    writer.add_array("b", [1, 2, 3])
    writer.add_array("c", ["x", "y"])
    writer.add_bool("d", True)
    writer.add_float32("e", 0.5)
    writer.add_tensor("t", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUF(path)
    assert {key: file.metadata[key] for key in metadata} == metadata
    np.testing.assert_array_equal(file.read("t"), values)
    with pytest.raises(ModelError, match="missing"):
        file.read("u")


HOSTILE = {
    "empty": b"",
    "wrong magic": b"GGML" + bytes(100),
    "only a magic": b"GGUF",
    "old version": header(version=1),
    "big endian": header(version=3 << 24),
    "too many pairs": header(pairs=1 << 60),
    "too many tensors": header(tensors=1 << 62),
    "endless key": header(pairs=1) + struct.pack("<Q", 1 << 62) + bytes(20),
    "endless array": header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 61),
    "endless array of strings": header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 61),
    "nested arrays": header(pairs=1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100,
    "unknown type": header(pairs=1) + text("k") + struct.pack("<I", 77) + bytes(13),
    "no dimensions": header(tensors=1) + tensor("t", (), 0, 0) + bytes(64),
    "nine dimensions": header(tensors=1) + tensor("t", (1,) * 9, 0, 0) + bytes(64),
    "zero dimension": header(tensors=1) + tensor("t", (0, 4), 0, 0) + bytes(64),
    "overflowing shape": header(tensors=1) + tensor("t", (1 << 32, 1 << 32), 0, 0) + bytes(64),
    "far offset": header(tensors=1) + tensor("t", (4,), 0, 1 << 63) + bytes(64),
    "unknown quantisation": header(tensors=1) + tensor("t", (32,), 99, 0) + bytes(64),
    "row no multiple of the block": header(tensors=1) + tensor("t", (33,), 2, 0) + bytes(64),
    "zero alignment": header(pairs=1) + text("general.alignment") + struct.pack("<II", 4, 0),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_lying_file_is_one_clear_error(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf"):
        opened(tmp_path, raw)


def test_a_truncated_model_is_one_clear_error_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = locate("smollm2-135m-instruct").read_bytes()
    for length in (4, 24, 1000, 100_000, 1_500_000, len(whole) // 2, len(whole) - 1):
        with pytest.raises(ModelError):
            opened(tmp_path, whole[:length])


def test_flipped_header_bytes_never_crash(tmp_path: Path) -> None:
    whole = bytearray(locate("smollm2-135m-instruct").read_bytes()[:3_000_000])
    rng = np.random.default_rng(0)
    for at in rng.integers(4, 2000, 60):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ModelError):  # at the least, the file is cut off
            opened(tmp_path, bytes(damaged))


def test_a_model_that_is_not_there_says_what_there_is() -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct"):
        open_model("no-such-model")


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(pairs=1) + text("general.architecture") + struct.pack("<I", 8) + text("mamba"))
    with pytest.raises(ModelError, match="mamba"):
        open_model(str(path))
