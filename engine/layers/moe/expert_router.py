"""Routers of mixtures of experts: choose the experts of each token, and their weights in the token's sum.

They are row-exact: a row's experts and weights are the same bits in any batch. Ties are broken by `torch.topk`, which
looks at each row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.engine.layers.forward_context import ForwardContext
from twinpool.engine.layers.norm import rms_norm, sigmoid
from twinpool.engine.tensors.weight_loader import Weights


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
