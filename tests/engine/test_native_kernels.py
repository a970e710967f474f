"""The C++ kernels: torch's answers, each row the same bits in any company, and torch alone where they can't be had."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint
from tests.engine.native import BUILDS, COMMON, has_pairs, kernels_or_skip
from tests.support.listed_plans import listed_plan
from tests.support.tile_chain import dense_product
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.torch_backend.torch_attention import NativeAttention, TorchAttention
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.rope import rotate
from twinpool.engine.native import compile_kernels, current_kernels
from twinpool.engine.native import compile_kernels as build
from twinpool.engine.native.native_kernels import NativeKernels, PackedWeight
from twinpool.engine.runner.kernel_choice import kernels_for_config
from twinpool.engine.runner.numerics_class import digest
from twinpool.engine.tensors.row_exact_linear import FAST, HeadLinear, Numerics, silu

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=BUILDS)
def build_level(request: pytest.FixtureRequest) -> str:
    """Each level that this machine runs, and the machine itself."""
    level: str = request.param
    return level


@pytest.fixture(scope="module")
def kernels(build_level: str) -> NativeKernels:
    return kernels_or_skip(build_level)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    """Within a unit in the last place of the dtype, of values around 1."""
    tolerance = 1e-5 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("n", "k"), [(96, 64), (1, 7), (33, 51), (200, 129)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_right_and_their_rows_exact(
    kernels: NativeKernels, dtype: torch.dtype, n: int, k: int, bias: bool
) -> None:
    x, weight = draw(1, 150, k, dtype=dtype), draw(2, n, k, dtype=dtype)
    bias_n = draw(3, n, dtype=dtype) if bias else None
    packed = PackedWeight(kernels, weight, bias_n)
    want = packed(x)
    exact = x.double() @ weight.double().T + (0 if bias_n is None else bias_n.double())
    torch.testing.assert_close(want.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for count in (*range(1, 31), 57, 150):
        for first in {0, (150 - count) // 2, 150 - count}:
            assert torch.equal(packed(x[first : first + count]), want[first : first + count]), (first, count)
    wide = draw(4, 150, 2 * k, dtype=dtype)
    wide[:, :k] = x
    assert torch.equal(packed(wide[:, :k]), want), "rows may lie apart"


def spread(seed: int, *shape: int, low: int, high: int) -> Tensor:
    """bfloat16 numbers of many sizes: times powers of two from 2**low to 2**high."""
    powers = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed + 1000))
    return (draw(seed, *shape) * torch.exp2(powers.double())).bfloat16()


@pytest.mark.parametrize(("n", "k"), [(96, 64), (1, 7), (33, 51), (70, 333)])
@pytest.mark.parametrize("sizes", [(0, 0), (-12, 12), (-70, -50), (-140, -40)], ids=str)
def test_products_of_bfloat16_have_the_bits_of_their_definition(
    kernels: NativeKernels, build_level: str, n: int, k: int, sizes: tuple[int, int]
) -> None:
    """On every processor the same; products that are denormal, and weights and inputs that are, count as zeros."""
    if has_pairs(build_level):
        pytest.skip("this build adds up as its processor's instruction for bfloat16 does")
    low, high = sizes
    x, weight = spread(1, 40, k, low=low, high=high), spread(2, n, k, low=low, high=min(high, 5))
    bias = draw(3, n)
    for bias_n in (None, bias):
        want = dense_product(x, weight, bias_n)
        assert torch.equal(PackedWeight(kernels, weight, bias_n)(x), want)


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 33, 48, 513, 1030])
def test_however_many_rows_and_outputs_there_are_every_path_has_the_bits_of_one_row(
    kernels: NativeKernels, rows: int
) -> None:
    """Rows are taken 8, 16, 32 or 512 at a time, outputs 32, 64 or 256, columns 128, 256 or 512."""
    x, weight = draw(1, rows, 1100).bfloat16(), draw(2, 300, 1100).bfloat16()
    packed = PackedWeight(kernels, weight, None)
    got = packed(x)
    for row in {0, 15 % rows, 16 % rows, rows - 1}:
        assert torch.equal(got[row : row + 1], packed(x[row : row + 1]))
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-3)


def test_what_is_no_number_stays_none_and_in_its_row(kernels: NativeKernels) -> None:
    x, weight = draw(1, 20, 64).bfloat16(), draw(2, 40, 64).bfloat16()
    packed = PackedWeight(kernels, weight, None)
    want = packed(x)
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    got = packed(x)
    assert got[3].isnan().all()
    assert (got[3].view(torch.int16) == 0x7FC0).all(), "the same bits on every processor"
    assert got[17].isinf().all()
    kept = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(got[kept], want[kept])


def test_denormal_numbers_are_taken_as_before_once_a_product_is_over(kernels: NativeKernels) -> None:
    PackedWeight(kernels, draw(2, 40, 64).bfloat16(), None)(draw(1, 20, 64).bfloat16())
    assert float(torch.tensor(2.0**-130) * 0.5) == 2.0**-131


def test_a_matrix_a_head_is_a_product_a_head(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, wide = draw(1, 3, 50, 70, dtype=dtype), draw(2, 19, 200, dtype=dtype)
    x = wide[:, 20:170]
    with current_kernels.using(kernels):
        linear = HeadLinear(weight)
    assert linear.row_exact
    got = linear(x)
    for head in range(3):
        alone = PackedWeight(kernels, weight[head].T, None)(x[:, 50 * head : 50 * head + 50])
        assert torch.equal(got[:, 70 * head : 70 * head + 70], alone)
    exact = torch.einsum("mhk,hkn->mhn", x.double().view(19, 3, 50), weight.double()).reshape(19, 210)
    torch.testing.assert_close(got.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert torch.equal(linear(x[7:8]), got[7:8])


def test_builds_for_other_instructions_with_one_order_have_the_same_bits(dtype: torch.dtype) -> None:
    """Products, attention, norms and activations of all levels that this machine runs."""
    found = []
    for level in COMMON:
        kernels = kernels_or_skip(level)
        x = draw(1, 37, 200, dtype=dtype)
        packed = PackedWeight(kernels, draw(2, 90, 200, dtype=dtype), draw(3, 90, dtype=dtype))
        norm = kernels.rms_norm(x, draw(4, 200, dtype=dtype), 1e-6)
        attention = attended(NativeAttention(FAST, kernels), [(0, 0, 200), (1, 60, 1)], dtype, 16)
        found.append([packed(x), packed(x[:1]), norm, kernels.silu_product(x), attention])
    for level, results in zip(COMMON[1:], found[1:], strict=True):
        for number, (one, other) in enumerate(zip(found[0], results, strict=True)):
            assert torch.equal(one, other), (level, number)


def test_threads_do_not_change_a_bit_of_a_product(kernels: NativeKernels) -> None:
    x, packed = draw(1, 40, 96), PackedWeight(kernels, draw(2, 300, 96), None)
    want = packed(x)
    torch.set_num_threads(2)
    with current_kernels.using(kernels):
        assert torch.equal(packed(x), want)


def test_the_kernels_take_torchs_number_of_threads_on_each_thread_that_uses_them(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(kernels, "_set_threads", told.append)

    def use(count: int) -> None:
        torch.set_num_threads(count)
        with current_kernels.using(kernels):
            assert current_kernels.in_use()
        assert not current_kernels.in_use()

    def use_some() -> None:
        for count in (3, 3, 1):
            use(count)

    for _ in range(2):
        thread = threading.Thread(target=use_some)
        thread.start()
        thread.join(timeout=60)
    assert told == [3, 1] * 2


@pytest.mark.parametrize("width", [18, 51, 64, 1000])
def test_norms_are_torchs_and_their_rows_exact(kernels: NativeKernels, dtype: torch.dtype, width: int) -> None:
    x, weight = draw(1, 37, width, dtype=dtype), draw(2, width, dtype=dtype)
    want = kernels.rms_norm(x, weight, 1e-6)
    close(want, rms_norm(x, weight, 1e-6))
    for count in (1, 2, 13):
        assert torch.equal(kernels.rms_norm(x[5 : 5 + count].clone(), weight, 1e-6), want[5 : 5 + count])
    by_head = draw(3, 11, 3, width, dtype=dtype)
    weights = draw(4, 3, width, dtype=dtype)
    close(kernels.rms_norm(by_head, weights, 1e-6), rms_norm(by_head, weights, 1e-6))


def test_the_activation_is_torchs_whatever_its_argument(kernels: NativeKernels, dtype: torch.dtype) -> None:
    gate = torch.cat((torch.tensor([0.0, -0.0, 1e4, -1e4, 87.0, -87.0, 90.0, -90.0, 1e-8]), 5 * draw(1, 60))).to(dtype)
    up = draw(2, len(gate), dtype=dtype)
    both = torch.cat((gate, up))[None].repeat(9, 1)
    got = kernels.silu_product(both)
    close(got[0], silu(gate.float()).to(dtype) * up)
    assert torch.equal(got, got[:1].expand(9, -1))
    assert kernels.silu_product(torch.full((1, 40), torch.nan, dtype=dtype)).isnan().all()


@pytest.mark.parametrize(("dim", "turning"), [(18, 18), (64, 64), (64, 32), (40, 6)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_rotated_and_stored_as_torch_does_it(
    kernels: NativeKernels, dtype: torch.dtype, dim: int, turning: int, normed: bool
) -> None:
    heads, kv_heads, tokens = 4, 2, 7
    qkv = draw(1, tokens + 2, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = 3 * draw(2, tokens + 2, 1, turning // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    norm_nd = draw(3, heads + kv_heads, dim, dtype=dtype) if normed else None
    slots_t = torch.tensor([9, 17, 3, 0, 30, 31, 12])
    muted_t = slots_t == 0
    k_pages, v_pages = (torch.full((4, 8, kv_heads, dim), 7.0, dtype=dtype) for _ in "kv")
    q_thd = kernels.rope_and_store(qkv, norm_nd, 1e-6, cos, sin, k_pages, v_pages, slots_t, muted_t, heads)

    every = qkv[:tokens].view(tokens, -1, dim)
    qk, v = torch.split(every, [heads + kv_heads, kv_heads], dim=1)
    qk = qk if norm_nd is None else rms_norm(qk, norm_nd, 1e-6)
    qk = torch.cat((rotate(qk[..., :turning], cos[:tokens], sin[:tokens]), qk[..., turning:]), -1)
    close(q_thd, qk[:, :heads])
    want_k, want_v = (torch.full((32, kv_heads, dim), 7.0, dtype=dtype) for _ in "kv")
    want_k[slots_t], want_v[slots_t] = (x.masked_fill(muted_t.view(-1, 1, 1), 0) for x in (qk[:, heads:], v))
    close(k_pages.view(32, kv_heads, dim), want_k)
    assert torch.equal(v_pages.view(32, kv_heads, dim), want_v)


def attended(
    attention: TorchAttention, rows: list[tuple[int, int, int]], dtype: torch.dtype, page_tokens: int
) -> Tensor:
    """Rows of (sequence, start, count) with 6 heads of 40 on 2; the pages of nobody are NaN."""
    lengths = [start + count for _, start, count in rows]
    used = [-(-length // page_tokens) for length in lengths]
    free = torch.randperm(sum(used), generator=torch.Generator().manual_seed(1)).add(1).tolist()
    tables = [[free.pop() for _ in range(count)] for count in used]
    k_pages, v_pages = (torch.full((sum(used) + 1, page_tokens, 2, 40), torch.nan, dtype=dtype) for _ in "kv")
    k_pages[0], v_pages[0] = 0, 0
    for (sequence, _, _), length, table in zip(rows, lengths, tables, strict=True):
        for seed, pages in ((10, k_pages), (20, v_pages)):
            state = draw(seed + sequence, 400, 2, 40, dtype=dtype)
            for number, page in enumerate(table):
                part = state[number * page_tokens : min(length, (number + 1) * page_tokens)]
                pages[page, : len(part)] = part
    starts, counts = [start for _, start, _ in rows], [count for *_, count in rows]
    plan = listed_plan(starts, counts, tables, page_tokens, CPU)
    queries = [draw(30 + sequence, 400, 6, 40, dtype=dtype)[start : start + count] for sequence, start, count in rows]
    return attention.attend(torch.cat(queries), k_pages, v_pages, plan, ScoreOptions(0.3))


def test_attention_is_the_twins_and_the_same_bits_in_any_company(kernels: NativeKernels, dtype: torch.dtype) -> None:
    attention = NativeAttention(FAST, kernels)
    want = attended(attention, [(0, 0, 400)], dtype, 16)
    twin = attended(TorchAttention(Numerics(16)), [(0, 0, 400)], dtype, 16)
    torch.testing.assert_close(want.float(), twin.float(), rtol=0, atol=1e-5 if dtype == torch.float32 else 2**-6)
    for page_tokens, cuts in ((1, (0, 17, 400)), (64, (0, 64, 65, 257, 400)), (16, (0, 127, 391, 399, 400))):
        for first, end in pairwise(cuts):
            got = attended(attention, [(2, 5, 9), (0, first, end - first), (1, 300, 1)], dtype, page_tokens)
            assert torch.equal(got[9:-1], want[first:end]), (page_tokens, first, end)
    torch.set_num_threads(2)
    with current_kernels.using(kernels):
        assert torch.equal(attended(attention, [(1, 100, 200), (0, 0, 400)], dtype, 16)[200:], want)


def test_without_a_compiler_torch_computes_alone_and_says_so_once(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    build.load_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            bench = Bench(checkpoint("llama"))
        with pytest.raises(ConfigError, match=r"no C\+\+ compiler was found.*engine\.attention=torch"):
            kernels_for_config(EngineConfig(attention="native"), CPU)
    finally:
        build.load_library.cache_clear()
    assert sum("torch alone" in record.message for record in caplog.records) == 1
    assert type(bench.engine.attention) is TorchAttention
    assert bench.engine.decoder.head is not None
    assert not bench.engine.decoder.head.row_exact
    assert len(bench.generate([1, 2, 3], 2)) == 2


def test_processes_that_start_together_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Path(kernels_or_skip_path())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "twinpool").mkdir(mode=0o700)
    path = tmp_path / "twinpool" / made.name
    compiled: list[Path] = []

    def compile_it(compiler: build.Compiler, level: str, at: Path) -> None:
        compiled.append(at)
        at.write_bytes(made.read_bytes())

    other = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        """Another process is about to have it."""
        waits.append(seconds)
        if len(waits) == 3:
            path.write_bytes(made.read_bytes())

    monkeypatch.setattr(build, "_compile", compile_it)
    monkeypatch.setattr(build, "sleep", wait)
    load = build.load_library.__wrapped__
    assert Path(load()._name) == path
    assert (len(waits), compiled) == (3, []), "the one that held the lock compiled it"
    path.unlink()
    os.close(other)
    load()
    assert (len(waits), compiled) == (3, [path]), "nobody compiles it, so this process does"


def kernels_or_skip_path() -> str:
    kernels_or_skip()
    return str(build.load_library()._name)


def test_kernels_that_do_not_compile_are_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernels.cpp:1: error: no" >&2\nexit 1\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load_library.cache_clear()
    try:
        with pytest.raises(compile_kernels.NativeUnavailable, match=r"failed: kernels\.cpp:1: error: no$"):
            current_kernels.available()
    finally:
        build.load_library.cache_clear()
    assert not list((tmp_path / "twinpool").iterdir()), "nothing half made is left"


def test_a_cache_folder_that_others_can_write_to_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared, own = tmp_path / "twinpool", tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o777)
    own.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(own))
    assert build._cache_folder() == own / f"twinpool-{os.getuid()}"


def test_layers_are_told_of_kernels_only_within_using(kernels: NativeKernels) -> None:
    x = torch.ones(2, 2)
    assert current_kernels.kernels_for(x) is None
    with current_kernels.using(kernels):
        assert current_kernels.kernels_for(x) is kernels
        assert current_kernels.kernels_for(x.half()) is None
        with current_kernels.using(None):
            assert not current_kernels.in_use()
        assert current_kernels.in_use()
    assert not current_kernels.in_use()


@pytest.fixture
def no_compiler_but_zig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without g++, on which twinpool[kernels] is installed, and nothing was ever compiled."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("the package ziglang is not installed")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler_but_zig")
@pytest.mark.parametrize("level", BUILDS)
def test_without_a_system_compiler_zig_makes_the_kernels_with_the_same_bits(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.find_compiler()
    assert compiler.zig
    zigs = NativeKernels(build.load_library.__wrapped__(level))
    monkeypatch.undo()
    ours = kernels_or_skip(level)
    for dtype in (torch.float32, torch.bfloat16):
        assert digest(zigs, dtype) == digest(ours, dtype)
        rows = [(1, 100, 200), (0, 0, 400)]
        got, want = (attended(NativeAttention(FAST, kernels), rows, dtype, 16) for kernels in (zigs, ours))
        assert torch.equal(got, want)
        x, gate = draw(1, 37, 51, dtype=dtype), 5 * draw(2, 9, 128, dtype=dtype)
        weight = draw(3, 51, dtype=dtype)
        assert torch.equal(zigs.rms_norm(x, weight, 1e-6), ours.rms_norm(x, weight, 1e-6))
        assert torch.equal(zigs.silu_product(gate), ours.silu_product(gate))


def test_without_any_compiler_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(compile_kernels.NativeUnavailable, match=r"install g\+\+.*twinpool\[kernels\]"):
        build.find_compiler()
