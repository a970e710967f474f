"""Routers and experts of a mixture: which experts a token goes to, and with which weights in its sum; the experts'
activations, the reading of their weights, and their computation in torch.

Routers are row-exact: a row's experts and weights are the same bits in any batch. Ties are broken by `torch.topk`,
which looks at each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.engine.layers.decoder import ForwardContext
from twinpool.engine.layers.norm import gelu_tanh, rms_norm, sigmoid
from twinpool.engine.native.current_kernels import kernels_for
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear, silu
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

    def of(self, here: range) -> ExpertRoutes:
        """The routes as the rank sees them that holds the experts `here`: counted from its first one; an expert of
        another rank is number ``len(here)``, which nobody computes."""
        local_mk = self.experts_mk - here.start
        elsewhere_mk = (local_mk < 0) | (local_mk >= len(here))
        return ExpertRoutes(local_mk.masked_fill_(elsewhere_mk, len(here)), self.weights_mk)


class ExpertRouter(Protocol):
    """What routes a step's tokens."""

    top_k: int
    """Experts of a row."""

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        """Route activations [M, hidden], padding rows included."""


class RoutedExperts(Protocol):
    """The experts that this rank holds."""

    def __call__(self, h_th: Tensor, routes: ExpertRoutes, numerics: Numerics) -> Tensor:
        """Compute each row's weighted sum over these experts, [T, hidden] float32, from rows of tokens [T, hidden] and
        their routes. Expert number ``len(experts)`` is one of another rank: 0 in the sum."""

    def combined(self, down_sh: Tensor, place_tk: Tensor, weights_tk: Tensor) -> Tensor:
        """Add up each row's outputs of its experts, [T, hidden] float32. `down_sh`: outputs, [S, hidden]; `place_tk`:
        where those of a row's experts are, in the order in which they are added; `weights_tk`: their weights."""


class SoftmaxRouter:
    """The router by a softmax over all experts, of which the `top_k` likeliest are chosen (Qwen's, Mixtral's)."""

    def __init__(
        self, weights: Weights, sizes: ExpertSizes, top_k: int, *, normalise: bool, rounded: bool = True
    ) -> None:
        """`normalise`: the weights of the chosen experts are scaled to add up to 1. `rounded`: they are rounded to the
        model's dtype."""
        self._linear = weights.linear({"gate": sizes.experts}, sizes.hidden)
        self.top_k, self._normalise, self._rounded = top_k, normalise, rounded

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        chosen = ctx.linear(h_mh, self._linear).float().softmax(-1).topk(self.top_k)
        weights_mk = chosen.values
        if self._normalise:
            weights_mk = weights_mk / weights_mk.sum(-1, keepdim=True)
        return ExpertRoutes(chosen.indices, weights_mk.to(h_mh.dtype).float() if self._rounded else weights_mk)


class ScaledSoftmaxRouter:
    """The router by a softmax over all experts, of the normed and scaled input; the weights of the chosen are scaled to
    add up to 1, then multiplied by a learned factor of each expert (Gemma 4's)."""

    def __init__(self, weights: Weights, sizes: ExpertSizes, top_k: int, eps: float) -> None:
        """Reads its tensors below ``router.``."""
        mine = weights.scope("router.")
        self._linear = mine.linear({"proj": sizes.experts}, sizes.hidden)
        self._scale_h = mine.tensor("scale", sizes.hidden)
        self._factor_e = mine.tensor("per_expert_scale", sizes.experts, dtype=torch.float32)
        self._ones_h = torch.ones(sizes.hidden, device=weights.device)
        self.top_k, self._root, self._eps = top_k, sizes.hidden**-0.5, eps

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        scaled_mh = rms_norm(h_mh, self._ones_h, self._eps).mul_(self._scale_h).mul_(self._root)
        chosen = ctx.linear(scaled_mh, self._linear).float().softmax(-1).topk(self.top_k)
        weights_mk = chosen.values / chosen.values.sum(-1, keepdim=True)
        return ExpertRoutes(chosen.indices, weights_mk.mul_(self._factor_e[chosen.indices]))


class ChosenSoftmaxRouter:
    """The router by the `top_k` largest logits, with a softmax over those alone (gpt-oss's)."""

    def __init__(
        self, weights: Weights, sizes: ExpertSizes, top_k: int, *, bias: bool = True, name: str = "router"
    ) -> None:
        self._linear = weights.linear({name: sizes.experts}, sizes.hidden, bias=bias)
        self.top_k = top_k

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        chosen = ctx.linear(h_mh, self._linear).topk(self.top_k)
        weights_mk = chosen.values.float().softmax(-1)
        return ExpertRoutes(chosen.indices, weights_mk.to(h_mh.dtype).float())


def softmax(x: Tensor) -> Tensor:
    """The softmax over the last axis."""
    return x.softmax(-1)


CORRECTION = "gate.e_score_correction_bias"
"""How DeepSeek names the correction of a router's scores."""


@dataclass(frozen=True, slots=True)
class RouterRules:
    """How `ScoreRouter` makes scores, and of them a choice and weights."""

    score: Callable[[Tensor], Tensor] = sigmoid
    """From logits [M, experts], float32."""
    groups: int = 1
    top_groups: int = 1
    """Only experts of so many of the groups may be chosen."""
    rated_by: int = 2
    """A group is rated by the sum of so many of its best scores."""
    normalise: bool = True
    """Whether the weights of the chosen experts are scaled to add up to 1, plus `least`."""
    least: float = 1e-20
    scale: float = 1.0

    @classmethod
    def of(cls, config: JsonFields) -> RouterRules:
        """Read DeepSeek's keys."""
        return cls(
            groups=config.size("n_group", 1),
            top_groups=config.size("topk_group", 1),
            normalise=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
        )


class ScoreRouter:
    """The router by a score of each expert, with a learned correction and a choice of groups first (DeepSeek's).

    Experts are chosen by corrected score, among those of the best groups, which are rated by corrected scores. The
    weight of a chosen expert is its score without the correction. Scores are computed in float32 whatever the model's
    dtype. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """

    def __init__(
        self,
        weights: Weights,
        sizes: ExpertSizes,
        top_k: int,
        rules: RouterRules,
        *,
        name: str = "gate",
        correction: str | Tensor = CORRECTION,
    ) -> None:
        """`correction`: the correction [experts], float32, or its name; empty: there is none. Raises `CheckpointError`
        where the experts don't divide into groups that can be rated."""
        groups, experts, best = rules.groups, sizes.experts, rules.rated_by
        if groups > 1 and (experts % groups or experts // groups < best or not 0 < rules.top_groups <= groups):
            text = f"{rules.top_groups} of {groups} groups can't be chosen among {experts} experts"
            raise weights.spec.config.refuse(f"{text}; a group has {best} or more")
        if top_k > rules.top_groups * experts // groups:
            raise weights.spec.config.refuse(
                f"{rules.top_groups} groups of {groups} don't have {top_k} of {experts} experts"
            )
        self._linear = weights.made(weights.tensor(f"{name}.weight", experts, sizes.hidden, dtype=torch.float32))
        self._correction_e: Tensor | None = None
        if isinstance(correction, Tensor):
            self._correction_e = correction
        elif correction:
            self._correction_e = weights.tensor(correction, experts, dtype=torch.float32)
        self.top_k, self._rules = top_k, rules

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> ExpertRoutes:
        scores_me = self._rules.score(ctx.linear(h_mh.float(), self._linear))
        corrected_me = scores_me if self._correction_e is None else scores_me + self._correction_e
        experts_mk = self._in_groups(corrected_me).topk(self.top_k, sorted=False).indices
        weights_mk = scores_me.gather(1, experts_mk)
        if self._rules.normalise:
            weights_mk = weights_mk / (weights_mk.sum(-1, keepdim=True) + self._rules.least)
        return ExpertRoutes(experts_mk, weights_mk * self._rules.scale)

    def _in_groups(self, scores_me: Tensor) -> Tensor:
        """The scores, set to minus infinity outside the best groups."""
        rules = self._rules
        if rules.top_groups == rules.groups:
            return scores_me
        scores_mge = scores_me.view(len(scores_me), rules.groups, -1)
        best_mg = scores_mge.topk(rules.rated_by).values.sum(-1).topk(rules.top_groups, sorted=False).indices
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

    def top_k(self, config: JsonFields, key: str = "num_experts_per_tok", default: int | None = None) -> int:
        """Read how many experts a row goes to. Raises `CheckpointError` where there aren't so many."""
        top_k = config.size(key, default)
        if top_k > self.experts:
            raise config.refuse(f"{key} {top_k} is more than the {self.experts} experts")
        return top_k


ExpertReader = Callable[[Weights, int, ExpertSizes, ShardAxis], ExpertWeights]
"""Reads expert `number` below ``experts.``; the axis is the inner units', as divided among ranks."""


_GATED = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
"""How published checkpoints name the weights of an expert with a gate: gate, up and down."""


def plain_expert(weights: Weights, number: int, sizes: ExpertSizes, units: ShardAxis) -> ExpertWeights:
    """Read an expert with a gate: from tensors of its own, as published, or a fused [experts, 2 * inner, hidden]."""
    if not _fused(weights):
        mine = weights.scope(f"{number}.")
        gate, up, down = next((names for names in _GATED if any(mine.has(f"{n}.weight") for n in names)), _GATED[-1])
        gate_up = [mine.weight(name, units, sizes.hidden) for name in (gate, up)]
        return ExpertWeights(mine.stacked(gate_up), mine.weight(down, sizes.hidden, units))
    return fused_expert(weights, number, sizes, units)


def fused_expert(
    weights: Weights,
    number: int,
    sizes: ExpertSizes,
    units: ShardAxis,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> ExpertWeights:
    """Read an expert with a gate from tensors of all: [experts, 2 * inner, hidden], gate before up, and [experts,
    hidden, inner]."""
    one = ShardAxis(sizes.experts, number, 1)
    fused = [weights.tensor(names[0], one, part, sizes.hidden)[0] for part in _halves(units)]
    return ExpertWeights(
        weights.kept(torch.cat(fused)), weights.kept(weights.tensor(names[1], one, sizes.hidden, units)[0], units)
    )


def transposed_expert(weights: Weights, number: int, sizes: ExpertSizes, units: ShardAxis) -> ExpertWeights:
    """Read an expert as `plain_expert` does, or from tensors of all that are transposed, as Qwen3-VL is published:
    [experts, hidden, 2 * inner] and [experts, inner, hidden]."""
    if sizes.inner == sizes.hidden or weights.shape("down_proj") != (sizes.experts, sizes.inner, sizes.hidden):
        return plain_expert(weights, number, sizes, units)
    one = ShardAxis(sizes.experts, number, 1)
    gate_up = [weights.tensor("gate_up_proj", one, sizes.hidden, part)[0].T for part in _halves(units)]
    down_hi = weights.tensor("down_proj", one, units, sizes.hidden)[0].T.contiguous()
    return ExpertWeights(weights.kept(torch.cat(gate_up)), weights.kept(down_hi, units))


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
    """The experts in torch operations: implements `RoutedExperts` with one product an expert. Expert number
    ``len(ups)`` is one of another rank: 0 in the sum."""

    def __init__(self, ups: Sequence[RowExactLinear], downs: Sequence[RowExactLinear], activation: Activation) -> None:
        self._ups, self._downs, self._activation = ups, downs, activation

    def __call__(self, h_th: Tensor, routes: ExpertRoutes, numerics: Numerics) -> Tensor:
        top_k = routes.experts_mk.shape[1]
        experts_tk, turn = routes.experts_mk.sort(-1)
        weights_tk = routes.weights_mk.gather(1, turn)
        order_s = experts_tk.flatten().argsort(stable=True)
        counts = torch.bincount(experts_tk.flatten(), minlength=len(self._ups)).tolist()[: len(self._ups)]
        chosen = [expert for expert, count in enumerate(counts) if count]
        if not chosen:
            return torch.zeros(h_th.shape, device=h_th.device)
        sizes = [numerics.padded(counts[expert]) for expert in chosen]

        # Where each of the sorted pairs lies once the rows of every expert are padded.
        place_s = torch.arange(len(order_s), device=h_th.device)
        behind = lacking = 0
        for expert, size in zip(chosen, sizes, strict=True):
            place_s[behind : behind + counts[expert]] += lacking
            behind += counts[expert]
            lacking += size - counts[expert]
        rows = behind + lacking
        token_s = order_s.new_zeros(rows).index_copy_(0, place_s[:behind], order_s[:behind] // top_k)
        place_s[behind:] = rows  # Those of other ranks: a row of zeros behind all others.
        place_tk = torch.empty_like(order_s).index_copy_(0, order_s, place_s).view(-1, top_k)

        up_sn = self._products(self._ups, h_th.index_select(0, token_s), chosen, sizes, numerics)
        down_sh = self._products(self._downs, self._activation(up_sn), chosen, sizes, numerics)
        if behind < len(order_s):
            down_sh = torch.cat((down_sh, down_sh.new_zeros(1, down_sh.shape[1])))
        return self.combined(down_sh, place_tk, weights_tk)

    def combined(self, down_sh: Tensor, place_tk: Tensor, weights_tk: Tensor) -> Tensor:
        sum_th = torch.zeros(len(place_tk), down_sh.shape[1], device=down_sh.device)
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
