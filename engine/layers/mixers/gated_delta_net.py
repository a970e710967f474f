"""Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next and Qwen3.5: a linear recurrence instead of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.engine.attention.recurrence_backend import ScanState, scan_buffers
from twinpool.engine.layers.forward_context import ForwardContext, LayerPlace
from twinpool.engine.layers.mixers.causal_conv import CausalConv, conv_buffer
from twinpool.engine.layers.norm import rms_norm, sigmoid, silu, softplus, square_sum
from twinpool.engine.tensors.shard import Shard, ShardAxis
from twinpool.engine.tensors.weight_loader import Weights

_L2_EPS = 1e-6
_CONVS = ("conv_q", "conv_k", "conv_v")


@dataclass(frozen=True)
class DeltaShape:
    """The numbers of a model's gated delta layers, which all have the same."""

    hidden: int
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: value head h has the queries and keys of head h // (value_heads // key_heads)."""
    key_dim: int
    value_dim: int
    kernel: int
    """Positions that an output of the convolution depends on, its own included."""

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads


def delta_buffers(layers: int, shape: DeltaShape, dtype: torch.dtype, shard: Shard) -> tuple[BufferSpec, ...]:
    """Declare the buffers of `layers` layers: inputs of the convolution in the model's `dtype`, the rest in float32.

    Queries and keys are divided among ranks by key heads, values by value heads.
    """
    units = (shape.key_heads, shape.key_heads, shape.value_heads)
    dims = (shape.key_dim, shape.key_dim, shape.value_dim)
    convs = (
        conv_buffer(name, layers, count, dim, shape.kernel - 1, dtype, shard)
        for name, count, dim in zip(_CONVS, units, dims, strict=True)
    )
    heads, groups = shape.value_heads, shape.key_heads
    return (*convs, *scan_buffers(layers, heads, groups, shape.key_dim, shape.value_dim, delta=True, shard=shard))


Projection = Callable[[Weights, DeltaShape], list[Tensor]]
"""Reads this rank's weights of queries, keys, values, output gates, write strengths and decays: [rows, hidden] each."""


def separate(weights: Weights, shape: DeltaShape) -> list[Tensor]:
    """The projection of Qwen3.5: ``in_proj_qkv`` (all queries, keys, then values), ``in_proj_z``, ``_b`` and ``_a``."""
    z, b = _axes(shape, weights.shard)[2], weights.shard.axis(shape.value_heads)
    parts = [weights.tensor("in_proj_qkv.weight", part, shape.hidden) for part in _conv_parts(shape, weights.shard)]
    parts.append(weights.tensor("in_proj_z.weight", z, shape.hidden))
    return parts + [weights.tensor(f"in_proj_{name}.weight", b, shape.hidden) for name in "ba"]


def grouped(weights: Weights, shape: DeltaShape) -> list[Tensor]:
    """The projection of Qwen3-Next: ``in_proj_qkvz`` and ``in_proj_ba``, with the rows of a key head together."""
    group, shard = shape.group, weights.shard
    widths = [shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim]
    keys = shard.heads(shape.key_heads, "key heads")
    values = shard.heads(shape.value_heads, "value heads")
    first = values.start - keys.start * group
    heads = slice(first, first + len(values))

    def read(name: str, widths: list[int]) -> list[Tensor]:
        rows = weights.tensor(name, shard.axis(shape.key_heads, sum(widths)), shape.hidden)
        return list(torch.split(rows.view(len(keys), -1, shape.hidden), widths, dim=1))

    q, k, v, z = read("in_proj_qkvz.weight", widths)
    b, a = read("in_proj_ba.weight", [group, group])
    by_head = [part.reshape(len(keys) * group, -1, shape.hidden)[heads] for part in (v, z, b, a)]
    return [part.reshape(-1, shape.hidden) for part in (q, k, *by_head)]


class GatedDelta:
    """The mixer of a gated delta layer."""

    def __init__(
        self, weights: Weights, place: LayerPlace, shape: DeltaShape, eps: float, projection: Projection
    ) -> None:
        self._place, self._shape, self._eps = place, shape, eps
        parts = projection(weights, shape)
        self._widths = [len(part) for part in parts]
        self._in = weights.made(torch.cat(parts))
        conv = weights.scope("conv1d.")
        self._conv = CausalConv(conv, place, _CONVS, _conv_parts(shape, weights.shard), shape.kernel, bias=False)
        heads = weights.shard.axis(shape.value_heads)
        self._rate_h = -weights.tensor("A_log", heads).float().exp()
        self._rate_bias_h = weights.tensor("dt_bias", heads).float()
        self._norm_v = weights.tensor("norm.weight", shape.value_dim)
        self._out = weights.linear({"out_proj": shape.hidden}, _axes(shape, weights.shard)[2])

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        shape, rows = self._shape, ctx.linear(h_mh, self._in)[: ctx.count]
        qkv, z, b, a = torch.split(rows, [sum(self._widths[:3]), *self._widths[3:]], dim=1)
        q, k, v = torch.split(self._conv(qkv, ctx).float(), self._widths[:3], dim=1)
        q_tgk = _unit(q.reshape(len(q), -1, shape.key_dim)).mul_(shape.key_dim**-0.5)
        k_tgk = _unit(k.reshape(len(k), -1, shape.key_dim))
        v_thv = v.reshape(len(v), -1, shape.value_dim)
        # Rounded to the model's dtype where transformers rounds.
        beta_th = sigmoid(b.float()).to(rows.dtype).float()
        decay_th = softplus(a.float() + self._rate_bias_h).mul_(self._rate_h)
        state, plan = ScanState.of(ctx.buffers(self._place)), ctx.slots[self._place.pool]
        out = ctx.attention.recurrence.scan(q_tgk, k_tgk, v_thv, decay_th, beta_th, state, plan)
        normed = rms_norm(out.to(rows.dtype), self._norm_v, self._eps)
        gated = silu(z.float()).view_as(normed).mul_(normed)
        return ctx.linear(ctx.padded(gated.to(rows.dtype).flatten(1)), self._out)


def _axes(shape: DeltaShape, shard: Shard) -> tuple[ShardAxis, ShardAxis, ShardAxis]:
    keys = shard.axis(shape.key_heads, shape.key_dim, "key heads")
    return keys, keys, shard.axis(shape.value_heads, shape.value_dim, "value heads")


def _conv_parts(shape: DeltaShape, shard: Shard) -> list[ShardAxis]:
    """This rank's queries, keys and values, as ranges of the axis on which all of them lie one after the other."""
    axes = _axes(shape, shard)
    whole, parts, at = sum(axis.whole for axis in axes), [], 0
    for axis in axes:
        parts.append(ShardAxis(whole, at + axis.first, axis.count))
        at += axis.whole
    return parts


def _unit(x: Tensor) -> Tensor:
    """Scale each row of the last axis to length one."""
    return x * square_sum(x).unsqueeze(-1).add_(_L2_EPS).rsqrt_()
