"""A mixture of experts on an NVIDIA GPU, without waiting for the device to learn the routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.engine.gpu.gpu_blocks import GpuBlocks, fit
from twinpool.engine.layers.moe import expert_kernels as kernels
from twinpool.engine.layers.moe.experts import ExpertRoutes
from twinpool.engine.tensors.launch_configs import launch_options
from twinpool.engine.tensors.row_exact_linear import FAST, Numerics
from twinpool.engine.weight_formats.block_weight import Weight, dense

ROWS, BLOCK_N, BLOCK_K = 64, 64, 64
"""The tile of a product: rows of a block, columns, and steps of the inner axis. Other sizes change last bits."""
_SUM_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class StackedProducts:
    """One of the products of all experts, with weights one after the other in memory."""

    weight_enk: Tensor | GpuBlocks
    """[experts, width, inner], dense or in blocks"""
    bias_en: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> StackedProducts:
        """Experts of unlike layouts are expanded."""
        given = [bias for bias in biases if bias is not None]
        stacked = GpuBlocks.of(weights) if fit(weights) else torch.stack([dense(weight) for weight in weights])
        return cls(stacked, torch.stack(given) if given else None)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, width and inner axis."""
        if isinstance(self.weight_enk, GpuBlocks):
            return self.weight_enk.count, self.weight_enk.width, self.weight_enk.inner
        experts, width, inner = self.weight_enk.shape
        return experts, width, inner


@dataclass(frozen=True, slots=True)
class _Groups:
    """The pairs of token and expert of one step, sorted by expert and cut into blocks. S pairs, B blocks at most."""

    order_s: Tensor
    """[S] int64: the pair, as token * k + choice, at each place."""
    expert_b: Tensor
    """[B] int64: each block's expert; past the last block the number of experts."""
    first_b: Tensor
    """[B] int64: each block's first place."""
    count_b: Tensor
    """[B] int64: how many places each block has."""


class TritonExperts:
    """The experts in Triton kernels: computes what `engine.layers.moe.experts.TorchExperts` does."""

    def __init__(
        self, ups: StackedProducts, downs: StackedProducts, activation: Callable[[Tensor], Tensor], rows: int = ROWS
    ) -> None:
        """`rows` of a block must be a power of two of 16 or more."""
        self._ups, self._downs, self._activation, self._rows = ups, downs, activation, rows
        self._interpreted = bool(triton.knobs.runtime.interpret)

    def __call__(self, h_th: Tensor, routes: ExpertRoutes, numerics: Numerics = FAST) -> Tensor:
        """Compute each row's weighted sum, [T, hidden] float32; row-exact whatever the numerics."""
        tokens, top_k = routes.experts_mk.shape
        if tokens == 0:
            return torch.empty(0, h_th.shape[1], dtype=torch.float32, device=h_th.device)
        experts_tk, turn = routes.experts_mk.sort(-1)
        weights_tk = routes.weights_mk.gather(1, turn)
        experts = self._ups.shape[0]
        groups = _grouped(experts_tk.flatten(), experts, self._rows)
        places_s = torch.arange(len(groups.order_s), device=h_th.device)
        place_tk = torch.empty_like(groups.order_s).index_copy_(0, groups.order_s, places_s)
        place_tk.masked_fill_(experts_tk.flatten() >= experts, -1)
        up_sn = self._product(h_th, groups.order_s // top_k, self._ups, groups)
        down_sh = self._product(self._activation(up_sn), places_s, self._downs, groups)
        return self.combined(down_sh, place_tk.view(tokens, top_k), weights_tk)

    def combined(self, down_sh: Tensor, place_tk: Tensor, weights_tk: Tensor) -> Tensor:
        tokens, top_k = place_tk.shape
        sum_th = torch.empty(tokens, down_sh.shape[1], dtype=torch.float32, device=down_sh.device)
        if tokens == 0:
            return sum_th
        kernels.weighted_sum_kernel[(tokens, triton.cdiv(sum_th.shape[1], _SUM_COLUMNS))](
            down_sh, place_tk, weights_tk, sum_th, down_sh.stride(0), sum_th.stride(0), sum_th.shape[1],
            TOP_K=top_k, BLOCK=_SUM_COLUMNS,
        )  # fmt: skip
        return sum_th

    def _product(self, x_rk: Tensor, row_s: Tensor, stacked: StackedProducts, groups: _Groups) -> Tensor:
        """Multiply row `row_s[s]` of x with the weight of place s's expert: [S, width] in the dtype of x."""
        weight, bias = stacked.weight_enk, stacked.bias_en
        experts, width, inner = stacked.shape
        x_rk = x_rk.contiguous()
        out_sn = torch.empty(len(row_s), width, dtype=x_rk.dtype, device=x_rk.device)
        tile = {"ROWS": self._rows, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
        grid = (len(groups.expert_b), triton.cdiv(width, BLOCK_N))
        routed = (out_sn, row_s, groups.expert_b, groups.first_b, groups.count_b)
        upcast = self._interpreted and x_rk.dtype == torch.bfloat16
        if isinstance(weight, GpuBlocks):
            kernels.grouped_block_kernel[grid](
                x_rk, out_sn if bias is None else bias, *routed, *weight.tensors,
                x_rk.stride(0), out_sn.stride(0), experts, inner, width, *weight.row_sizes,
                **tile, **weight.constants, BIAS=bias is not None, UPCAST=upcast,
                **launch_options(kernels.grouped_block_kernel, x_rk.dtype, tile, warps=4, stages=3),
            )  # fmt: skip
            return out_sn
        kernels.grouped_product_kernel[grid](
            x_rk, weight, weight if bias is None else bias, *routed,
            x_rk.stride(0), weight.stride(0), weight.stride(1), out_sn.stride(0), experts, inner, width,
            **tile, BIAS=bias is not None, UPCAST=upcast,
            **launch_options(kernels.grouped_product_kernel, x_rk.dtype, tile, warps=4, stages=3),
        )  # fmt: skip
        return out_sn


def _grouped(experts_s: Tensor, experts: int, rows: int) -> _Groups:
    """Sort pairs by their expert and cut each expert's into blocks of `rows`, all on the device. Those of other ranks,
    number `experts`, come last and are in no block."""
    order_s = experts_s.argsort(stable=True)
    counts_e = torch.zeros(experts + 1, dtype=torch.int64, device=experts_s.device)
    counts_e = counts_e.scatter_add_(0, experts_s, torch.ones_like(experts_s))[:experts]
    blocks_e = (counts_e + rows - 1) // rows
    last_e, begin_e = blocks_e.cumsum(0), counts_e.cumsum(0) - counts_e
    # Every block is full, or the last one of an expert that has pairs: this many at most.
    most = len(experts_s) // rows + min(experts, len(experts_s))
    number_b = torch.arange(most, device=experts_s.device)
    expert_b = torch.searchsorted(last_e, number_b, right=True)
    known_b = expert_b.clamp(max=experts - 1)
    within_b = (number_b - (last_e - blocks_e)[known_b]) * rows
    return _Groups(order_s, expert_b, begin_e[known_b] + within_b, (counts_e[known_b] - within_b).clamp(0, rows))
