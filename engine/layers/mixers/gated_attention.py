"""Attention by head with a gate on its output, as in the full-attention layers of Qwen3-Next."""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS
from twinpool.engine.layers.forward_context import ForwardContext, LayerPlace
from twinpool.engine.layers.mixers.head_attention import store
from twinpool.engine.layers.norm import rms_norm, sigmoid
from twinpool.engine.layers.rope import RopeTable, rotate
from twinpool.engine.tensors.weight_loader import Weights


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
        rope_dim: int,
        eps: float,
        bias: bool = False,
    ) -> None:
        shard = weights.shard
        self._place, self._rope, self._eps = place, rope, eps
        self._dim, self._rope_dim = head_dim, rope_dim
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
        turned = rotate(qk[..., : self._rope_dim], *ctx.rope(self._rope))
        qk = torch.cat((turned, qk[..., self._rope_dim :]), dim=2)[: ctx.count]
        q, k = torch.split(qk, [self._heads, self._kv], dim=1)
        store(buffers["k"], k, plan)
        store(buffers["v"], v[: ctx.count].reshape(ctx.count, -1, dim), plan)
        out = ctx.attention.attend(q, buffers["k"], buffers["v"], plan, self._scores)
        gated = out.mul_(sigmoid(gate[: ctx.count].float()).to(out.dtype))
        return ctx.linear(ctx.padded(gated.flatten(1)), self._out)
