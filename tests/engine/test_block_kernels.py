"""The C++ products with weights in blocks: bit for bit those with the unpacked weight in float32, for every code, scale
and shape, and a row the same in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.native import BUILDS, kernels_or_skip
from twinpool.engine.native.current_kernels import using
from twinpool.engine.native.native_kernels import NativeKernels, PackedWeight
from twinpool.engine.tensors.row_exact_linear import RowExactLinear
from twinpool.engine.weight_formats.block_weight import BlockProduct, BlockWeight, Code, pack_codes

SHAPES = ((70, 96, 32), (5, 160, 160), (257, 300, 128), (32, 32, 16), (64, 34, 32))
ROWS = (1, 2, 3, 4, 5, 14, 15, 31)
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
    factor = torch.rand(n, generator=source(4)) + 0.5 if dtype == torch.float8_e4m3fn else None
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


@pytest.mark.parametrize(
    ("n", "k", "group"), [(70, 96, 32), (5, 160, 160), (257, 300, 128), (32, 32, 16), (64, 34, 32)]
)
@pytest.mark.parametrize(("code", "scale", "zeros"), KINDS, ids=str)
def test_bits_are_those_of_the_unpacked_weight(
    kernels: NativeKernels, code: Code, scale: torch.dtype, zeros: bool, n: int, k: int, group: int
) -> None:
    blocks, bias = weight(code, scale, n, k, group, zeros=zeros), torch.randn(n, generator=source(5))
    dense = PackedWeight(kernels, blocks.unpack(), bias)
    x = torch.randn(max(ROWS), k, generator=source(6))
    for dtype in (torch.float32, torch.bfloat16):
        want = dense(x.to(dtype).float()).to(dtype)
        for rows in ROWS:
            assert torch.equal(product(kernels, blocks, bias, x[:rows].to(dtype)), want[:rows]), (dtype, rows)


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
