"""The decoder that all models share: embedding, layers, final norm, logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twinpool.engine.layers.forward_context import ForwardContext
from twinpool.engine.layers.norm import add_rms_norm, rms_norm
from twinpool.engine.native.current_kernels import using
from twinpool.engine.native.layer_kernels import LayerKernels
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear, tanh


class Layer(Protocol):
    """One layer of a model."""

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        """The residual stream after this layer, [M, hidden]; `x_mh` may be changed."""


Sublayer = Callable[[Tensor, ForwardContext], Tensor]


@dataclass(frozen=True)
class PreNormLayer:
    """A layer that computes x + mixer(norm(x)), then x + mlp(norm(x)), as Llama and most later models do."""

    input_norm_h: Tensor
    mixer: Sublayer
    mlp_norm_h: Tensor
    mlp: Sublayer
    eps: float

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        mixed_mh = self.mixer(rms_norm(x_mh, self.input_norm_h, self.eps), ctx)
        x_mh, normed_mh = add_rms_norm(x_mh, mixed_mh, self.mlp_norm_h, self.eps)
        return x_mh.add_(self.mlp(normed_mh, ctx))


@dataclass
class Decoder:
    """A model's weights, and the computation of one step with them."""

    embed_vh: Tensor
    layers: Sequence[Layer]
    norm: Callable[[Tensor], Tensor]
    """The norm of the last layer's output, before the head."""
    head: RowExactLinear
    embed_scale: float | None = None
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    """Logits are squeezed to plus or minus this by a hyperbolic tangent; 0: not at all."""
    kernels: LayerKernels | None = None
    """The kernels that layers use; None: torch's operations alone."""
    prepare: Callable[[Tensor, Tensor, ForwardContext], None] | None = None
    """Called first with tokens [M] and embeddings [M, hidden]; leaves further inputs of layers in the scratch."""

    def __post_init__(self) -> None:
        if self.embed_scale is not None:
            self.embed_scale = float(torch.tensor(self.embed_scale, dtype=self.dtype))  # as transformers rounds it

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_vh.dtype

    def forward(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute a step's tokens ([M] int64) and write their state; returns the last layer's output, [M, hidden]."""
        x_mh = self.embed_vh[tokens_m]
        if self.embed_scale is not None:
            x_mh = x_mh * self.embed_scale
        with using(self.kernels):
            if self.prepare is not None:
                self.prepare(tokens_m, x_mh, ctx)
            for layer in self.layers:
                x_mh = layer(x_mh, ctx)
                ctx.passed()
        return x_mh

    def logits(self, x_nh: Tensor, numerics: Numerics) -> Tensor:
        """Compute the logits of some rows [n, hidden] of `forward`'s result: [n, vocab] float32."""
        rows = len(x_nh)
        padded = numerics.padded(rows)
        if padded > rows:
            x_nh = torch.cat((x_nh, x_nh.new_zeros(padded - rows, x_nh.shape[1])))
        with using(self.kernels):
            logits_nv = numerics.linear(self.norm(x_nh), self.head)[:rows].float()
        if self.logits_scale != 1.0:
            logits_nv = logits_nv * self.logits_scale
        if self.logits_softcap:
            logits_nv = tanh(logits_nv / self.logits_softcap).mul_(self.logits_softcap)
        return logits_nv
