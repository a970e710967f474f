"""Attention with keys and values by head: projections, norms, rope, the store into pages, and the output projection.

Attention by head with a gate on its output, as in the full-attention layers of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.cache.pool.pool_set import LayerBuffers
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS, AttentionPlan
from twinpool.engine.attention.kv_quantization import kv_scales, store, with_scales
from twinpool.engine.layers.decoder import ForwardContext, LayerPlace
from twinpool.engine.layers.norm import rms_norm, sigmoid, square_sum
from twinpool.engine.layers.rope import RopeTable, halves_apart, rotate_first
from twinpool.engine.native.current_kernels import in_use, native_for
from twinpool.engine.tensors.shard import Shard, ShardAxis
from twinpool.engine.tensors.weight_loader import Weights


def kv_buffers(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, shard: Shard, codes: torch.dtype | None
) -> tuple[BufferSpec, ...]:
    """Declare buffers ``k`` and ``v`` of `layers` layers, with the heads of one rank. `codes`: the dtype that they are
    quantised to, with buffers of scales; None: they are kept in `dtype`."""
    here = shard.heads(kv_heads, "key-value heads")
    plain = tuple(
        BufferSpec(name, layers, (len(here), head_dim), dtype, heads=kv_heads, first_head=here.start)
        for name in ("k", "v")
    )
    return with_scales(plain, codes)


@dataclass(frozen=True)
class QkNorm:
    """How queries and keys are normed."""

    eps: float
    names: tuple[str, str] = ("q_norm", "k_norm")
    """Their weights are [head_dim], with `whole` [heads * head_dim]."""
    whole: bool = False
    """Over all heads together, those of other ranks too; else by head."""
    after_rope: bool = False
    dtype: torch.dtype | None = None
    """That of the weights; None: the model's. A float32 weight multiplies before the rounding."""


@dataclass(frozen=True)
class QkvLayout:
    """How a checkpoint lays out the projections of attention."""

    fused: str = ""
    """The name of one weight with the rows of queries, keys and values."""
    interleaved: bool = False
    """Whether rope turns neighbours (2i, 2i + 1), not the halves of what it turns. Rows are read in the order in which
    they are halves: scores are sums over a head's dimensions, whatever their order."""
    out: str = "o_proj"


PLAIN = QkvLayout()


class HeadAttention:
    """Causal attention over keys and values by head: multi-head, grouped-query or multi-query."""

    def __init__(
        self,
        weights: Weights,
        place: LayerPlace,
        rope: RopeTable | None,
        *,
        hidden: int,
        inputs: int = 0,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        out_bias: bool = False,
        layout: QkvLayout = PLAIN,
        qk_norm: QkNorm | None = None,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        query_factors: Callable[[ForwardContext], Tensor] | None = None,
    ) -> None:
        """`inputs`: the width of what queries, keys and values are made of; 0: `hidden`.
        `rope`: None: no rotation. `scale`: the factor on scores; None: ``head_dim**-0.5``. `window`: how many
        positions a query sees; 0: all. `softcap`: as in `ScoreOptions`. `sinks`: each head has a learned attention sink
        (arXiv 2309.17453). `query_factors`: factors [M] on the rotated queries of a step."""
        shard = weights.shard
        self._place, self._rope, self._dim = place, rope, head_dim
        self._heads, self._kv = len(shard.heads(heads)), len(shard.heads(kv_heads, "key-value heads"))
        q, kv = shard.axis(heads, head_dim), shard.axis(kv_heads, head_dim)
        orders = {}
        if layout.interleaved and rope is not None:
            order_d = halves_apart(rope.dim, head_dim)
            orders = {name: _by_head(order_d, n) for name, n in (("q_proj", self._heads), ("k_proj", self._kv))}
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self._qkv = weights.linear(rows, inputs or hidden, bias=bias, fused=layout.fused, orders=orders, adapts=True)
        self._out = weights.linear({layout.out: hidden}, q, bias=out_bias, adapts=True)
        sinks_h = weights.tensor("sinks", shard.axis(heads), dtype=torch.float32) if sinks else None
        scale = head_dim**-0.5 if scale is None else scale
        self._scores = ScoreOptions(scale, window, softcap, sinks_h)
        self._factors = query_factors
        self._norm = qk_norm
        if qk_norm is not None:
            assert not orders, "weights of norms are in the order of the checkpoint's rows"
            read = self._whole_norms if qk_norm.whole else self._norms_by_head
            self._norm_weight = torch.cat(read(weights, qk_norm, q, kv))
        self._triton = weights.triton
        if in_use():
            return  # The C++ kernels' attention has no batched products to probe.
        for k, n in ((head_dim, BLOCK_TOKENS), (BLOCK_TOKENS, head_dim)):
            weights.products.extend((batch, k, n) for batch in (self._kv, 5 * self._kv))

    def _norms_by_head(self, weights: Weights, norm: QkNorm, q: ShardAxis, kv: ShardAxis) -> list[Tensor]:
        read = (weights.tensor(f"{name}.weight", self._dim, dtype=norm.dtype) for name in norm.names)
        return [weight_d.expand(heads, -1) for weight_d, heads in zip(read, (self._heads, self._kv), strict=True)]

    def _whole_norms(self, weights: Weights, norm: QkNorm, q: ShardAxis, kv: ShardAxis) -> list[Tensor]:
        # A key head that several ranks hold is in the sum over all of them as often.
        widths = q.whole, weights.shard.size * kv.count
        self._widths_2 = torch.tensor(widths, dtype=torch.float32, device=weights.device)
        self._divided = q.divided
        axes = zip(norm.names, (q, kv), strict=True)
        return [weights.tensor(f"{name}.weight", axis, dtype=norm.dtype) for name, axis in axes]

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        plan, buffers = ctx.plans[self._place.pool], ctx.buffers(self._place)
        scales, qkv_mn = kv_scales(buffers), ctx.linear(h_mh, self._qkv)
        if self._norm is not None and self._norm.whole:
            qkv_mn = self._normed(qkv_mn, ctx, self._norm.eps)
        q = self._queries(qkv_mn, ctx, plan, buffers, quantised=scales is not None)
        if self._factors is not None:
            q = q * self._factors(ctx)[: ctx.count, None, None].to(q.dtype)
        out = ctx.attention.attend(q, buffers["k"], buffers["v"], plan, self._scores, scales)
        return ctx.linear(ctx.padded(out.reshape(ctx.count, -1)), self._out)

    def _normed(self, qkv_mn: Tensor, ctx: ForwardContext, eps: float) -> Tensor:
        """Norm all queries of a row together, and all its keys."""
        q, k, v = torch.split(qkv_mn, [n * self._dim for n in (self._heads, self._kv, self._kv)], dim=1)
        squares_m2 = torch.stack((square_sum(q), square_sum(k)), dim=1)
        if self._divided:
            squares_m2 = ctx.sum(squares_m2)
        factor_m2 = squares_m2.div_(self._widths_2).add_(eps).rsqrt_()
        normed, weight = torch.cat((q * factor_m2[:, :1], k * factor_m2[:, 1:]), dim=1), self._norm_weight
        wide = weight.dtype == torch.float32
        normed = normed.mul_(weight).to(v.dtype) if wide else normed.to(v.dtype).mul_(weight)
        return torch.cat((normed, v), dim=1)

    def _queries(
        self, qkv_mn: Tensor, ctx: ForwardContext, plan: AttentionPlan, buffers: LayerBuffers, *, quantised: bool
    ) -> Tensor:
        """Norm and rotate queries and keys, store keys and values; returns the queries, [T, heads, head_dim]."""
        turns = ctx.rope(self._rope) if self._rope is not None else None
        norm = None if self._norm is None or self._norm.whole else self._norm
        norm_nd, eps = (self._norm_weight, norm.eps) if norm is not None else (None, 0.0)
        late = norm is not None and norm.after_rope and turns is not None
        k_pages, v_pages = buffers["k"], buffers["v"]
        kernels = None if late else native_for(qkv_mn)
        if kernels is not None and turns is not None:
            slots_t, muted_t = plan.slots_t, plan.muted_t
            if quantised:  # The kernel leaves them in the model's dtype, in pages of one token.
                k_pages, v_pages = qkv_mn.new_empty(2, ctx.count, 1, self._kv, self._dim)
                slots_t, muted_t = torch.arange(ctx.count), None
            q = kernels.rope_and_store(qkv_mn, norm_nd, eps, *turns, k_pages, v_pages, slots_t, muted_t, self._heads)
            if quantised:
                store(buffers, "k", k_pages[:, 0], plan)
                store(buffers, "v", v_pages[:, 0], plan)
            return q
        if self._triton and not late:
            from twinpool.engine.layers.mixers.triton_store_heads import store_heads

            return store_heads(qkv_mn[: ctx.count], norm_nd, eps, turns, k_pages, v_pages, plan.slots_t, plan.muted_t)
        qkv = qkv_mn.view(len(qkv_mn), -1, self._dim)
        qk, v = torch.split(qkv, [self._heads + self._kv, self._kv], dim=1)
        if norm_nd is not None and not late:
            qk = rms_norm(qk, norm_nd, eps)
        if turns is not None:
            qk = rotate_first(qk, *turns)
        if norm_nd is not None and late:
            qk = rms_norm(qk, norm_nd, eps)
        q, k = torch.split(qk, [self._heads, self._kv], dim=1)
        store(buffers, "k", k[: ctx.count], plan)
        store(buffers, "v", v[: ctx.count], plan)
        return q[: ctx.count]


def _by_head(order_d: Tensor, heads: int) -> Tensor:
    """The order of the rows of some heads, [heads * head_dim], of the order within one."""
    return (torch.arange(heads)[:, None] * len(order_d) + order_d).flatten()


class GatedAttention:
    """Grouped-query attention; rope rotates the first dimensions of a head, and sigmoid(gate) multiplies the output.

    The rows of ``q_proj`` are the query's, then the gate's, head after head. Queries and keys are normed by head, with
    weights that are stored around zero (one is added to them).
    """

    def __init__(
        self,
        weights: Weights,
        place: LayerPlace,
        rope: RopeTable,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        bias: bool = False,
    ) -> None:
        shard = weights.shard
        self._place, self._rope, self._eps = place, rope, eps
        self._dim = head_dim
        self._heads, self._kv = len(shard.heads(heads)), len(shard.heads(kv_heads, "key-value heads"))
        q, kv = shard.axis(heads, 2 * head_dim), shard.axis(kv_heads, head_dim)
        self._qkv = weights.linear({"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, bias=bias, adapts=True)
        self._out = weights.linear({"o_proj": hidden}, shard.axis(heads, head_dim), bias=bias, adapts=True)
        self._scores = ScoreOptions(head_dim**-0.5)
        norms = [weights.tensor(f"{name}.weight", head_dim).float() + 1.0 for name in ("q_norm", "k_norm")]
        self._qk_norm_nd = torch.cat((norms[0].expand(self._heads, -1), norms[1].expand(self._kv, -1)))
        for k, n in ((head_dim, BLOCK_TOKENS), (BLOCK_TOKENS, head_dim)):
            weights.products.extend((batch, k, n) for batch in (self._kv, 5 * self._kv))

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        plan, buffers = ctx.plans[self._place.pool], ctx.buffers(self._place)
        rows, dim = ctx.linear(h_mh, self._qkv), self._dim
        wide, k, v = torch.split(rows, [2 * self._heads * dim, self._kv * dim, self._kv * dim], dim=1)
        q, gate = wide.reshape(len(h_mh), -1, 2 * dim).chunk(2, dim=2)
        qk = rms_norm(torch.cat((q, k.reshape(len(h_mh), -1, dim)), dim=1), self._qk_norm_nd, self._eps)
        qk = rotate_first(qk, *ctx.rope(self._rope))[: ctx.count]
        q, k = torch.split(qk, [self._heads, self._kv], dim=1)
        store(buffers, "k", k, plan)
        store(buffers, "v", v[: ctx.count].reshape(ctx.count, -1, dim), plan)
        out = ctx.attention.attend(q, buffers["k"], buffers["v"], plan, self._scores, kv_scales(buffers))
        gated = out.mul_(sigmoid(gate[: ctx.count].float()).to(out.dtype))
        return ctx.linear(ctx.padded(gated.flatten(1)), self._out)
