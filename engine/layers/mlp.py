"""Feed-forward layers: dense ones, and a mixture of experts, in which each token goes to a few of many such layers.

The tokens of a step are sorted by expert, each expert computes its tokens in one product, and each token adds up the
outputs of its experts. So a decode step reads the weights of the chosen experts only, and a long prefill is one large
product an expert.

Experts that are spread over ranks: every rank routes all tokens and computes those of its own experts, and the ranks
add up their sums, as they do those over inner units. Data-parallel ranks have tokens of their own each, and compute
their experts for the tokens of all (`engine.layers.moe.expert_group`).

Rows stay exact: an expert's rows are padded to the numerics' quantum like any batch (the products of all experts of a
model have one shape, which the probe has tried), and a row's outputs are weighted and added in float32 in the order of
its experts' numbers. Neither depends on the rest of the batch. Padding rows of the step go to no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twinpool.engine.layers.decoder import ForwardContext, Sublayer
from twinpool.engine.layers.moe.expert_group import HeldExperts, SpreadStep
from twinpool.engine.layers.moe.experts import (
    Activation,
    ExpertReader,
    ExpertRouter,
    ExpertRoutes,
    ExpertSizes,
    ExpertWeights,
    RoutedExperts,
    TorchExperts,
    gated_silu,
    plain_expert,
)
from twinpool.engine.layers.norm import sigmoid
from twinpool.engine.native.current_kernels import kernels_for
from twinpool.engine.tensors.row_exact_linear import Numerics, silu
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.tensors.weight_loader import Weights


class PlainMlp:
    """The feed-forward layer down(activation(up(x))), without a gate; its inner units are divided among ranks."""

    def __init__(
        self,
        weights: Weights,
        hidden: int,
        inner: int,
        activation: Callable[[Tensor], Tensor],
        *,
        bias: bool = False,
        names: tuple[str, str] = ("up_proj", "down_proj"),
    ) -> None:
        """`activation` takes and returns the model's dtype; it may change its argument."""
        units = weights.shard.axis(inner, what="inner units")
        self._up = weights.linear({names[0]: units}, hidden, bias=bias, adapts=True)
        self._down = weights.linear({names[1]: hidden}, units, bias=bias, adapts=True)
        self._activation = activation

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.linear(self._activation(ctx.linear(h_mh, self._up)), self._down)


class GatedMlp:
    """The feed-forward layer down(activation(gate(x)) * up(x)); its inner units are divided among ranks."""

    def __init__(
        self,
        weights: Weights,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = silu,
        fused: str = "",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """`activation` takes and returns float32; it may change its argument. `fused`: the name of one weight that has
        the rows of the gate, then those of `up_proj`. `names`: those of gate, up and down."""
        units = weights.shard.axis(inner, what="inner units")
        self._gate_up = weights.linear({names[0]: units, names[1]: units}, hidden, bias=bias, fused=fused, adapts=True)
        self._down = weights.linear({names[2]: hidden}, units, bias=bias, adapts=True)
        self._activation = activation

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        gate_up = ctx.linear(h_mh, self._gate_up)
        kernels = kernels_for(gate_up)
        if kernels is not None and self._activation is silu:
            return ctx.linear(kernels.silu_product(gate_up), self._down)
        gate, up = gate_up.chunk(2, dim=-1)
        activated = self._activation(gate.float()).to(gate.dtype)
        return ctx.linear(activated.mul_(up), self._down)


class MixtureOfExperts:
    """The feed-forward layer that sums weight * expert(x) over a token's experts, plus a shared expert if any."""

    def __init__(
        self,
        weights: Weights,
        router: ExpertRouter,
        sizes: ExpertSizes,
        *,
        read: ExpertReader = plain_expert,
        below: str = "experts.",
        activation: Activation = gated_silu,
        shared: Sublayer | None = None,
    ) -> None:
        """Reads the experts below the prefix `below`, divided or spread among ranks. The output of `shared` is added
        without a weight."""
        self._router, self._shared = router, shared
        here = weights.experts(sizes.experts)
        self._here = here if len(here) < sizes.experts else None
        self.spread = weights.shard.dp > 1
        """Whether its experts are spread over workers that share them."""
        over_ranks = self._here is not None and not self.spread
        whole = ShardAxis(sizes.inner, 0, sizes.inner)
        units = whole if over_ranks else weights.shard.axis(sizes.inner, what="inner units of an expert")
        self._partial = over_ranks or units.divided
        mine = weights.scope(below)
        experts = [read(mine, number, sizes, units) for number in here]
        self._experts = (_triton if weights.triton else _torch)(weights, experts, activation)
        self._hidden = sizes.hidden
        weights.mixtures.append(self)

    def __call__(self, h_mh: Tensor, ctx: ForwardContext, routed_by: Tensor | None = None) -> Tensor:
        """Compute [M, hidden]. `routed_by`: the router's input, where it isn't `h_mh`."""
        routes = self._router(h_mh if routed_by is None else routed_by, ctx)
        real = ExpertRoutes(routes.experts_mk[: ctx.count], routes.weights_mk[: ctx.count])
        if ctx.chosen is not None:
            ctx.chosen.append(real.experts_mk)
        if self.spread:
            assert ctx.spread is not None, "experts that others have are computed in a step of all"
            sum_th = ctx.spread.sum(h_mh[: ctx.count], real, self.held, ctx.numerics)
        else:
            if self._here is not None:
                real = real.of(self._here)
            sum_th = self._experts(h_mh[: ctx.count], real, ctx.numerics)
        if self._partial:
            sum_th = ctx.sum(sum_th)
        out_mh = ctx.padded(sum_th.to(h_mh.dtype))
        return out_mh if self._shared is None else out_mh.add_(self._shared(h_mh, ctx))

    def serve(self, step: SpreadStep, like: Tensor, numerics: Numerics) -> None:
        """Take part in a step without tokens of its own: compute the experts here for those of the other ranks. `like`:
        a tensor of the activations' dtype and device."""
        none = ExpertRoutes(
            torch.empty(0, self._router.top_k, dtype=torch.int64, device=like.device),
            torch.empty(0, self._router.top_k, device=like.device),
        )
        step.sum(like.new_empty(0, self._hidden), none, self.held, numerics)

    @property
    def held(self) -> HeldExperts:
        assert self._here is not None, "its experts are spread"
        return HeldExperts(self._here, self._experts)


def _torch(weights: Weights, experts: Sequence[ExpertWeights], activation: Activation) -> RoutedExperts:
    ups = [weights.made(expert.up_nh, bias_n=expert.up_bias_n) for expert in experts]
    downs = [weights.made(expert.down_hi, bias_n=expert.down_bias_h) for expert in experts]
    return TorchExperts(ups, downs, activation)


def _triton(weights: Weights, experts: Sequence[ExpertWeights], activation: Activation) -> RoutedExperts:
    from twinpool.engine.layers.moe.triton_experts import StackedProducts, TritonExperts

    ups = StackedProducts.of([expert.up_nh for expert in experts], [expert.up_bias_n for expert in experts])
    downs = StackedProducts.of([expert.down_hi for expert in experts], [expert.down_bias_h for expert in experts])
    return TritonExperts(ups, downs, activation)


class GatedShared:
    """A shared expert behind a gate of its own: sigmoid(gate(x)) * expert(x) (Qwen's)."""

    def __init__(self, weights: Weights, hidden: int, expert: Sublayer, name: str = "shared_expert_gate") -> None:
        self._gate = weights.linear({name: 1}, hidden)
        self._expert = expert

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        gate_m1 = sigmoid(ctx.linear(h_mh, self._gate).float()).to(h_mh.dtype)
        return self._expert(h_mh, ctx).mul_(gate_m1)
