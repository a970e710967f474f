"""Recurrent mixers: a linear recurrence instead of attention, behind a short causal convolution.

Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next and Qwen3.5; Mamba-2 (arXiv 2405.21060) as in Falcon-H1 and
Nemotron-H: a recurrence with scalar decays, and a norm. In the words of linear attention
(engine/attention/attention_backend.py), Mamba-2's C is the query, B is the key, and an input multiplied by its time
step is the value; heads of one group share B and C. The convolution is depthwise (each channel by itself), over a few
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.engine.attention.attention_backend import ScanState, conv_positions, scan_buffers
from twinpool.engine.layers.decoder import ForwardContext, LayerPlace
from twinpool.engine.layers.norm import rms_norm, sigmoid, softplus, square_sum
from twinpool.engine.tensors.row_exact_linear import silu
from twinpool.engine.tensors.shard import Shard, ShardAxis
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.engine.weight_formats.block_weight import Weight, select_rows


def conv_buffer(
    name: str, layers: int, units: int, width: int, taps: int, dtype: torch.dtype, shard: Shard
) -> BufferSpec:
    """Declare a buffer of the inputs of `units` heads or groups of `width` channels, as a convolution over `taps`
    positions before each needs them: [units, conv_positions(taps), width] a slot.

    Parts of the channels that ranks divide in different ways need a buffer each.
    """
    here = shard.heads(units, "heads of a convolution")
    shape = (len(here), conv_positions(taps), width)
    return BufferSpec(name, layers, shape, dtype, IndexSpace.SLOT, heads=units, first_head=here.start)


class CausalConv:
    """silu(convolution) of one rank's channels, or the convolution alone. The inputs before a step are read from
    buffers of the state pool."""

    def __init__(
        self,
        weights: Weights,
        place: LayerPlace,
        buffers: Sequence[str],
        parts: Sequence[ShardAxis],
        kernel: int,
        *,
        bias: bool,
        activated: bool = True,
    ) -> None:
        """`parts` are the channels of each of `buffers`, as ranges of one axis of all channels."""
        whole = parts[0].whole
        self._activated = activated
        self._place, self._buffers = place, tuple(buffers)
        self._weight_kc = torch.cat([weights.tensor("weight", part, 1, kernel) for part in parts])[:, 0].float().t()
        self._weight_kc = self._weight_kc.contiguous()
        self._bias_c = torch.cat([weights.tensor("bias", part) for part in parts]).float() if bias else None
        assert all(part.whole == whole for part in parts), "the channels are parts of one axis"

    def __call__(self, x_tc: Tensor, ctx: ForwardContext) -> Tensor:
        """Convolve [T, channels] in the model's dtype, without padding; writes the inputs into the slots."""
        buffers = ctx.buffers(self._place)
        states = [buffers[name] for name in self._buffers]
        plan, activated = ctx.slots[self._place.pool], self._activated
        return ctx.attention.recurrence.conv(x_tc, states, self._weight_kc, self._bias_c, plan, activated=activated)


def short_conv_buffers(
    layers: int, units: int, hidden: int, kernel: int, dtype: torch.dtype, shard: Shard
) -> tuple[BufferSpec, ...]:
    """Declare the buffer of `layers` short convolutions, whose channels ranks divide by `units`."""
    return (conv_buffer("conv", layers, units, hidden // units, kernel - 1, dtype, shard),)


class ShortConv:
    """The mixer of a layer that computes out(c * convolution(b * x)), of three projections of its input (LFM2)."""

    def __init__(
        self, weights: Weights, place: LayerPlace, hidden: int, units: int, kernel: int, *, bias: bool
    ) -> None:
        channels = weights.shard.axis(units, hidden // units, "heads of a convolution")
        rows = _ranges([channels] * 3)
        bias_n = torch.cat([weights.tensor("in_proj.bias", part) for part in rows]) if bias else None
        self._in = weights.made(*weights.ranges("in_proj", rows, hidden), bias_n=bias_n)
        below = weights.scope("conv.")
        self._conv = CausalConv(below, place, ("conv",), (channels,), kernel, bias=bias, activated=False)
        self._out = weights.linear({"out_proj": hidden}, channels, bias=bias)

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        before, after, x = ctx.linear(h_mh, self._in)[: ctx.count].chunk(3, dim=1)
        return ctx.linear(ctx.padded(self._conv(before * x, ctx).mul_(after)), self._out)


_L2_EPS = 1e-6
_DELTA_CONVS = ("conv_q", "conv_k", "conv_v")


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
        for name, count, dim in zip(_DELTA_CONVS, units, dims, strict=True)
    )
    heads, groups = shape.value_heads, shape.key_heads
    return (*convs, *scan_buffers(layers, heads, groups, shape.key_dim, shape.value_dim, delta=True, shard=shard))


Projection = Callable[[Weights, DeltaShape], list[Weight]]
"""Reads this rank's weights of queries, keys, values, output gates, write strengths and decays: [rows, hidden] each."""


def separate(weights: Weights, shape: DeltaShape) -> list[Weight]:
    """The projection of Qwen3.5: ``in_proj_qkv`` (all queries, keys, then values), ``in_proj_z``, ``_b`` and ``_a``."""
    z, b = _axes(shape, weights.shard)[2], weights.shard.axis(shape.value_heads)
    parts = weights.ranges("in_proj_qkv", _conv_parts(shape, weights.shard), shape.hidden)
    parts.append(weights.weight("in_proj_z", z, shape.hidden))
    return parts + [weights.weight(f"in_proj_{name}", b, shape.hidden) for name in "ba"]


def grouped(weights: Weights, shape: DeltaShape) -> list[Weight]:
    """The projection of Qwen3-Next: ``in_proj_qkvz`` and ``in_proj_ba``, with the rows of a key head together."""
    group, shard = shape.group, weights.shard
    widths = [shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim]
    keys = shard.heads(shape.key_heads, "key heads")
    values = shard.heads(shape.value_heads, "value heads")
    first = values.start - keys.start * group
    heads = slice(first, first + len(values))

    def rows(widths: list[int]) -> list[Tensor]:
        """The rows of each part among those of this rank's key heads, [key heads, width] each."""
        return list(torch.split(torch.arange(len(keys) * sum(widths)).view(len(keys), -1), widths, dim=1))

    def of_values(rows: Tensor) -> Tensor:
        return rows.reshape(len(keys) * group, -1)[heads]

    q, k, v, z = rows(widths)
    b, a = rows([group, group])
    qkvz = weights.weight("in_proj_qkvz", shard.axis(shape.key_heads, sum(widths)), shape.hidden)
    ba = weights.weight("in_proj_ba", shard.axis(shape.key_heads, 2 * group), shape.hidden)
    parts = [select_rows(qkvz, part.flatten()) for part in (q, k, of_values(v), of_values(z))]
    return parts + [select_rows(ba, of_values(part).flatten()) for part in (b, a)]


class GatedDelta:
    """The mixer of a gated delta layer."""

    def __init__(
        self, weights: Weights, place: LayerPlace, shape: DeltaShape, eps: float, projection: Projection
    ) -> None:
        self._place, self._shape, self._eps = place, shape, eps
        parts = projection(weights, shape)
        self._widths = [part.shape[0] for part in parts]
        self._in = weights.made(*parts)
        conv = weights.scope("conv1d.")
        self._conv = CausalConv(conv, place, _DELTA_CONVS, _conv_parts(shape, weights.shard), shape.kernel, bias=False)
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


_MAMBA_CONVS = ("conv_x", "conv_b", "conv_c")


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
        for name, count, dim in zip(_MAMBA_CONVS, units, dims, strict=True)
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
        bias_n = torch.cat([weights.tensor("in_proj.bias", part) for part in rows]) if shape.in_bias else None
        self._in = weights.made(*weights.ranges("in_proj", rows, shape.hidden), bias_n=bias_n)
        ones_n = torch.ones(sum(self._widths), dtype=weights.dtype, device=weights.device)
        parts = zip(torch.split(ones_n, self._widths), shape.multipliers, strict=True)
        self._scale_n = torch.cat([ones * factor for ones, factor in parts])
        self._scaled = any(factor != 1.0 for factor in shape.multipliers)
        channels = _ranges([heads, groups, groups])
        conv = weights.scope("conv1d.")
        self._conv = CausalConv(conv, place, _MAMBA_CONVS, channels, shape.kernel, bias=shape.conv_bias)
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
