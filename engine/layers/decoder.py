"""The decoder that all models share: embedding, layers, final norm, logits; and the forward context, what its layers
are given in one step besides the activations.

Activations are [M, hidden]: the tokens of all sequences packed on one axis, T of them, padded to the numerics'
quantum with rows that are computed like the rest and written nowhere. Every operation on activations is by row. State
is read and written through the load gates only, one layer of one pool at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from twinpool.cache.pool.load_gate import GateDoor, LayerBuffers
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan
from twinpool.engine.layers.norm import add_rms_norm, rms_norm
from twinpool.engine.native.current_kernels import using
from twinpool.engine.native.layer_kernels import LayerKernels
from twinpool.engine.tensors.row_exact_linear import Numerics, RowExactLinear, tanh
from twinpool.engine.tensors.tensor_parallel import ALONE, TensorParallelGroup

if TYPE_CHECKING:
    from twinpool.engine.layers.rope import RopeTable


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer of the model keeps its state: the pool's name, and which of the pool's layers it is."""

    pool: str
    layer: int


@dataclass
class ForwardContext:
    """The context of one step."""

    numerics: Numerics
    attention: AttentionBackend
    positions_m: Tensor
    """[M] int64: absolute positions; 0 for padding."""
    longest: int
    """The largest position plus one."""
    count: int
    """T: rows that are tokens; the other M - T are padding."""
    plans: Mapping[str, AttentionPlan]
    """The attention plans of full and window pools, by name."""
    slots: Mapping[str, SlotPlan]
    """The slot plans of state pools, by name."""
    doors: Mapping[str, GateDoor]
    """The doors of the load gates of all pools, by name."""
    ranks: TensorParallelGroup = ALONE
    passed: Callable[[], None] | None = None
    """To be called, if any, after each layer of the model: what it writes of the state is written, or on its way
    there."""
    scratch: dict[Any, Any] = field(default_factory=dict)
    """Values that a layer leaves for later layers of the same step, such as selections."""

    def linear(self, x_mk: Tensor, linear: RowExactLinear) -> Tensor:
        """Compute a product of padded rows; summed over ranks where each rank has a part of it."""
        out = self.numerics.linear(x_mk, linear) if self.numerics.tiled else linear.product(x_mk)
        return self.sum(out) if linear.partial else out

    def sum(self, x: Tensor) -> Tensor:
        """Sum every rank's `x`, adding in the order of the ranks."""
        return self.ranks.sum(x)

    def buffers(self, place: LayerPlace) -> LayerBuffers:
        """Return a layer's buffers by name, after the loads that they are waiting for."""
        return self.doors[place.pool].layer(place.layer)

    def rope(self, table: RopeTable) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of the step's positions, [M, 1, rope_dim] each; looked up once a step."""
        key = ("rope", id(table))
        if key not in self.scratch:
            self.scratch[key] = table.at(self.positions_m, self.longest)
        found: tuple[Tensor, Tensor] = self.scratch[key]
        return found

    def padded(self, x_tn: Tensor) -> Tensor:
        """Append the padding rows (zeros) to the T rows of tokens again: [M, ...]."""
        lacking = len(self.positions_m) - len(x_tn)
        return torch.cat((x_tn, x_tn.new_zeros(lacking, *x_tn.shape[1:]))) if lacking else x_tn


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


Norm = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    """The norm of a layer that has none in some place."""
    return x


@dataclass(frozen=True)
class NormedLayer:
    """A layer that computes x + f * n2(mixer(n1(x))), then x + f * n4(mlp(n3(x))): norms before its parts, behind them,
    or both, and a factor on what they add."""

    before_mixer: Norm
    mixer: Sublayer
    after_mixer: Norm
    before_mlp: Norm
    mlp: Sublayer
    after_mlp: Norm
    factor: float = 1.0

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        x_mh = x_mh + self._scaled(self.after_mixer(self.mixer(self.before_mixer(x_mh), ctx)))
        return x_mh.add_(self._scaled(self.after_mlp(self.mlp(self.before_mlp(x_mh), ctx))))

    def _scaled(self, added_mh: Tensor) -> Tensor:
        return added_mh if self.factor == 1.0 else added_mh * self.factor


@dataclass(frozen=True)
class ParallelLayer:
    """A layer that computes x + mixer(norm(x)) + mlp(norm(x)), one norm for both."""

    norm: Norm
    mixer: Sublayer
    mlp: Sublayer

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        normed_mh = self.norm(x_mh)
        return (x_mh + self.mixer(normed_mh, ctx)).add_(self.mlp(normed_mh, ctx))


@dataclass
class Decoder:
    """A model's weights, and the computation of one step with them."""

    embed_vh: Tensor | RowExactLinear
    """The embedding [vocab, hidden]; in blocks, a product of whose rows are unpacked when they are looked up."""
    layers: Sequence[Layer]
    norm: Norm
    """The norm of the last layer's output, before the head."""
    head: RowExactLinear
    embed_scale: float | None = None
    """What rows of the embedding are multiplied with; the product is rounded to their dtype, the factor isn't."""
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    """Logits are squeezed to plus or minus this by a hyperbolic tangent; 0: not at all."""
    kernels: LayerKernels | None = None
    """The kernels that layers use; None: torch's operations alone."""
    prepare: Callable[[Tensor, Tensor, ForwardContext], None] | None = None
    """Called first with tokens [M] and embeddings [M, hidden]; leaves further inputs of layers in the scratch."""

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_vh.dtype

    def forward(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute a step's tokens ([M] int64) and write their state; returns the last layer's output, [M, hidden]."""
        with using(self.kernels):
            x_mh = self.embed_vh[tokens_m]
            if self.embed_scale is not None:
                x_mh = x_mh * self.embed_scale
            if self.prepare is not None:
                self.prepare(tokens_m, x_mh, ctx)
            for layer in self.layers:
                x_mh = layer(x_mh, ctx)
                if ctx.passed is not None:
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
