"""The claims about products, norms and activations of a GPU; run as a script by `test_product_kernels.py`.

The interpreter cuts float32 off where a GPU rounds it to bfloat16: claims about one rounding are of float16.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.kernels.claims import answer
from twinpool.engine.gpu.gpu_kernels import BLOCK_K, GpuKernels
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.native.current_kernels import using
from twinpool.engine.tensors import tensor_parallel
from twinpool.engine.tensors.row_exact_linear import HeadLinear, RowExactLinear, silu
from twinpool.engine.tensors.tensor_parallel import TorchDistributedGroup

KERNELS = GpuKernels(part=2 * BLOCK_K)
"""With short parts, so that small products have several."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with using(KERNELS):
        return RowExactLinear(weight, bias)(x)


def claim_products_of_odd_sizes_are_those_of_float64() -> None:
    for rows, n, k in (
        (1, 1, 1),
        (3, 130, 70),
        (5, 40, 300),
        (64, 20, 257),
        (65, 20, 257),
        (200, 129, 33),
        (600, 140, 8),
    ):
        x, weight, bias = draw(rows, k, seed=1), draw(n, k, seed=2) * k**-0.5, draw(n, seed=3)
        want = x.double() @ weight.double().T
        torch.testing.assert_close(product(x, weight), want.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(product(x, weight, bias), (want + bias).float(), rtol=1e-5, atol=1e-5)


def claim_half_precision_is_rounded_once() -> None:
    half = torch.float16
    x, weight, bias = draw(7, 300, dtype=half), draw(50, 300, seed=1, dtype=half), draw(50, seed=2, dtype=half)
    want = (x.double() @ weight.double().T + bias.double()).to(half)
    got = product(x, weight, bias)
    assert got.dtype == half
    assert (got != want).float().mean() < 0.02, "sums of float32 rarely round to another neighbour"
    torch.testing.assert_close(got, want, rtol=2**-9, atol=2**-9)
    x, weight = x.bfloat16(), weight.bfloat16()
    torch.testing.assert_close(product(x, weight).double(), x.double() @ weight.double().T, rtol=2**-7, atol=2**-7)


def claim_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    x, weight, bias = draw(150, 300), draw(40, 300, seed=1), draw(40, seed=2)
    want = product(x, weight, bias)
    for rows in (slice(0, 1), slice(149, 150), slice(3, 20), slice(10, 74), slice(10, 75), slice(0, 128)):
        assert torch.equal(product(x[rows], weight, bias), want[rows]), rows


def claim_a_column_has_the_same_bits_whatever_the_width_of_the_weight() -> None:
    """A narrow weight's parts have programs of their own, a wide one's haven't."""
    x, weight = draw(2, 300), draw(130 * 256, 300, seed=1)
    wide = product(x, weight)
    assert torch.equal(product(x, weight[:40]), wide[:, :40])


def claim_rows_may_lie_apart() -> None:
    apart = draw(9, 2 * 200)[:, 100:300]
    weight = draw(30, 200, seed=1)
    assert torch.equal(product(apart, weight), product(apart.contiguous(), weight))
    columns = draw(200, 9).T
    assert torch.equal(product(columns, weight), product(columns.contiguous(), weight))


def claim_a_step_without_rows_has_no_results() -> None:
    assert product(draw(0, 20), draw(30, 20)).shape == (0, 30)
    assert KERNELS.rms_norm(draw(0, 20), draw(20), 1e-6).shape == (0, 20)
    assert KERNELS.silu_product(draw(0, 20)).shape == (0, 10)


def claim_a_matrix_a_head_multiplies_its_own_columns() -> None:
    x, weight = draw(70, 3 * 150), draw(3, 150, 20, seed=1)
    with using(KERNELS):
        linear = HeadLinear(weight)
        got = linear(x)
        alone = torch.cat([linear(row) for row in torch.split(x[:3], 1)])
    assert linear.row_exact
    want = torch.einsum("mhk,hkn->mhn", x.view(70, 3, 150).double(), weight.double()).reshape(70, 60)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(alone, got[:3])


def claim_norms_are_torchs_and_their_rows_exact() -> None:
    for dtype, wide in ((torch.float32, False), (torch.float16, False), (torch.float16, True)):
        x, weight = draw(9, 100, dtype=dtype), draw(100, seed=1, dtype=torch.float32 if wide else dtype)
        got = KERNELS.rms_norm(x, weight, 1e-6)
        tolerance = 2e-6 if dtype == torch.float32 else 2**-9
        torch.testing.assert_close(got, rms_norm(x, weight, 1e-6), rtol=tolerance, atol=tolerance)
        assert torch.equal(KERNELS.rms_norm(x[4:5], weight, 1e-6), got[4:5])


def claim_norms_by_head_have_their_own_weights() -> None:
    x, weight = draw(5, 3, 40), draw(3, 40, seed=1)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6), rtol=2e-6, atol=2e-6)
    side_by_side = draw(5, 200)[:, 40:160].view(5, 3, 40)
    want = rms_norm(side_by_side, weight, 1e-6)
    torch.testing.assert_close(KERNELS.rms_norm(side_by_side, weight, 1e-6), want, rtol=2e-6, atol=2e-6)


def claim_a_sum_and_its_norm_in_one_are_the_two_one_after_the_other() -> None:
    for dtype in (torch.float32, torch.float16):
        x, weight = draw(6, 70, dtype=dtype), draw(70, seed=2, dtype=dtype)
        added = draw(6, 140, seed=1, dtype=dtype)[:, 70:]
        before = x.clone()
        total, normed = KERNELS.add_rms_norm(x, added, weight, 1e-5)
        assert torch.equal(total, x + added)
        assert torch.equal(normed, KERNELS.rms_norm(total, weight, 1e-5))
        assert torch.equal(x, before), "the residual stream before it may still be read"


def claim_a_sum_of_squares_is_that_of_its_row_alone_and_float64s() -> None:
    for dtype in (torch.float32, torch.float16):
        x = draw(7, 3, 100).to(dtype)[:, 1:]
        got = KERNELS.square_sum(x)
        assert (got.shape, got.dtype) == ((7, 2), torch.float32)
        torch.testing.assert_close(got.double(), x.double().square().sum(-1), rtol=1e-5, atol=0.0)
        assert torch.equal(KERNELS.square_sum(x[3:4, 1:]), got[3:4, 1:])
    assert KERNELS.square_sum(draw(0, 20)).shape == (0,)


def claim_the_activation_is_torchs_whatever_its_argument() -> None:
    for dtype in (torch.float32, torch.float16):
        both = (8 * draw(5, 2 * 1100)).to(dtype)
        both[0, :4] = torch.tensor([0.0, -0.0, 90.0, -90.0])
        gate, up = both.chunk(2, dim=-1)
        want = silu(gate.float()).to(dtype) * up
        tolerance = 1e-6 if dtype == torch.float32 else 2**-9
        torch.testing.assert_close(KERNELS.silu_product(both), want, rtol=tolerance, atol=tolerance)
    assert KERNELS.silu_product(torch.full((1, 40), torch.nan)).isnan().all()


def claim_fast_numerics_leave_products_to_the_library() -> None:
    with using(GpuKernels(products=False)):
        linear = RowExactLinear(draw(30, 20))
        assert not linear.row_exact
        heads = HeadLinear(draw(2, 20, 10))
        assert not heads.row_exact


class Nccl:
    """A library of collectives as rank 0 of three sees it; `others` are what the other ranks bring."""

    def __init__(self, others: list[Tensor]) -> None:
        self.others, self.waited = others, list[tuple[object, ...]]()

    def _allgather_base(self, parts: Tensor, mine: Tensor) -> Nccl:
        parts.copy_(torch.cat([mine, *(other.reshape(-1).view(torch.uint8) for other in self.others)]))
        return self

    def allreduce(self, tensors: list[Tensor]) -> Nccl:
        for other in reversed(self.others):  # in an order of its own
            tensors[0] += other
        return self

    def wait(self, *deadline: object) -> None:
        self.waited.append(deadline)


def ranks_of(library: Nccl, *, exact: bool) -> TorchDistributedGroup:
    made, tensor_parallel._group = tensor_parallel._group, lambda *_: library
    try:
        return TorchDistributedGroup(HashStore(), 0, 3, device=torch.device("cuda"), exact=exact)
    finally:
        tensor_parallel._group = made


def claim_ranks_on_gpus_add_up_in_their_order_and_round_once() -> None:
    for dtype in (torch.float32, torch.float16):
        for shape in ((3, 7), (1, 1), (2, 1500), (0, 4)):
            mine, *others = [(10 ** (2 - n) * draw(*shape, seed=n)).to(dtype) for n in range(3)]
            library = Nccl(others)
            total = (mine.float() + others[0].float() + others[1].float()).to(dtype)
            assert torch.equal(ranks_of(library, exact=True).sum(mine), total)
            assert library.waited == [()], "with a deadline the host would wait"


def claim_where_nobody_asks_for_exact_sums_the_library_reduces() -> None:
    mine, *others = [draw(3, 7, seed=n) for n in range(3)]
    library, before = Nccl(others), mine.clone()
    assert torch.equal(ranks_of(library, exact=False).sum(mine), mine + others[1] + others[0])
    assert torch.equal(mine, before), "what a rank brought is still its own"
    assert library.waited == [()]


if __name__ == "__main__":
    answer(globals())
