"""The draft layers: of multi-token prediction (DeepSeek-V3, arXiv 2412.19437), and of EAGLE-3 (arXiv 2503.01840).

Both are one layer of a decoder that reads a token and a feature (`engine.layers.decoder`). The first is behind the last
layer of its own checkpoint; the feature is the model's last hidden state. The second was trained for a model that knows
nothing of it: the feature is made of what three of its layers read, and the layer's keys and values have sizes of their
own, so they are in buffers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinpool.cache.pool.pool_set import GateDoor, LayerBuffers
from twinpool.engine.layers.decoder import DraftLayer, ForwardContext, Layer, Norm, Sublayer
from twinpool.engine.tensors.row_exact_linear import RowExactLinear

DRAFT_POOL = "draft"
"""The name by which the attention of an EAGLE-3 layer knows the pool that its buffers are in."""
OWN = "draft_"
"""What the names of these buffers begin with."""


@dataclass(frozen=True)
class MtpLayer(DraftLayer):
    """The layer of a checkpoint that predicts further tokens; a layer like those of its model."""

    token_norm: Norm
    feature_norm: Norm
    joined: RowExactLinear
    """Of the normed embedding and the normed feature, one behind the other: [2 * hidden] to [hidden]."""
    layer: Layer
    norm: Norm
    """Of the layer's output: what comes out stands for the feature of the position."""

    def features(self, hidden: Sequence[Tensor], ctx: ForwardContext) -> Tensor:
        return hidden[0]

    def __call__(self, embedded_mh: Tensor, features_mh: Tensor, ctx: ForwardContext) -> Tensor:
        joined_mk = torch.cat((self.token_norm(embedded_mh), self.feature_norm(features_mh)), dim=1)
        return self.norm(self.layer(ctx.linear(joined_mk, self.joined), ctx))

    def normed(self, features_mh: Tensor) -> Tensor:
        return features_mh


@dataclass(frozen=True)
class Eagle3Layer(DraftLayer):
    """The layer of an EAGLE-3 head: a Llama layer whose attention reads embedding and feature, one behind the other,
    and whose residual stream is the feature."""

    joined: RowExactLinear
    """Of the tapped hidden states, one behind the other: [taps * hidden] to [width]."""
    token_norm: Norm
    feature_norm: Norm
    attention: Sublayer
    mlp_norm: Norm
    mlp: Sublayer
    norm: Norm
    """Before the head."""

    def features(self, hidden: Sequence[Tensor], ctx: ForwardContext) -> Tensor:
        return ctx.linear(torch.cat(list(hidden), dim=1), self.joined)

    def __call__(self, embedded_mh: Tensor, features_mh: Tensor, ctx: ForwardContext) -> Tensor:
        plans, doors = ctx.plans[self.pool], OwnBuffers(ctx.doors[self.pool])
        ctx = replace(ctx, plans={DRAFT_POOL: plans}, doors={DRAFT_POOL: doors})
        read_mk = torch.cat((self.token_norm(embedded_mh), self.feature_norm(features_mh)), dim=1)
        x_mh = features_mh + self.attention(read_mk, ctx)
        return x_mh + self.mlp(self.mlp_norm(x_mh), ctx)

    def normed(self, features_mh: Tensor) -> Tensor:
        return self.norm(features_mh)


class OwnBuffers:
    """Implements `cache.pool.pool_set.GateDoor` by the draft layer's own buffers of a pool, under the names that
    attention has for them."""

    def __init__(self, door: GateDoor) -> None:
        self._door = door

    def layer(self, layer: int) -> LayerBuffers:
        buffers = self._door.layer(layer)
        return {name.removeprefix(OWN): view for name, view in buffers.items() if name.startswith(OWN)}
