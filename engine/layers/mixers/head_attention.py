"""Attention with keys and values by head: projections, norms, rope, the store into pages, and the output projection.

Attention by head with a gate on its output, as in the full-attention layers of Qwen3-Next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec
from twinpool.cache.pool.load_gate import LayerBuffers
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS, AttentionPlan
from twinpool.engine.attention.kv_quantization import kv_scales, store, with_scales
from twinpool.engine.layers.decoder import ForwardContext, LayerPlace
from twinpool.engine.layers.norm import rms_norm, sigmoid
from twinpool.engine.layers.rope import RopeTable, rotate_first
from twinpool.engine.native.current_kernels import in_use, native_for
from twinpool.engine.tensors.shard import Shard
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


class HeadAttention:
    """Causal attention over keys and values by head: multi-head, grouped-query or multi-query."""

    def __init__(
        self,
        weights: Weights,
        place: LayerPlace,
        rope: RopeTable | None,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        scale: float | None = None,
        window: int = 0,
        sinks: bool = False,
    ) -> None:
        """`rope`: None: no rotation. `qk_norm_eps`: queries and keys are normed by head before rope, with this epsilon.
        `scale`: the factor on scores; None: ``head_dim**-0.5``. `window`: how many positions a query sees; 0: all.
        `sinks`: each head has a learned attention sink (arXiv 2309.17453)."""
        shard = weights.shard
        self._place, self._rope, self._dim = place, rope, head_dim
        self._heads, self._kv = len(shard.heads(heads)), len(shard.heads(kv_heads, "key-value heads"))
        q, kv = shard.axis(heads, head_dim), shard.axis(kv_heads, head_dim)
        self._qkv = weights.linear({"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, bias=bias)
        self._out = weights.linear({"o_proj": hidden}, q, bias=out_bias)
        sinks_h = weights.tensor("sinks", shard.axis(heads), dtype=torch.float32) if sinks else None
        self._scores = ScoreOptions(head_dim**-0.5 if scale is None else scale, window, sinks_h=sinks_h)
        self._eps = qk_norm_eps
        if qk_norm_eps is not None:
            q_norm, k_norm = weights.tensor("q_norm.weight", head_dim), weights.tensor("k_norm.weight", head_dim)
            self._qk_norm_nd = torch.cat((q_norm.expand(self._heads, -1), k_norm.expand(self._kv, -1)))
        self._triton = weights.triton
        if in_use():
            return  # The C++ kernels' attention has no batched products to probe.
        for k, n in ((head_dim, BLOCK_TOKENS), (BLOCK_TOKENS, head_dim)):
            weights.products.extend((batch, k, n) for batch in (self._kv, 5 * self._kv))

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        plan, buffers = ctx.plans[self._place.pool], ctx.buffers(self._place)
        scales = kv_scales(buffers)
        q = self._queries(ctx.linear(h_mh, self._qkv), ctx, plan, buffers, quantised=scales is not None)
        out = ctx.attention.attend(q, buffers["k"], buffers["v"], plan, self._scores, scales)
        return ctx.linear(ctx.padded(out.reshape(ctx.count, -1)), self._out)

    def _queries(
        self, qkv_mn: Tensor, ctx: ForwardContext, plan: AttentionPlan, buffers: LayerBuffers, *, quantised: bool
    ) -> Tensor:
        """Norm and rotate queries and keys, store keys and values; returns the queries, [T, heads, head_dim]."""
        turns = ctx.rope(self._rope) if self._rope is not None else None
        norm_nd, eps = (self._qk_norm_nd if self._eps is not None else None), self._eps or 0.0
        k_pages, v_pages = buffers["k"], buffers["v"]
        kernels = native_for(qkv_mn)
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
        if self._triton:
            from twinpool.engine.layers.mixers.triton_store_heads import store_heads

            return store_heads(qkv_mn[: ctx.count], norm_nd, eps, turns, k_pages, v_pages, plan.slots_t, plan.muted_t)
        qkv = qkv_mn.view(len(qkv_mn), -1, self._dim)
        qk, v = torch.split(qkv, [self._heads + self._kv, self._kv], dim=1)
        if norm_nd is not None:
            qk = rms_norm(qk, norm_nd, self._eps or 0.0)
        if turns is not None:
            qk = rotate_first(qk, *turns)
        q, k = torch.split(qk, [self._heads, self._kv], dim=1)
        store(buffers, "k", k[: ctx.count], plan)
        store(buffers, "v", v[: ctx.count], plan)
        return q[: ctx.count]


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
        self._qkv = weights.linear({"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, bias=bias)
        self._out = weights.linear({"o_proj": hidden}, shard.axis(heads, head_dim), bias=bias)
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
