"""The claims about the kernels of a mixture of experts; run as a script by `test_experts_kernels.py`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.kernels.claims import answer
from twinpool.engine.layers.moe.experts import ExpertRoutes, TorchExperts, clamped_swiglu, gated_silu
from twinpool.engine.layers.moe.triton_experts import StackedProducts, TritonExperts
from twinpool.engine.tensors.row_exact_linear import FAST, RowExactLinear

ROWS = 16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Pair:
    """The same experts as kernels and as their twin."""

    def __init__(
        self, experts: int, hidden: int, inner: int, *, bias: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        ups = [draw(2 * inner, hidden, seed=e, dtype=dtype) * hidden**-0.5 for e in range(experts)]
        downs = [draw(hidden, inner, seed=100 + e, dtype=dtype) * inner**-0.5 for e in range(experts)]
        up_biases = [draw(2 * inner, seed=200 + e, dtype=dtype) if bias else None for e in range(experts)]
        down_biases = [draw(hidden, seed=300 + e, dtype=dtype) if bias else None for e in range(experts)]
        activation = clamped_swiglu(3.0, 1.702) if bias else gated_silu
        self.experts, self.hidden, self.dtype = experts, hidden, dtype
        self.twin = TorchExperts(
            [RowExactLinear(w, b) for w, b in zip(ups, up_biases, strict=True)],
            [RowExactLinear(w, b) for w, b in zip(downs, down_biases, strict=True)],
            activation,
        )
        stacked = StackedProducts.of(ups, up_biases), StackedProducts.of(downs, down_biases)
        self.kernels = TritonExperts(*stacked, activation, rows=ROWS)

    def step(self, tokens: int, top_k: int, seed: int = 0) -> tuple[Tensor, ExpertRoutes]:
        generator = torch.Generator().manual_seed(seed)
        chosen = [torch.randperm(self.experts, generator=generator)[:top_k] for _ in range(tokens)]
        chosen_tk = torch.stack(chosen) if chosen else torch.empty(0, top_k, dtype=torch.int64)
        weights = torch.rand(tokens, top_k, generator=generator)
        return draw(tokens, self.hidden, seed=seed, dtype=self.dtype), ExpertRoutes(chosen_tk, weights)

    def check(self, tokens: int, top_k: int, tolerance: float) -> None:
        x, routes = self.step(tokens, top_k)
        want = self.twin(x, routes, FAST)
        torch.testing.assert_close(self.kernels(x, routes), want, rtol=tolerance, atol=tolerance)


def claim_odd_sizes_equal_the_twin() -> None:
    pair = Pair(5, 70, 33)
    for tokens, top_k in ((1, 1), (1, 5), (7, 2), (37, 3)):
        pair.check(tokens, top_k, 1e-5)


def claim_biases_and_clamps_equal_the_twin() -> None:
    Pair(3, 20, 24, bias=True).check(6, 2, 1e-5)


def claim_a_step_without_tokens_has_no_rows() -> None:
    pair = Pair(3, 20, 24)
    assert pair.kernels(*pair.step(0, 2)).shape == (0, 20)


def claim_experts_that_nobody_chose_are_left_out() -> None:
    pair = Pair(6, 20, 24)
    x, routes = pair.step(9, 2)
    narrowed = ExpertRoutes(routes.experts_mk.new_tensor([[4, 1]]).expand(9, 2).contiguous(), routes.weights_mk)
    torch.testing.assert_close(pair.kernels(x, narrowed), pair.twin(x, narrowed, FAST), rtol=1e-5, atol=1e-5)


def claim_more_pairs_than_a_block_holds_go_to_several() -> None:
    pair = Pair(2, 16, 16)
    x, routes = pair.step(2 * ROWS + 1, 1)
    everyone = ExpertRoutes(torch.ones_like(routes.experts_mk), routes.weights_mk)
    torch.testing.assert_close(pair.kernels(x, everyone), pair.twin(x, everyone, FAST), rtol=1e-5, atol=1e-5)


def claim_half_precision_stays_within_its_rounding() -> None:
    Pair(4, 40, 32, dtype=torch.float16).check(7, 2, 4e-3)
    Pair(4, 40, 32, dtype=torch.bfloat16).check(7, 2, 3e-2)


def claim_a_row_is_bitwise_the_same_alone_and_in_any_batch() -> None:
    pair = Pair(4, 40, 32)
    x, routes = pair.step(41, 2)
    want = pair.kernels(x, routes)
    for part in (slice(0, 1), slice(40, 41), slice(3, 9), slice(5, 38)):
        mine = ExpertRoutes(routes.experts_mk[part], routes.weights_mk[part])
        assert torch.equal(pair.kernels(x[part], mine), want[part]), part


def claim_experts_of_other_ranks_add_nothing() -> None:
    """Not even where what lies behind the rows of a product, which nobody writes, isn't a number."""
    pair = Pair(4, 40, 32)
    x, routes = pair.step(41, 2)
    sent = ExpertRoutes(torch.randint(0, 9, (41, 2), generator=torch.Generator().manual_seed(3)), routes.weights_mk)
    here, nowhere = sent.of(range(2, 6)), sent.of(range(20, 24))
    torch.use_deterministic_algorithms(True)  # So that new memory is filled with NaN.
    try:
        torch.testing.assert_close(pair.kernels(x, here), pair.twin(x, here, FAST), rtol=1e-5, atol=1e-5)
        assert torch.equal(pair.kernels(x, nowhere), torch.zeros(41, 40))
    finally:
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    answer(globals())
