"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from twinpool.engine.layers.forward_context import ForwardContext
from twinpool.engine.layers.norm import silu
from twinpool.engine.native.current_kernels import kernels_for
from twinpool.engine.tensors.weight_loader import Weights


class PlainMlp:
    """The feed-forward layer down(activation(up(x))), without a gate; its inner units are divided among ranks."""

    def __init__(
        self, weights: Weights, hidden: int, inner: int, activation: Callable[[Tensor], Tensor], *, bias: bool = False
    ) -> None:
        """`activation` takes and returns the model's dtype; it may change its argument."""
        units = weights.shard.axis(inner, what="inner units")
        self._up = weights.linear({"up_proj": units}, hidden, bias=bias)
        self._down = weights.linear({"down_proj": hidden}, units, bias=bias)
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
    ) -> None:
        """`activation` takes and returns float32; it may change its argument."""
        units = weights.shard.axis(inner, what="inner units")
        self._gate_up = weights.linear({"gate_proj": units, "up_proj": units}, hidden, bias=bias)
        self._down = weights.linear({"down_proj": hidden}, units, bias=bias)
        self._activation = activation

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        gate_up = ctx.linear(h_mh, self._gate_up)
        kernels = kernels_for(gate_up)
        if kernels is not None and self._activation is silu:
            return ctx.linear(kernels.silu_product(gate_up), self._down)
        gate, up = gate_up.chunk(2, dim=-1)
        activated = self._activation(gate.float()).to(gate.dtype)
        return ctx.linear(activated.mul_(up), self._down)
