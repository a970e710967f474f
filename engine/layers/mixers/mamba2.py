"""Mamba-2 (arXiv 2405.21060) as in Falcon-H1 and Nemotron-H: a convolution, a recurrence with scalar decays, a norm.

In the words of linear attention (engine/attention/recurrence_backend.py), C is the query, B is the key, and an input
multiplied by its time step is the value; heads of one group share B and C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.engine.attention.recurrence_backend import ScanState, scan_buffers
from twinpool.engine.layers.forward_context import ForwardContext, LayerPlace
from twinpool.engine.layers.mixers.causal_conv import CausalConv, conv_buffer
from twinpool.engine.layers.norm import silu, softplus, square_sum
from twinpool.engine.tensors.shard import Shard, ShardAxis
from twinpool.engine.tensors.weight_loader import Weights

_CONVS = ("conv_x", "conv_b", "conv_c")


@dataclass(frozen=True)
class MambaShape:
    """The numbers of a model's Mamba-2 layers, which all have the same."""

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    """Positions that an output of the convolution depends on, its own included."""
    eps: float
    in_bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    normed: bool = True
    """Whether the output is normed by group and gated; else it is gated only."""
    norm_first: bool = False
    """Whether the gate comes after the norm, not before it."""
    time_limit: tuple[float, float] = (0.0, float("inf"))
    """Time steps are clamped to this range."""
    multipliers: tuple[float, ...] = (1.0,) * 5
    """Factors on the input projection's gates, inputs, B, C and time steps, in this order."""

    def check(self, config: JsonFields) -> None:
        """Raise `CheckpointError` for numbers that no layer can have."""
        if self.heads % self.groups:
            raise config.refuse(f"{self.heads} Mamba heads do not divide among {self.groups} groups")
        if self.kernel < 2:
            raise config.refuse("the Mamba convolution must see 2 positions or more")


def mamba_buffers(layers: int, shape: MambaShape, dtype: torch.dtype, shard: Shard) -> tuple[BufferSpec, ...]:
    """Declare the buffers of `layers` layers: inputs of the convolution in the model's `dtype`, the rest in float32."""
    units = (shape.heads, shape.groups, shape.groups)
    dims = (shape.head_dim, shape.state_dim, shape.state_dim)
    convs = (
        conv_buffer(name, layers, count, dim, shape.kernel - 1, dtype, shard)
        for name, count, dim in zip(_CONVS, units, dims, strict=True)
    )
    scan = scan_buffers(layers, shape.heads, shape.groups, shape.state_dim, shape.head_dim, delta=False, shard=shard)
    return *convs, *scan


class Mamba2:
    """The mixer of a Mamba-2 layer."""

    def __init__(self, weights: Weights, place: LayerPlace, shape: MambaShape) -> None:
        self._place, self._shape, shard = place, shape, weights.shard
        heads = shard.axis(shape.heads, shape.head_dim, "Mamba heads")
        groups = shard.axis(shape.groups, shape.state_dim, "groups of Mamba heads")
        times = shard.axis(shape.heads)
        rows = _ranges([heads, heads, groups, groups, times])
        self._widths = [part.count for part in rows]
        weight_nk = torch.cat([weights.tensor("in_proj.weight", part, shape.hidden) for part in rows])
        bias_n = torch.cat([weights.tensor("in_proj.bias", part) for part in rows]) if shape.in_bias else None
        self._in = weights.made(weight_nk, bias_n)
        parts = zip(shape.multipliers, self._widths, strict=True)
        self._scale_n = torch.cat([weight_nk.new_full((width,), factor) for factor, width in parts])
        self._scaled = any(factor != 1.0 for factor in shape.multipliers)
        channels = _ranges([heads, groups, groups])
        conv = weights.scope("conv1d.")
        self._conv = CausalConv(conv, place, _CONVS, channels, shape.kernel, bias=shape.conv_bias)
        self._rate_h = -weights.tensor("A_log", times).float().exp()
        self._time_bias_h = weights.tensor("dt_bias", times)
        self._skip_h1 = weights.tensor("D", times).float().unsqueeze(1)
        self._norm = _GroupNorm(weights, shape, heads) if shape.normed else None
        self._out = weights.linear({"out_proj": shape.hidden}, heads, bias=shape.out_bias)

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        shape, rows = self._shape, ctx.linear(h_mh, self._in)[: ctx.count]
        if self._scaled:
            rows = rows * self._scale_n
        gate, xbc, time = torch.split(rows, [self._widths[0], sum(self._widths[1:4]), self._widths[4]], dim=1)
        x, b, c = torch.split(self._conv(xbc, ctx).float(), self._widths[1:4], dim=1)
        x_thd = x.reshape(len(x), -1, shape.head_dim)
        # Rounded to the model's dtype where transformers rounds.
        time_th = softplus((time + self._time_bias_h).float()).to(rows.dtype).float().clamp_(*shape.time_limit)
        q_tgk, k_tgk = (part.reshape(len(part), -1, shape.state_dim) for part in (c, b))
        state, plan = ScanState.of(ctx.buffers(self._place)), ctx.slots[self._place.pool]
        v_thd = x_thd * time_th.unsqueeze(2)
        out = ctx.attention.recurrence.scan(q_tgk, k_tgk, v_thd, time_th * self._rate_h, None, state, plan)
        out_tn = out.add_(x_thd * self._skip_h1).flatten(1)
        opened = silu(gate.float())
        if self._norm is None:
            out_tn = out_tn.mul_(opened.to(rows.dtype))
        elif shape.norm_first:
            out_tn = self._norm(out_tn, ctx).mul_(opened)
        else:
            out_tn = self._norm(out_tn.to(rows.dtype) * opened, ctx)
        return ctx.linear(ctx.padded(out_tn.to(rows.dtype)), self._out)


class _GroupNorm:
    """Root-mean-square norm of each group of heads, in float32; a group may lie on several ranks."""

    def __init__(self, weights: Weights, shape: MambaShape, heads: ShardAxis) -> None:
        self._weight_n = weights.tensor("norm.weight", heads).float()
        self._eps, self._groups = shape.eps, shape.groups
        self._size = heads.whole // shape.groups
        self._here = range(heads.first // self._size, -(-(heads.first + heads.count) // self._size))
        self._split = heads.count % self._size != 0

    def __call__(self, x_tn: Tensor, ctx: ForwardContext) -> Tensor:
        x_tgn = x_tn.view(len(x_tn), len(self._here), -1)
        squares_tg = square_sum(x_tgn)
        if self._split:
            all_tg = squares_tg.new_zeros(len(x_tn), self._groups)
            all_tg[:, self._here.start : self._here.stop] = squares_tg
            squares_tg = ctx.sum(all_tg)[:, self._here.start : self._here.stop]
        factor_tg = squares_tg.div_(self._size).add_(self._eps).rsqrt_()
        return (x_tgn * factor_tg.unsqueeze(2)).flatten(1).mul_(self._weight_n)


def time_limit(config: JsonFields) -> tuple[float, float]:
    """Read the least and the largest time step, by the key `time_step_limit`."""
    low, high = numbers(config, "time_step_limit", 2, (0.0, float("inf")))
    return low, high


def numbers(config: JsonFields, key: str, count: int, default: tuple[float, ...] = ()) -> tuple[float, ...]:
    """Read `count` numbers under `key`; without the key, `default`, or ones. Raises `CheckpointError` for anything
    else.

    transformers writes an infinite number as ``{"__float__": "Infinity"}``.
    """
    values = config.values.get(key, list(default) or [1.0] * count)
    if isinstance(values, list):
        values = [float("inf") if value == {"__float__": "Infinity"} else value for value in values]
    if not isinstance(values, list) or len(values) != count or not all(isinstance(v, int | float) for v in values):
        raise config.refuse(f"{key} must be {count} numbers, got {values!r}")
    return tuple(float(value) for value in values)


def _ranges(axes: list[ShardAxis]) -> list[ShardAxis]:
    """Turn axes into ranges of one axis on which they lie one after the other."""
    whole, out, at = sum(axis.whole for axis in axes), [], 0
    for axis in axes:
        out.append(ShardAxis(whole, at + axis.first, axis.count))
        at += axis.whole
    return out
