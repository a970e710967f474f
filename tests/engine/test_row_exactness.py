"""The probe that finds how many rows make products exact, and the shapes that a step hands to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint, row
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DEVICE, Completion, DeviceOp, PageSpanUse
from twinpool.engine.layers.norm import gelu_tanh
from twinpool.engine.tensors.row_exact_linear import TILE_ROWS, Numerics, RowExactLinear, probe, silu, tanh
from twinpool.engine.weight_formats.block_weight import BlockStack, quantise


def weight(n: int = 96, k: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(dtype)


class Sloppy(RowExactLinear):
    """A library whose rows come out otherwise unless their number is a multiple of `exact`."""

    exact = 1

    def __call__(self, x_mk: Tensor) -> Tensor:
        out = super().__call__(x_mk)
        return out if len(x_mk) % self.exact == 0 else out + 1e-3


@pytest.mark.parametrize(("exact", "quantum", "tiled"), [(4, 4, False), (8, 8, False), (16, 16, False), (32, 16, True)])
def test_the_smallest_quantum_whose_rows_are_exact_is_found(exact: int, quantum: int, tiled: bool) -> None:
    linear = Sloppy(weight())
    linear.exact = exact
    found = probe([linear], [])
    assert found.quantum >= quantum  # the real library may need more
    assert found.tiled is tiled


def test_stacks_of_one_shape_whose_parts_differ_are_probed_apart() -> None:
    """Each part is a product of its own."""

    def stack(*heights: int) -> RowExactLinear:
        return RowExactLinear(BlockStack(tuple(quantise(weight()[:height], 8, 32) for height in heights)))

    unlike, other = stack(32, 64), stack(48, 48)
    exact = unlike.product
    unlike.product = lambda x_mk: exact(x_mk) if len(x_mk) % 16 == 0 else exact(x_mk) + 1e-3
    assert probe([unlike, other], []).quantum == 16


def test_batched_products_are_probed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Tensor] = torch.bmm

    def sloppy(a: Tensor, b: Tensor) -> Tensor:
        return real(a, b) if a.shape[1] % 8 == 0 else real(a, b) + 1e-3

    monkeypatch.setattr(torch, "bmm", sloppy)
    assert probe([], [(2, 16, 128)]).quantum >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_gives_the_plain_product(dtype: torch.dtype, bias: bool) -> None:
    plain, x = weight(dtype=dtype), torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias_n = torch.arange(96, dtype=dtype) if bias else None
    want = torch.nn.functional.linear(x, plain, bias_n)
    torch.testing.assert_close(RowExactLinear(plain, bias_n)(x), want)


def test_without_a_packing_library_products_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    x = torch.randn(8, 64)
    assert torch.equal(RowExactLinear(weight())(x), torch.nn.functional.linear(x, weight()))


def test_tiles_are_always_the_same_call() -> None:
    seen: list[int] = []

    class Counting(RowExactLinear):
        def __call__(self, x_mk: Tensor) -> Tensor:
            seen.append(len(x_mk))
            return super().__call__(x_mk)

    tiled = Numerics(TILE_ROWS, tiled=True)
    assert tiled.padded(17) == 32
    tiled.linear(torch.randn(48, 64), Counting(weight()))
    assert seen == [TILE_ROWS] * 3


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize(("ours", "want"), [(silu, torch.nn.functional.silu), (gelu_tanh, gelu), (tanh, torch.tanh)])
def test_an_activation_of_an_element_is_the_same_in_vector_lanes_and_in_tails(
    ours: Callable[[Tensor], Tensor], want: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 5
    x[:8] = torch.tensor([0.0, -0.0, 1e-6, -1e-3, 90.0, -90.0, 1e4, -1e4])
    whole = ours(x.clone())
    torch.testing.assert_close(whole, want(x), rtol=2e-5, atol=2e-7)
    for offset in (0, 1, 3, 1000):
        for count in (*range(1, 70), 1001):
            assert torch.equal(ours(x[offset : offset + count].clone()), whole[offset : offset + count])


class Recording(CpuDevice):
    checks = True

    def __init__(self) -> None:
        self.ops: list[DeviceOp] = []

    def submit(self, op: DeviceOp, run: Callable[[], object], *args: Any, **options: Any) -> Completion:
        self.ops.append(op)
        return super().submit(op, run, *args, **options)


def test_a_step_names_the_pages_it_reads_and_writes(checkpoint: MakeCheckpoint) -> None:
    bench = Bench(checkpoint("llama"), 16, 1024)
    device = bench.engine._device = Recording()
    first, second = bench.lease(100), bench.lease(40)
    bench.engine.forward([row([1] * 37, 0, first), row([2] * 3, 0, second)])
    bench.engine.forward([row([1], 37, first), row([2] * 20, 3, second)])
    for op, read, written in (
        (device.ops[0], first[:3] + second[:1], first[:3] + second[:1]),
        (device.ops[1], first[:3] + second[:2], first[2:3] + second[:2]),
    ):
        assert op.reads == (PageSpanUse(DEVICE, "full", sorted(read)),)
        assert op.writes == (PageSpanUse(DEVICE, "full", sorted(written)),)
