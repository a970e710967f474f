"""The C++ products with weights in blocks: of float32 rows bit for bit those with the unpacked weight, of bfloat16 rows
those of their definition, for every code, scale and shape, and every type of GGUF's; a row the same in any company."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.native import BUILDS, kernels_or_skip
from tests.support.gguf_files import random_blocks
from tests.support.tile_chain import block_product
from twinpool.engine.native.current_kernels import using
from twinpool.engine.native.native_kernels import NativeKernels, PackedBlocks, PackedWeight
from twinpool.engine.tensors.row_exact_linear import RowExactLinear
from twinpool.engine.weight_formats.block_weight import BlockProduct, BlockWeight, Code, pack_codes, stack_rows
from twinpool.engine.weight_formats.gguf_formats import GGUF_TYPES, read_gguf_blocks

SHAPES = ((70, 96, 32), (5, 160, 160), (257, 300, 128), (32, 32, 16), (64, 34, 32), (33, 120, 40), (5, 24, 8))
ROWS = (1, 2, 3, 4, 5, 14, 15, 31, 33)
GROUP = 32


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(code: Code, n: int, k: int) -> Tensor:
    """Every code that there is, and more at random."""
    drawn = torch.randint(0, 2**code.bits, (n, k), generator=source(1), dtype=torch.uint8)
    first = torch.arange(2**code.bits, dtype=torch.uint8)[: n * k]
    drawn.view(-1)[: len(first)] = first
    if code is Code.E4M3:
        drawn[(drawn & 0x7F) == 0x7F] = 0x7E
    return pack_codes(drawn, code)


def scales(dtype: torch.dtype, n: int, groups: int) -> Tensor:
    drawn = torch.rand(n, groups, generator=source(2)) * 3 + 0.01
    if dtype == torch.uint8:
        return torch.randint(110, 140, (n, groups), generator=source(2), dtype=torch.uint8)
    small = drawn * (2.0**-20 if dtype == torch.float16 else 1.0)
    return torch.where(torch.arange(n).unsqueeze(1) % 3 == 0, small, drawn).to(dtype)


def weight(code: Code, dtype: torch.dtype, n: int, k: int, group: int, *, zeros: bool = False) -> BlockWeight:
    groups = -(-k // group)
    points = torch.randint(0, 2**code.bits, (n, groups), generator=source(3), dtype=torch.uint8) if zeros else None
    factor = torch.rand(n, 1, generator=source(4)) + 0.5 if dtype == torch.float8_e4m3fn else None
    zero = 8 if code is Code.UINT4 and not zeros else 0
    drawn = scales(dtype, n, groups)
    return BlockWeight(code, codes(code, n, k), drawn, group, torch.float32, points, zero, factor)


KINDS = [
    (Code.UINT4, torch.float32, False), (Code.UINT4, torch.float16, True), (Code.UINT4, torch.bfloat16, False),
    (Code.UINT8, torch.float16, True), (Code.UINT8, torch.bfloat16, False), (Code.E4M3, torch.float32, False),
    (Code.E4M3, torch.uint8, False), (Code.E2M1, torch.uint8, False), (Code.E2M1, torch.float8_e4m3fn, False),
]  # fmt: skip


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels_or_skip(request.param)


def product(kernels: NativeKernels | None, blocks: BlockWeight, bias_n: Tensor | None, x: Tensor) -> Tensor:
    with using(kernels):
        return RowExactLinear(replace(blocks, dtype=x.dtype), bias_n)(x)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize(("code", "scale", "zeros"), KINDS, ids=str)
def test_bits_are_those_of_the_unpacked_weight(
    kernels: NativeKernels, code: Code, scale: torch.dtype, zeros: bool, n: int, k: int, group: int
) -> None:
    blocks = weight(code, scale, n, k, group, zeros=zeros)
    check_bits(kernels, (code, scale, zeros, n, k, group), blocks)


WANTED: dict[tuple[object, ...], Tensor] = {}
"""What the definition gives, which takes longer than all builds' products: once for all of them."""


def check_bits(kernels: NativeKernels, named: tuple[object, ...], blocks: BlockWeight) -> None:
    n, k = blocks.shape
    bias = torch.randn(n, generator=source(5))
    x = torch.randn(max(ROWS), k, generator=source(6))
    dense = PackedWeight(kernels, blocks.unpack(), bias)(x)
    if named not in WANTED:
        WANTED[named] = block_product(x.bfloat16(), blocks, bias)
    for dtype, want in ((torch.float32, dense), (torch.bfloat16, WANTED[named])):
        for rows in ROWS:
            assert torch.equal(product(kernels, blocks, bias, x[:rows].to(dtype)), want[:rows]), (dtype, rows)


def gguf_weight(kind: str, n: int, k: int, dtype: torch.dtype = torch.float32) -> BlockWeight:
    return read_gguf_blocks(kind, torch.from_numpy(random_blocks(kind, n, k, seed=n)), dtype)


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_bits_are_those_of_a_gguf_type_unpacked(kernels: NativeKernels, kind: str) -> None:
    for n, k in ((70, 512), (5, 256)):
        check_bits(kernels, (kind, n, k), gguf_weight(kind, n, k))


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_rows_that_are_looked_up_are_those_of_the_unpacked_weight(kernels: NativeKernels, kind: str) -> None:
    rows = torch.tensor([0, 69, 31, 32, 31])
    for dtype in (torch.float32, torch.bfloat16):
        blocks = gguf_weight(kind, 70, 512, dtype)
        for used in (kernels, None):
            with using(used):
                assert torch.equal(RowExactLinear(blocks)[rows], blocks.unpack()[rows].to(dtype))
    with using(kernels):
        table = RowExactLinear(gguf_weight(kind, 70, 512))
    for wrong in (70, -1):
        with pytest.raises(IndexError, match="of a weight of 70"):
            table[torch.tensor([3, wrong])]


def test_reordered_columns_are_looked_up_in_the_order_of_the_input(kernels: NativeKernels) -> None:
    order = torch.randperm(96, generator=source(7))
    blocks = replace(weight(Code.UINT4, torch.float16, 70, 96, GROUP, zeros=True), order_k=order)
    with using(kernels):
        assert torch.equal(RowExactLinear(blocks)[torch.tensor([5, 66])], blocks.unpack()[[5, 66]])


def test_weights_of_unlike_types_that_are_stacked_have_the_bits_of_each(kernels: NativeKernels) -> None:
    parts = [gguf_weight("Q4_K", 33, 256), gguf_weight("Q6_K", 64, 256), gguf_weight("Q4_K", 5, 256)]
    bias, x = torch.randn(102, generator=source(5)), torch.randn(15, 256, generator=source(6))
    for used in (kernels, None):
        with using(used):
            stacked = RowExactLinear(stack_rows(parts), bias)
            each = [RowExactLinear(part, own) for part, own in zip(parts, torch.split(bias, [33, 64, 5]), strict=True)]
            assert stacked.shape == (102, 256)
            for rows in (1, 4, 15):
                assert torch.equal(stacked(x[:rows]), torch.cat([one(x[:rows]) for one in each], 1))


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_packed_blocks_take_what_the_file_takes(kernels: NativeKernels, kind: str) -> None:
    stored = random_blocks(kind, 64, 1024)
    packed = vars(PackedBlocks(kernels, read_gguf_blocks(kind, torch.from_numpy(stored), torch.float32), None))
    held = sum(part.nbytes for part in (packed["_codes"], *packed["_parts"].values()))
    assert held <= 1.05 * stored.nbytes


@pytest.mark.parametrize(("code", "part"), [
    (Code.UINT8, "offsets"), (Code.E4M3, "offsets"), (Code.E2M1, "offsets"), (Code.IQ4, "offsets"),
    (Code.UINT5, "zeros"), (Code.IQ4, "zeros"),
])  # fmt: skip
def test_a_part_that_kernels_would_pass_over_is_no_part_of_their_weights(
    kernels: NativeKernels, code: Code, part: str
) -> None:
    scale = scales(torch.float16, 32, 2)
    parts: dict[str, Any] = {part: scale if part == "offsets" else torch.ones(32, 2, dtype=torch.uint8)}
    blocks = BlockWeight(code, codes(code, 32, 64), scale, 32, torch.float32, **parts)
    with pytest.raises(AssertionError, match=part):
        PackedBlocks(kernels, blocks, None)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "k"), [(4096, 4096), (300_000, 32)], ids=["inputs", "sums"])
def test_the_room_for_the_rows_of_a_long_product_is_given_back(kernels: NativeKernels, rows: int, k: int) -> None:
    """It would take as much as the inputs of the longest prefill in float32, and 128 bytes for each of its rows, a
    thread, for good."""
    linear = PackedBlocks(kernels, gguf_weight("Q8_0", 32, k), None)
    x = torch.ones(rows, k)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    linear(x[:1])
    before = resident()
    for _ in range(2):
        linear(x)
    assert resident() - before < x.nbytes / 2


def test_more_rows_than_a_thread_has_sums_for_have_the_same_bits(kernels: NativeKernels) -> None:
    """256 blocks of 14 rows at once."""
    blocks, bias = gguf_weight("Q4_K", 33, 256), torch.randn(33, generator=source(5))
    x = torch.randn(3600, 256, generator=source(6))
    want = PackedWeight(kernels, blocks.unpack(), bias)(x)
    for rows in (3583, 3584, 3585, 3600):
        assert torch.equal(product(kernels, blocks, bias, x[:rows]), want[:rows]), rows


def test_columns_in_another_order_and_rows_that_lie_apart(kernels: NativeKernels) -> None:
    order = torch.randperm(96, generator=source(7))
    blocks = replace(weight(Code.UINT4, torch.float16, 70, 96, GROUP, zeros=True), order_k=order)
    wide = torch.randn(6, 200, generator=source(8))
    got = product(kernels, blocks, None, wide[:, :96])
    torch.testing.assert_close(got, wide[:, :96] @ blocks.unpack().T, rtol=1e-4, atol=1e-3)
    ordered = PackedWeight(kernels, replace(blocks, order_k=None).unpack(), None)
    assert torch.equal(got, ordered(wide[:, :96][:, order].contiguous()))
    assert product(kernels, blocks, None, wide[:0, :96]).shape == (0, 70)


@pytest.mark.parametrize(("code", "scale", "zeros"), KINDS, ids=str)
def test_torch_computes_the_same_within_rounding(code: Code, scale: torch.dtype, zeros: bool) -> None:
    blocks = weight(code, scale, 70, 96, GROUP, zeros=zeros)
    x, bias = torch.randn(9, 96, generator=source(9)), torch.randn(70, generator=source(5))
    exact = x.double() @ blocks.unpack().double().T + bias.double()
    size = float(exact.abs().max())
    torch.testing.assert_close(product(None, blocks, bias, x).double(), exact, rtol=1e-5, atol=1e-6 * size)
    small = BlockProduct(blocks, bias)
    small._rows = 16  # Several tiles.
    torch.testing.assert_close(small(x).double(), exact, rtol=1e-5, atol=1e-6 * size)
