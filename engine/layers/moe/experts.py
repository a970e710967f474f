"""Routers and experts of a mixture: which experts a token goes to, and with which weights in its sum; the experts'
activations, the reading of their weights, and their computation in torch.

Routers are row-exact: a row's experts and weights are the same bits in any batch. Ties are broken by `torch.topk`,
which looks at each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twinpool.engine.layers.decoder import ForwardContext
from twinpool.engine.layers.norm import gelu_tanh, rms_norm, sigmoid, silu
from twinpool.engine.native.current_kernels import kernels_for
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.engine.weight_formats.block_weight import Weight, select_rows


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """The experts of each row of a step, and their weights."""

    experts_mk: Tensor
    """[M, k] int64: k different experts of each row."""
    weights_mk: Tensor
    """[M, k] float32: the weight of each in the row's sum."""


ExpertRouter = Callable[[Tensor, ForwardContext], ExpertRoutes]
"""Routes activations [M, hidden], padding rows included."""


class SoftmaxRouter:
    """The router by a softmax over all experts, of which the `top_k` likeliest are chosen (Qwen's)."""

    def __init__(
        self, weights: Weights, hidden: int, experts: int, top_k: int, *, normalise: bool, name: str = "gate"
    ) -> None:
        """`normalise`: the weights of the chosen experts are scaled to add up to 1."""
        self._linear = weights.linear({name: experts}, hidden)
        self._top_k, self._normalise = top_k, normalise

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        chosen = ctx.linear(h_mh, self._linear).float().softmax(-1).topk(self._top_k)
        weights_mk = chosen.values
        if self._normalise:
            weights_mk = weights_mk / weights_mk.sum(-1, keepdim=True)
        return ExpertRoutes(chosen.indices, weights_mk.to(h_mh.dtype).float())


class ScaledSoftmaxRouter:
    """The router by a softmax over all experts, of the normed and scaled input; the weights of the chosen are scaled to
    add up to 1, then multiplied by a learned factor of each expert (Gemma 4's)."""

    def __init__(self, weights: Weights, hidden: int, experts: int, top_k: int, eps: float) -> None:
        """Reads its tensors below ``router.``."""
        mine = weights.scope("router.")
        self._linear = mine.linear({"proj": experts}, hidden)
        self._scale_h = mine.tensor("scale", hidden)
        self._factor_e = mine.tensor("per_expert_scale", experts, dtype=torch.float32)
        self._ones_h = torch.ones(hidden, device=weights.device)
        self._top_k, self._root, self._eps = top_k, hidden**-0.5, eps

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        scaled_mh = rms_norm(h_mh, self._ones_h, self._eps).mul_(self._scale_h).mul_(self._root)
        chosen = ctx.linear(scaled_mh, self._linear).float().softmax(-1).topk(self._top_k)
        weights_mk = chosen.values / chosen.values.sum(-1, keepdim=True)
        return ExpertRoutes(chosen.indices, weights_mk.mul_(self._factor_e[chosen.indices]))


class ChosenSoftmaxRouter:
    """The router by the `top_k` largest logits, with a softmax over those alone (gpt-oss's)."""

    def __init__(
        self, weights: Weights, hidden: int, experts: int, top_k: int, *, bias: bool = True, name: str = "router"
    ) -> None:
        self._linear = weights.linear({name: experts}, hidden, bias=bias)
        self._top_k = top_k

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        chosen = ctx.linear(h_mh, self._linear).topk(self._top_k)
        weights_mk = chosen.values.float().softmax(-1)
        return ExpertRoutes(chosen.indices, weights_mk.to(h_mh.dtype).float())


class SigmoidRouter:
    """The router by sigmoid scores, with a learned correction and a choice of groups first (DeepSeek-V3's).

    A group is rated by the sum of its two best corrected scores; experts of the `top_groups` best groups may be
    chosen, by corrected score. The weight of a chosen expert is its score without the correction. Scores are computed
    in float32 whatever the model's dtype. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """

    def __init__(
        self,
        weights: Weights,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        groups: int = 1,
        top_groups: int = 1,
        normalise: bool = True,
        scale: float = 1.0,
        name: str = "gate",
    ) -> None:
        """Raises `CheckpointError` where the experts don't divide into groups of two or more."""
        if groups > 1 and (experts % groups or experts // groups < 2 or not 0 < top_groups <= groups):
            raise weights.spec.config.refuse(
                f"{top_groups} of {groups} groups can't be chosen among {experts} experts; a group has 2 or more"
            )
        self._linear = weights.made(weights.tensor(f"{name}.weight", experts, hidden, dtype=torch.float32))
        self._correction_e = weights.tensor(f"{name}.e_score_correction_bias", experts, dtype=torch.float32)
        self._top_k, self._groups, self._top_groups = top_k, groups, top_groups
        self._normalise, self._scale = normalise, scale

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        scores_me = sigmoid(ctx.linear(h_mh.float(), self._linear))
        experts_mk = self._in_groups(scores_me + self._correction_e).topk(self._top_k, sorted=False).indices
        weights_mk = scores_me.gather(1, experts_mk)
        if self._normalise:
            weights_mk = weights_mk / (weights_mk.sum(-1, keepdim=True) + 1e-20)
        return ExpertRoutes(experts_mk, weights_mk * self._scale)

    def _in_groups(self, scores_me: Tensor) -> Tensor:
        """The scores, set to minus infinity outside the best groups."""
        if self._top_groups == self._groups:
            return scores_me
        scores_mge = scores_me.view(len(scores_me), self._groups, -1)
        best_mg = scores_mge.topk(2).values.sum(-1).topk(self._top_groups, sorted=False).indices
        barred_mg = torch.ones_like(scores_mge[..., 0], dtype=torch.bool).scatter_(1, best_mg, False)
        return scores_mge.masked_fill(barred_mg.unsqueeze(-1), -torch.inf).flatten(1)


Activation = Callable[[Tensor], Tensor]
"""Maps an expert's first product [S, width] to the input of its second, [S, inner], in the same dtype."""


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of a product that holds gate, then up, on its last axis."""
    kernels = kernels_for(gate_up)
    if kernels is not None:
        return kernels.silu_product(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.float()).to(gate.dtype).mul_(up)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU's hyperbolic-tangent approximation; the same layout."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate.float()).to(gate.dtype).mul_(up)


def clamped_swiglu(limit: float, alpha: float) -> Activation:
    """Make gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate), both clamped to `limit`; the same layout."""
    return partial(_clamped_swiglu, limit=limit, alpha=alpha)


def _clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * sigmoid(gate * alpha)).mul_(up + 1.0).to(gate_up.dtype)


def relu_squared(up: Tensor) -> Tensor:
    """relu(up)², for experts without a gate."""
    return up.relu().square_()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's weights, as one rank holds them."""

    up_nh: Weight
    """[width, hidden]: the weight of the first product; in gated experts all rows of gate, then all of up."""
    down_hi: Weight
    """[hidden, inner]: the weight of the second product."""
    up_bias_n: Tensor | None = None
    down_bias_h: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of one layer's experts. `inner` counts one expert's inner units over all ranks."""

    experts: int
    hidden: int
    inner: int


ExpertReader = Callable[[Weights, int, ExpertSizes, ShardAxis], ExpertWeights]
"""Reads expert `number` below ``experts.``; the axis is the inner units', as divided among ranks."""


def plain_expert(weights: Weights, number: int, sizes: ExpertSizes, units: ShardAxis) -> ExpertWeights:
    """Read an expert with a gate: from tensors of its own, as published, or a fused [experts, 2 * inner, hidden]."""
    if not _fused(weights):
        mine = weights.scope(f"{number}.")
        gate_up = [mine.weight(name, units, sizes.hidden) for name in ("gate_proj", "up_proj")]
        return ExpertWeights(mine.stacked(gate_up), mine.weight("down_proj", sizes.hidden, units))
    one = ShardAxis(sizes.experts, number, 1)
    fused = [weights.tensor("gate_up_proj", one, part, sizes.hidden)[0] for part in _halves(units)]
    return ExpertWeights(
        weights.kept(torch.cat(fused)), weights.kept(weights.tensor("down_proj", one, sizes.hidden, units)[0], units)
    )


def ungated_expert(weights: Weights, number: int, sizes: ExpertSizes, units: ShardAxis) -> ExpertWeights:
    """Read an expert without a gate: from tensors of its own, or from a fused [experts, inner, hidden]."""
    if not _fused(weights):
        mine = weights.scope(f"{number}.")
        return ExpertWeights(mine.weight("up_proj", units, sizes.hidden), mine.weight("down_proj", sizes.hidden, units))
    one = ShardAxis(sizes.experts, number, 1)
    return ExpertWeights(
        weights.kept(weights.tensor("up_proj", one, units, sizes.hidden)[0]),
        weights.kept(weights.tensor("down_proj", one, sizes.hidden, units)[0], units),
    )


def interleaved_expert(weights: Weights, number: int, sizes: ExpertSizes, units: ShardAxis) -> ExpertWeights:
    """Read an expert of gpt-oss: fused, gate and up rows alternating, with biases; transposed, or in MXFP4."""
    one, both = ShardAxis(sizes.experts, number, 1), ShardAxis(2 * units.whole, 2 * units.first, 2 * units.count)
    if weights.has("gate_up_proj_blocks") or weights.has("gate_up_proj_scales"):
        up_nh = weights.mxfp4("gate_up_proj", one, both, sizes.hidden)
        down_hi = weights.mxfp4("down_proj", one, sizes.hidden, units)
    else:
        up_nh = weights.kept(weights.tensor("gate_up_proj", one, sizes.hidden, both)[0].T)
        down_hi = weights.kept(weights.tensor("down_proj", one, units, sizes.hidden)[0].T.contiguous(), units)
    count = both.count
    bias_n = weights.tensor("gate_up_proj_bias", one, both)[0]
    down_bias_h = weights.tensor("down_proj_bias", one, sizes.hidden)[0]
    return ExpertWeights(
        select_rows(up_nh, torch.cat((torch.arange(0, count, 2), torch.arange(1, count, 2)))),
        down_hi,
        torch.cat((bias_n[::2], bias_n[1::2])),
        # Each rank has a part of the sum; the bias is added once, by the first rank.
        torch.zeros_like(down_bias_h) if weights.shard.rank and units.divided else down_bias_h,
    )


def _fused(weights: Weights) -> bool:
    """Whether experts are fused, one tensor a product. One such tensor is enough: an error then names the other."""
    return any(weights.has(name) for name in ("gate_up_proj", "up_proj", "down_proj"))


def _halves(units: ShardAxis) -> tuple[ShardAxis, ShardAxis]:
    """A rank's part of gate and of up, where gate and up lie one after the other on one axis."""
    whole = 2 * units.whole
    return ShardAxis(whole, units.first, units.count), ShardAxis(whole, units.whole + units.first, units.count)


class TorchExperts:
    """The experts in torch operations: implements `RoutedExperts` with one product an expert."""

    def __init__(self, ups: Sequence[RowExactLinear], downs: Sequence[RowExactLinear], activation: Activation) -> None:
        self._ups, self._downs, self._activation = ups, downs, activation

    def __call__(self, h_th: Tensor, routes: ExpertRoutes, numerics: Numerics) -> Tensor:
        top_k = routes.experts_mk.shape[1]
        experts_tk, turn = routes.experts_mk.sort(-1)
        weights_tk = routes.weights_mk.gather(1, turn)
        order_s = experts_tk.flatten().argsort(stable=True)
        counts = torch.bincount(experts_tk.flatten(), minlength=len(self._ups)).tolist()
        chosen = [expert for expert, count in enumerate(counts) if count]
        sizes = [numerics.padded(counts[expert]) for expert in chosen]

        # Where each of the sorted pairs lies once the rows of every expert are padded.
        place_s = torch.arange(len(order_s), device=h_th.device)
        behind = lacking = 0
        for expert, size in zip(chosen, sizes, strict=True):
            place_s[behind : behind + counts[expert]] += lacking
            behind += counts[expert]
            lacking += size - counts[expert]
        token_s = order_s.new_zeros(behind + lacking).index_copy_(0, place_s, order_s // top_k)
        place_tk = torch.empty_like(order_s).index_copy_(0, order_s, place_s).view(-1, top_k)

        up_sn = self._products(self._ups, h_th.index_select(0, token_s), chosen, sizes, numerics)
        down_sh = self._products(self._downs, self._activation(up_sn), chosen, sizes, numerics)
        sum_th = torch.zeros(h_th.shape, device=h_th.device)
        for place_t, weight_t in zip(place_tk.unbind(1), weights_tk.unbind(1), strict=True):
            sum_th += down_sh.index_select(0, place_t).float().mul_(weight_t.unsqueeze(1))
        return sum_th

    def _products(
        self,
        linears: Sequence[RowExactLinear],
        x_sk: Tensor,
        chosen: Sequence[int],
        sizes: list[int],
        numerics: Numerics,
    ) -> Tensor:
        parts = zip(chosen, torch.split(x_sk, sizes), strict=True)
        return torch.cat([numerics.linear(part, linears[expert]) for expert, part in parts])
