"""The decoder: Llama and Qwen3 in one class, as they differ in the norms of queries and keys alone.

Activations are [T, hidden] with all sequences of a step packed on one axis, padded to the numerics' quantum. Every
operation on them is by row. State is read and written through the gate only, one layer at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache.gate import Door
from cache.registry import BufferSpec, PoolSetSpec, PoolSpec
from contracts.model import ModelSpec
from engine.attention import Attention, AttentionPlan, muted
from engine.checkpoint import LayerWeights, Weights
from engine.numerics import Numerics
from engine.rope import RopeTable, rotate

FULL_POOL = "full"


def pool_set_spec(spec: ModelSpec, dtype: torch.dtype, page_tokens: int) -> PoolSetSpec:
    """The state that the model keeps for a position: one key and one value a layer and kv head."""
    shape = (spec.kv_heads, spec.head_dim)
    buffers = tuple(BufferSpec(name, spec.layers, shape, dtype, heads=spec.kv_heads) for name in ("k", "v"))
    return PoolSetSpec(page_tokens, (PoolSpec(FULL_POOL, buffers),))


class Decoder:
    """A model's weights with the computation of one step."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, attention: Attention, numerics: Numerics, device: torch.device
    ) -> None:
        self.spec = spec
        self.numerics = numerics
        self._weights = weights
        self._attention = attention
        self._scale = spec.head_dim**-0.5
        self._rope = RopeTable(spec.rope, spec.head_dim, weights.embed_vh.dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embed_vh.dtype

    def forward(self, tokens_m: Tensor, positions_m: Tensor, longest: int, plan: AttentionPlan, door: Door) -> Tensor:
        """Compute a step's tokens and write their state; returns the last layer's output, [M, hidden].

        `tokens_m` and `positions_m` are [M] int64: the plan's T queries, then padding to whole quanta, which is
        computed like the rest and written nowhere. `longest` is the largest position plus one.
        """
        x_mh = self._weights.embed_vh[tokens_m]
        cos, sin = self._rope.at(positions_m, longest)
        for number, layer in enumerate(self._weights.layers):
            buffers = door.layer(number)
            h_mh = self._norm(x_mh, layer.input_norm_h)
            x_mh = x_mh + self._attend(layer, h_mh, cos, sin, plan, buffers["k"], buffers["v"])
            h_mh = self._norm(x_mh, layer.mlp_norm_h)
            x_mh = x_mh.add_(self._mlp(layer, h_mh))
        return x_mh

    def guarded(self, plan: AttentionPlan, epochs_e: Tensor) -> tuple[AttentionPlan, Tensor]:
        """Find the sequences whose pages have been given away ([B] bool), and a plan in which they write nothing.

        `epochs_e` is the epoch of each page now, [pages] int32 on the compute device.
        """
        stale_b = self._attention.stale(plan, epochs_e)
        if stale_b.is_cpu and not stale_b.any():
            return plan, stale_b
        return muted(plan, stale_b), stale_b

    def logits(self, x_nh: Tensor) -> Tensor:
        """Logits of some rows of `forward`'s result: [n, vocab] float32."""
        rows = len(x_nh)
        padded = self.numerics.padded(rows)
        if padded > rows:
            x_nh = torch.cat((x_nh, x_nh.new_zeros(padded - rows, x_nh.shape[1])))
        h_nh = self._norm(x_nh, self._weights.norm_h)
        return self.numerics.linear(h_nh, self._weights.head)[:rows].float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last axis, in float32, rounded before the weight as transformers does."""
        y = x.float()
        variance = y.square().mean(-1, keepdim=True)
        return (y * variance.add_(self.spec.rms_eps).rsqrt_()).to(x.dtype).mul_(weight)

    def _attend(
        self,
        layer: LayerWeights,
        h_mh: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: AttentionPlan,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> Tensor:
        spec = self.spec
        qkv = self.numerics.linear(h_mh, layer.qkv).view(len(h_mh), -1, spec.head_dim)
        qk, v = torch.split(qkv, [spec.heads + spec.kv_heads, spec.kv_heads], dim=1)
        if layer.qk_norm_nd is not None:
            qk = self._norm(qk, layer.qk_norm_nd)
        q, k = torch.split(rotate(qk, cos, sin), [spec.heads, spec.kv_heads], dim=1)
        count = len(plan.slots_t)
        entry = (-1, spec.kv_heads, spec.head_dim)
        k, v = k[:count], v[:count]
        if plan.muted_t is not None:
            k, v = (x.masked_fill(plan.muted_t.view(-1, 1, 1), 0.0) for x in (k, v))
        k_pages.view(entry).index_copy_(0, plan.slots_t, k)
        v_pages.view(entry).index_copy_(0, plan.slots_t, v)
        out = self._attention.attend(q[:count], k_pages, v_pages, plan, self._scale).reshape(count, -1)
        if len(h_mh) > count:
            out = torch.cat((out, out.new_zeros(len(h_mh) - count, out.shape[1])))
        return self.numerics.linear(out, layer.out)

    def _mlp(self, layer: LayerWeights, h_mh: Tensor) -> Tensor:
        gate, up = self.numerics.linear(h_mh, layer.gate_up).chunk(2, dim=-1)
        activated = silu(gate.float()).to(gate.dtype)
        return self.numerics.linear(activated.mul_(up), layer.down)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in float32, the same bits for an element wherever it lies.

    Not torch's silu or sigmoid: their vector lanes and their scalar tails round differently, and where a tail falls
    depends on the number of rows and threads. exp and a quotient are the same everywhere.
    """
    return x / torch.exp(-x).add_(1.0)
