"""The compiled decode pass: exact where it says so, near torch's everywhere, and no row minds its company."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite.binding import get_host_cpu_features
from numba import njit

from engine.attention import Row
from engine.compiled.arrays import columns, stored
from engine.compiled.decoder import CompiledDecoder
from engine.compiled.jit import code_folder, compiled
from engine.compiled.lanes import get, put
from engine.compiled.passes import product
from engine.compiled.rows import exp, gate
from engine.core import Generation
from engine.decoding import TorchDecoder, quickest_decoder
from engine.errors import ModelError
from engine.kv.pool import KVPool
from engine.model.linear import PackedWeight
from engine.model.llama import Llama
from engine.model.spec import ModelSpec
from engine.sampling import SamplingParams
from tests.engine import tiny
from tests.engine.drive import run

DTYPES = [torch.float32, torch.bfloat16]
SPEC = ModelSpec(**{**vars(tiny.SPEC), "hidden": 64, "ffn": 128, "head_dim": 16})
SPECS = {
    "llama": SPEC,
    "biased": ModelSpec(**{**vars(SPEC), "qkv_bias": True, "tied": True}),
    "normed heads": ModelSpec(**{**vars(SPEC), "qk_norm": True, "heads": 8, "kv_heads": 2, "head_dim": 24}),
    "five share one": ModelSpec(**{**vars(SPEC), "heads": 5, "kv_heads": 1, "head_dim": 64}),
    "none share": ModelSpec(**{**vars(SPEC), "heads": 8, "kv_heads": 8, "head_dim": 8}),
    "wide": ModelSpec(**{**vars(SPEC), "hidden": 576, "ffn": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64}),
}
HERE = pytest.mark.skipif(
    not get_host_cpu_features().get("avx512bf16"), reason="where oneDNN packs weights otherwise, torch decodes"
)


@dataclass
class Blocks:
    """All that a decoder asks of a sequence."""

    blocks: list[int]


def weights(spec: ModelSpec) -> Callable[[str], torch.Tensor]:
    """Random ones, norms and biases too."""
    generator = torch.Generator().manual_seed(3)
    matrices = tiny.files(spec).tensor

    def tensor(name: str) -> torch.Tensor:
        if name.endswith(".bias"):
            heads = spec.heads if ".q." in name else spec.kv_heads
            return torch.randn(heads * spec.head_dim, generator=generator) / 4
        matrix = matrices(name)
        return matrix if matrix.dim() > 1 else 1 + torch.randn(matrix.shape, generator=generator) / 4

    return tensor


class Bench:
    """A random model with two pools that hold the same, and a decoder of either kind."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, int8: bool = False) -> None:
        self.model = Llama(spec, weights(spec), device=torch.device("cpu"), dtype=dtype, int8_decode=int8)
        pool, other = (KVPool(spec, 64, 16, device=torch.device("cpu"), dtype=dtype) for _ in range(2))
        compiled = CompiledDecoder.of(self.model, pool)
        assert compiled is not None
        self.compiled, self.plain = compiled, TorchDecoder(self.model, other)
        pool.memory.copy_(torch.randn(pool.memory.shape, generator=torch.Generator().manual_seed(5)))
        other.memory.copy_(pool.memory)
        self.pool, self.other = pool, other


def some_rows(seed: int, count: int, vocab: int = 258) -> list[Row]:
    """Rows of sequences in scattered blocks, some of them the draft of one sequence."""
    rng = random.Random(seed)
    free = rng.sample(range(64), 64)
    rows: list[Row] = []
    while len(rows) < count:
        length = rng.choice([1, 15, 16, 17, 40, 63])
        blocks = Blocks([free.pop() for _ in range(-(-(length + 3) // 16))])
        drafted = rng.choice([1, 1, 3])
        rows += [Row(blocks, length - 1 + at, rng.randrange(vocab)) for at in range(drafted)]
    return rows[:count]


@HERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_rows_have_the_same_bits_in_any_company_and_alone(spec: str, dtype: torch.dtype) -> None:
    bench = Bench(SPECS[spec], dtype)
    rows = some_rows(1, 12)
    before = bench.pool.memory.clone()
    (hidden, logits), after = bench.compiled.run(rows), bench.pool.memory.clone()
    assert not torch.equal(before, after)
    for size in (1, 2, 3, 4, 8):
        bench.pool.memory.copy_(before)
        for first in range(0, 12, size):
            part = slice(first, first + size)
            alone, said = bench.compiled.run(rows[part])
            assert torch.equal(alone, hidden[part])
            assert torch.equal(said, logits[part])
        assert torch.equal(bench.pool.memory, after)


@HERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_the_same_pass_in_torch_comes_to_the_same(spec: str, dtype: torch.dtype) -> None:
    bench = Bench(SPECS[spec], dtype)
    rows = some_rows(2, 10)
    ours, theirs = (decoder.run(rows)[1] for decoder in (bench.compiled, bench.plain))
    near = 3e-2 if dtype == torch.bfloat16 else 1e-5
    assert (ours - theirs).norm() < near * theirs.norm()
    assert (bench.pool.memory.double() - bench.other.memory.double()).norm() < near * bench.other.memory.double().norm()
    few, expected = (decoder.run(rows, layers=1)[0].double() for decoder in (bench.compiled, bench.plain))
    assert (few - expected).norm() < near * expected.norm()


@HERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_int8_comes_near_and_minds_no_company(spec: str, dtype: torch.dtype) -> None:
    bench = Bench(SPECS[spec], dtype, int8=True)
    rows = some_rows(4, 6)
    hidden, logits = bench.compiled.run(rows)
    exact, said = bench.plain.run(rows)
    assert (hidden.double() - exact.double()).norm() < 5e-2 * exact.double().norm()
    assert (logits - said).norm() < 5e-2 * said.norm()
    for row in range(6):
        alone, said = bench.compiled.run(rows[row : row + 1])
        assert torch.equal(alone[0], hidden[row])
        assert torch.equal(said[0], logits[row])


def test_int8_in_bfloat16_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.compiled.decoder.get_host_cpu_features", lambda: {"avx512bf16": False})
    cpu = torch.device("cpu")
    for dtype in DTYPES:
        for int8 in (False, True):
            model = Llama(SPEC, weights(SPEC), device=cpu, dtype=dtype, int8_decode=int8)
            pool = KVPool(SPEC, 4, 16, device=cpu, dtype=dtype)
            if dtype == torch.float32:
                assert isinstance(quickest_decoder(model, pool), CompiledDecoder) or not int8
            elif int8:
                with pytest.raises(ModelError, match="AVX512_BF16"):
                    quickest_decoder(model, pool)
            else:
                assert isinstance(quickest_decoder(model, pool), TorchDecoder)


def test_a_token_that_is_none_is_refused() -> None:
    bench = Bench(SPEC, torch.float32, int8=True)
    for token in (-1, 258):
        with pytest.raises(IndexError, match=f"no token {token}"):
            bench.compiled.run([Row(Blocks([0]), 0, token)])


def test_a_position_beyond_the_context_is_refused() -> None:
    bench = Bench(SPEC, torch.float32, int8=True)
    for position in (-1, SPEC.context):
        with pytest.raises(IndexError, match=f"no position {position}"):
            bench.compiled.run([Row(Blocks([0] * 20), position, 0)])


def test_a_context_shorter_than_what_is_tried_at_start_is_enough() -> None:
    spec = ModelSpec(**{**vars(tiny.SPEC), "context": 16})
    core = tiny.core(model=tiny.files(spec), make_decoder=quickest_decoder)
    got = run(core, Generation("a", [1, 2, 3], 13, SamplingParams(temperature=0), ignore_eos=True))
    assert len(got.tokens) == 13


@HERE
def test_bfloat16_is_nearer_to_float32_than_torchs() -> None:
    """Between the layers it keeps float32."""
    spec = ModelSpec(**{**vars(SPEC), "layers": 12})
    rows = some_rows(3, 12)
    exact, rounded = Bench(spec, torch.float32), Bench(spec, torch.bfloat16)
    exact.pool.memory.copy_(rounded.pool.memory)
    truth = exact.compiled.run(rows)[1]
    ours, theirs = ((decoder.run(rows)[1] - truth).norm() for decoder in (rounded.compiled, rounded.plain))
    assert ours < theirs


@HERE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "into"), [(960, 576), (576, 1536), (100, 64), (258, 128)])
def test_packed_weights_lie_in_tiles_and_products_with_them_are_right(dtype: torch.dtype, out: int, into: int) -> None:
    generator = torch.Generator().manual_seed(out)
    weight = (torch.randn(out, into, generator=generator) / into**0.5).to(dtype)
    packed = PackedWeight(weight)
    assert packed.tiles
    x, width = torch.randn(8, into, generator=generator).to(dtype), -(-out // 64) * 64
    for rows in range(1, 9):
        sums = np.full((8, width), np.nan, np.float32)
        product(stored(weight[:0]), packed.tiles, columns(x)[:rows], sums[: -(-rows // 4) * 4])
        got = torch.from_numpy(sums[:rows])
        assert (got[:, :out].double() - x[:rows].double() @ weight.double().T).abs().max() < 1e-5
        assert not got[:, out:].any()


def test_what_is_packed_otherwise_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PackedWeight(torch.randn(100, 52)).tiles == 0  # oneDNN pads its inputs
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: reorder(weight.flip(0), rows))
    model = Llama(tiny.SPEC, weights(tiny.SPEC), device=torch.device("cpu"), dtype=torch.float32)
    pool = KVPool(tiny.SPEC, 4, 16, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(quickest_decoder(model, pool), TorchDecoder)


@njit
def round_trip(values: Any, kept: Any, back: Any) -> None:
    for i in range(len(values)):
        put(kept, i, values[i])
        back[i] = get(kept, i)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (np.arange(1, 2000, dtype=np.uint32) << np.uint32(20)) | np.uint32(0x8000)
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45], np.float32)
    values = np.concatenate([bits.view(np.float32), ties.view(np.float32), odd])
    kept, back = np.zeros(len(values), np.uint16), np.zeros(len(values), np.float32)
    round_trip(values, kept, back)
    expected = torch.from_numpy(values).to(torch.bfloat16).float()
    assert torch.equal(torch.from_numpy(back).nan_to_num(7), expected.nan_to_num(7))
    assert np.array_equal(np.isnan(back), np.isnan(values))


@njit
def exps(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = exp(values[i])


def test_exp_is_exact_to_two_units() -> None:
    values = np.linspace(-87, 88, 1_000_000).astype(np.float32)
    out, far = np.empty_like(values), np.empty(2, np.float32)
    exps(values, out)
    expected = np.exp(values.astype(np.float64))
    assert (np.abs(out - expected) / np.spacing(expected.astype(np.float32))).max() < 2
    exps(np.array([-np.inf, -1000], np.float32), far)
    assert (far < 2e-38).all()
    large = np.array([88.8, 89, 90, 100, 200, 1e4, 1e9, np.inf], np.float32)
    exps(large, out)
    assert np.isinf(out[: len(large)]).all()
    assert (out[: len(large)] > 0).all()


def test_gates_far_below_zero_are_closed() -> None:
    gates = np.array([-1e9, -300, -100, -90, -89, -88, 5, 100], np.float32)
    out = np.empty_like(gates)
    gate(np.concatenate([gates, np.ones_like(gates)]), out)
    expected = torch.nn.functional.silu(torch.from_numpy(gates)).numpy()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-30)


def test_machine_code_is_kept_for_just_the_sources_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba alone would go on with what a function was compiled with from another file that has changed."""
    sources, home = tmp_path / "sources", tmp_path / "home"
    for folder in (sources, home):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (sources / "caller.py").write_text("one")
    (sources / "called.py").write_text("two")
    first = code_folder(sources)
    assert first is not None and first.parent == sources / "__pycache__"
    (sources / "called.py").write_text("three")
    assert code_folder(sources) not in (None, first)
    (sources / "called.py").write_text("two")
    assert code_folder(sources) == first
    shutil.rmtree(sources / "__pycache__")
    (sources / "__pycache__").write_text("cannot be a folder")
    other = code_folder(sources)
    assert other is not None and other.is_relative_to(home) and other.name == first.name
    shutil.rmtree(home)
    home.write_text("nor this")
    assert code_folder(sources) is None


def doubled(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_damaged_machine_code_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr("engine.compiled.jit._FOLDER", tmp_path)
    assert compiled(doubled)(2) == 4
    [file] = tmp_path.rglob(f"*{suffix}")
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[: whole // 2 if suffix == ".nbc" else 0])
    assert compiled(doubled)(2) == 4
    assert abs(file.stat().st_size - whole) < 100
    again = compiled(doubled)
    assert again(2) == 4
    assert again.stats.cache_hits


def test_machine_code_that_cannot_be_kept_is_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.compiled.jit._FOLDER", tmp_path)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert compiled(doubled)(2) == 4


def test_without_a_home_code_is_kept_beside_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert code_folder(tmp_path) is not None
    (tmp_path / "__pycache__").rename(tmp_path / "moved")
    (tmp_path / "__pycache__").write_text("cannot be a folder")
    assert code_folder(tmp_path) is None
